"""All faults together: how many there are of each level, that every rule has one, and those of docs/cluster_spec.md."""

import re
from collections import Counter

import pytest

from cluster.job_command import load_job
from cluster.render import render
from cluster.rules import manifest as rules
from cluster.rules.fields import Fields, Rule
from cluster.spec import load_cluster
from cluster.types import KubeManifest, Level
from cluster.validate import check
from tests.support.manifest_faults import ERRORS, OBJECTS, POLICIES, RISKS, WARNINGS, WORKERS
from tests.support.manifests import changed
from tests.support.paths import PROJECT

PAGE = (PROJECT / "docs" / "cluster_spec.md").read_text()
ALL_RULES = (*rules.ERRORS, *rules.POLICIES, *rules.RISKS, *rules.WARNINGS)
EXAMPLE = re.compile(r"^\| `(error|policy|warning)` \| ([^|]+) \| `([^|]+)` \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def faulty() -> list[tuple[Level, KubeManifest]]:
    """Every manifest with one fault, and the level that it is reported at."""
    manifests = render(load_cluster("eks"), load_job("nq_llama3_8b", ["data.path=s3://bucket/nq.jsonl.gz", WORKERS]))
    job = manifests[-1]
    foreign = changed(job, "metadata.labels", {})
    cases = [
        *((Level.ERROR, job, path, value) for path, value, _ in ERRORS),
        *((Level.POLICY, job, path, value) for path, value, _ in POLICIES),
        *((Level.WARNING, job, path, value) for path, value, _ in WARNINGS),
        *((Level.WARNING, foreign, path, value) for path, value, _ in RISKS),
        *((level, manifests[index], path, value) for level, index, path, value, _ in OBJECTS),
    ]
    return [(level, changed(base, path, value)) for level, base, path, value in cases]


@pytest.fixture(scope="module")
def reported(faulty: list[tuple[Level, KubeManifest]]) -> dict[Level, list[str]]:
    """The lines of each level, over all faulty manifests."""
    lines: dict[Level, list[str]] = {level: [] for level in Level}
    for _, manifest in faulty:
        for finding in check([manifest]):
            lines[finding.level].append(finding.line("job.yaml"))
    return lines


def test_faults_are_reported_at_their_level(faulty: list[tuple[Level, KubeManifest]]) -> None:
    counts = Counter(level for level, _ in faulty)
    assert all(level in {finding.level for finding in check([manifest])} for level, manifest in faulty)
    assert counts[Level.ERROR] >= 100
    assert counts[Level.POLICY] >= 150
    assert counts[Level.WARNING] >= 7


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}")
def test_every_rule_finds_a_fault(rule: Rule, faulty: list[tuple[Level, KubeManifest]]) -> None:
    assert any(list(rule(Fields("", manifest))) for _, manifest in faulty)


def test_page_has_examples_of_every_level() -> None:
    assert {level for level, _, _ in EXAMPLE.findall(PAGE)} == {str(level) for level in Level}


@pytest.mark.parametrize(("level", "fault", "message"), EXAMPLE.findall(PAGE), ids=lambda text: text[:60])
def test_example_of_the_page_is_reported(
    level: str, fault: str, message: str, reported: dict[Level, list[str]]
) -> None:
    assert any(message in line for line in reported[Level(level)])


def test_check_with_crds_loses_no_error(faulty: list[tuple[Level, KubeManifest]], crds: str) -> None:
    manifests = [manifest for level, manifest in faulty if level is Level.ERROR]
    found = [(finding.document, finding.path) for finding in check(manifests, crds) if finding.level is Level.ERROR]
    assert len(found) == len(set(found))  # one line for each field
    expected = {(finding.document, finding.path) for finding in check(manifests) if finding.level is Level.ERROR}
    assert expected - set(found) == set()
