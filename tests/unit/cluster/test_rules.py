"""Every rule, by manifests with one fault each: which level is reported, where, and how it is fixed."""

from typing import Any

import pytest

from cluster.job_command import load_job
from cluster.render import render
from cluster.rules.fields import quantity
from cluster.spec import load_cluster
from cluster.types import KubeManifest, Level
from cluster.validate import check
from tests.support.manifest_faults import (
    CLUSTER,
    COLLECTOR,
    ERRORS,
    HEAD,
    LOST_NODE,
    OBJECTS,
    POD,
    POLICIES,
    RAY,
    RISKS,
    SAMPLING,
    WARNINGS,
    WORD,
    WORKERS,
    environment,
    node_affinity,
)
from tests.support.manifests import changed

BUCKET_OF_A_SECRET = {"name": "GCS_BUCKET", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}


@pytest.fixture(scope="module")
def manifests() -> list[KubeManifest]:
    return render(load_cluster("eks"), load_job("nq_llama3_8b", ["data.path=s3://bucket/nq.jsonl.gz", WORKERS]))


@pytest.fixture(scope="module")
def job(manifests: list[KubeManifest]) -> KubeManifest:
    return manifests[-1]


def check_lines(manifest: KubeManifest, level: Level) -> list[str]:
    """The lines of this level. Every line has one form and repeats no secret."""
    lines = []
    for finding in check([manifest]):
        line = finding.line("job.yaml")
        assert line.startswith(f"{finding.level}: job.yaml: document 1, ")
        assert "\n" not in line
        assert len(line) < 1000
        assert WORD not in line
        if finding.level is level:
            lines.append(line)
    return lines


@pytest.mark.parametrize(("path", "value", "message"), ERRORS)
def test_check_reports_an_error(job: KubeManifest, path: str, value: Any, message: str) -> None:
    lines = check_lines(changed(job, path, value), Level.ERROR)
    assert any(message in line for line in lines), lines


@pytest.mark.parametrize(("path", "value", "message"), POLICIES)
def test_check_reports_a_broken_policy(job: KubeManifest, path: str, value: Any, message: str) -> None:
    faulty = changed(job, path, value)
    lines = check_lines(faulty, Level.POLICY)
    assert any(message in line for line in lines), lines
    # Policies are those of this project: without its label, no such line remains.
    foreign = changed(faulty, "metadata.labels.app~kubernetes~io/part-of", "other")
    assert check_lines(foreign, Level.POLICY) == []


@pytest.mark.parametrize(("path", "value", "message"), WARNINGS)
def test_check_reports_a_warning(job: KubeManifest, path: str, value: Any, message: str) -> None:
    findings = check([changed(job, path, value)])
    assert [finding.level for finding in findings] == [Level.WARNING]
    assert message in findings[0].line("job.yaml")


@pytest.mark.parametrize(("level", "index", "path", "value", "message"), OBJECTS)
def test_check_reports_an_object(
    manifests: list[KubeManifest], level: Level, index: int, path: str, value: Any, message: str
) -> None:
    lines = check_lines(changed(manifests[index], path, value), level)
    assert any(message in line for line in lines), lines


@pytest.mark.parametrize(("path", "value", "message"), RISKS)
def test_check_reports_a_risk_of_another_project_as_a_warning(
    job: KubeManifest, path: str, value: Any, message: str
) -> None:
    foreign = changed(job, "metadata.labels", {})
    assert check([foreign]) == []
    findings = check([changed(foreign, path, value)])
    assert [finding.level for finding in findings] == [Level.WARNING]
    assert message in findings[0].line("job.yaml")
    assert not findings[0].is_refused


def test_check_accepts_a_head_that_can_only_be_on_demand(job: KubeManifest) -> None:
    """The selector decides where the affinity allows both, and an order among taints where several are tolerated."""
    both = node_affinity("karpenter.sh/capacity-type", "In", "on-demand", "spot")
    assert check([changed(job, f"{HEAD}.{POD}.affinity", both)]) == []
    not_spot = node_affinity("cloud.google.com/gke-spot", "DoesNotExist")
    assert check([changed(job, f"{HEAD}.{POD}.affinity", not_spot)]) == []
    assert check([changed(job, f"{HEAD}.{POD}.tolerations", [*LOST_NODE, {"operator": "Exists"}])]) == []


def test_check_accepts_what_the_server_accepts(manifests: list[KubeManifest], job: KubeManifest) -> None:
    policy = manifests[1]
    path: str
    value: Any
    for path, value in (
        ("spec.egress[2].to[0].ipBlock.cidr", "10.0.0.5/8"),  # the server ignores the bits of the host
        ("spec.egress[2].to[0].ipBlock", {"cidr": "fd00::/8", "except": ["fd00:1::/32"]}),
        ("spec.egress[2].ports[0]", {"port": "https"}),
        ("spec.egress[2].ports[0]", {"protocol": "SCTP", "port": 30000, "endPort": 32767}),
        ("spec.egress[2].ports[0].protocol", ...),
    ):
        assert check_lines(changed(policy, path, value), Level.ERROR) == []
    for path, value in (
        (f"{SAMPLING}.{POD}.tolerations[0]", {"operator": "Exists"}),
        (f"{SAMPLING}.{POD}.tolerations[0]", {"key": "example.org/a", "value": "b", "effect": ""}),
        (f"{SAMPLING}.{RAY}.resources.limits.hugepages-2Mi", "64Mi"),
        (f"{SAMPLING}.{RAY}.resources.limits.rdma/hca", 1),
        (f"{SAMPLING}.template.metadata.annotations.Example~org/a", "any text\n"),
        (f"{HEAD}.{POD}.priorityClassName", "system-node-critical"),
        (COLLECTOR, {"image": "a/b:1", "env": [*environment(STORAGE_BACKEND="gcs"), BUCKET_OF_A_SECRET]}),
    ):
        assert check_lines(changed(job, path, value), Level.ERROR) == []


def test_check_requires_a_queued_job_to_release_its_quota(job: KubeManifest) -> None:
    queued = changed(job, "metadata.labels.kueue~x-k8s~io/queue-name", "research")
    lines = check_lines(changed(queued, "spec.shutdownAfterJobFinishes", False), Level.POLICY)
    assert any("shutdownAfterJobFinishes: missing: the cluster would stay after the job" in line for line in lines)


def test_check_accepts_an_elastic_job_that_autoscales(job: KubeManifest) -> None:
    queued = changed(job, "metadata.labels.kueue~x-k8s~io/queue-name", "research")
    assert check([changed(queued, "metadata.annotations", {"kueue.x-k8s.io/elastic-job": "true"})]) == []


def test_check_priority_requires_a_new_ray(job: KubeManifest) -> None:
    assert check([changed(job, f"{SAMPLING}.priority", 5)]) == []
    old = changed(changed(job, f"{SAMPLING}.priority", 5), f"{CLUSTER}.rayVersion", "2.55.0")
    assert any("priority: requires rayVersion 2.56 or newer" in line for line in check_lines(old, Level.ERROR))


def test_check_reports_a_repeated_name(job: KubeManifest) -> None:
    findings = check([job, job])
    assert [(finding.level, finding.document) for finding in findings] == [(Level.WARNING, 2)]
    assert "metadata.name: is used twice, so that only the last of the manifests stays" in findings[0].line("x")
    other = changed(job, "metadata.namespace", "other")
    generated = changed(changed(job, "metadata.name", ...), "metadata.generateName", "nq-")
    assert {finding.path for finding in check([job, other])} == {"metadata.namespace"}
    assert check([job, generated, generated]) == []


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("11000m", 11),
        (11, 11),
        ("76800Mi", 75 * 2**30),
        ("1e3", 1000),
        ("1k", 1000),
        (".5", 0.5),
        ("0.5Gi", 2**29),
        ("2E", 2 * 10**18),
        ("10E", 2**63 - 1),
        ("9" * 5000, 2**63 - 1),
        (f"-{'9' * 400}Gi", 1 - 2**63),
        *((text, None) for text in ("", "1 Gi", "Gi", "1GiB", "1e9999", "١")),
        (True, None),
        (None, None),
        ([], None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_quantity_reads_amounts_as_kubernetes_does(text: Any, amount: float | None) -> None:
    assert quantity(text) == amount
