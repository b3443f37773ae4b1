import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.command import run_cluster
from cluster.job_command import load_job
from cluster.render import render, to_yaml
from cluster.schema import load_schemas
from cluster.spec import load_cluster
from cluster.types import KubeManifest, Outcome
from cluster.validate import check, load_manifests
from pipelines.cli import command_line
from pos2distill.errors import ExitCode, UserError
from scripts.render_presets import PRESETS, RENDERED
from tests.support.manifests import changed
from tests.support.paths import PROJECT

CLUSTER = "spec.rayClusterSpec"
HEAD = f"{CLUSTER}.headGroupSpec"
SAMPLING, TRAINING = (f"{CLUSTER}.workerGroupSpecs[{index}]" for index in (0, 1))
POD = "template.spec"
RAY = f"{POD}.containers[0]"


@pytest.fixture(scope="module")
def job() -> KubeManifest:
    return render(
        load_cluster("eks"),
        load_job("nq_llama3_8b", ["data.path=s3://bucket/nq.jsonl.gz", "runtime.trainers.workers=8"]),
    )[-1]


@pytest.mark.parametrize("name", PRESETS)
def test_check_accepts_every_preset(name: str) -> None:
    manifests = load_manifests(RENDERED / f"{name}.yaml")
    assert manifests
    assert check(manifests) == []


@pytest.mark.parametrize("name", PRESETS)
def test_check_with_crds_accepts_every_preset(name: str, crds: str) -> None:
    manifests = load_manifests(RENDERED / f"{name}.yaml")
    assert manifests
    assert check(manifests, crds) == []


# --- the schema


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.shutdownAfterJobFinish", True, "shutdownAfterJobFinish: unknown field; did you mean 'shutdownAfterJob"),
        ("spec.backoffLimit", "2", "spec.backoffLimit: expected an integer, got a string"),
        (f"{CLUSTER}.autoscalerOptions.version", "v3", "autoscalerOptions.version: expected one of: v1, v2; set one"),
        (f"{SAMPLING}.idleTimeoutSecond", 60, "idleTimeoutSecond: unknown field; did you mean 'idleTimeoutSeconds'?"),
        (f"{SAMPLING}.groupName", ..., "groupName: missing; add it"),
        (f"{SAMPLING}.resources.sampler", 1, "resources.sampler: expected a string (in quotes), got a number"),
        (f"{SAMPLING}.{POD}.tolerations", {}, "tolerations: expected a list, got a mapping"),
        (
            f"{SAMPLING}.{RAY}.resources.limits.cpu",
            "many",
            "limits.cpu: is not a valid quantity; expected for example 4",
        ),
        (f"{SAMPLING}.{RAY}.volumeMount", [], "volumeMount: unknown field; did you mean 'volumeMounts'?"),
        (f"{HEAD}.template", ..., "headGroupSpec.template: missing; add it"),
    ],
)
def test_check_schema_reports_a_violation(job: KubeManifest, crds: str, path: str, value: Any, message: str) -> None:
    lines = [finding.line("job.yaml") for finding in check([changed(job, path, value)], crds)]
    assert any(message in line for line in lines), lines


def test_check_schema_does_not_require_fields_with_a_default(job: KubeManifest, crds: str) -> None:
    assert check([changed(job, f"{TRAINING}.maxReplicas", ...)], crds) == []


@pytest.fixture
def crd(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "rayjobs.json") -> Path:
        schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": {"suspend": {}}}}}
        document = {
            "kind": "CustomResourceDefinition",
            "spec": {
                "names": {"kind": "RayJob"},
                "versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}],
            },
        }
        path = tmp_path / name
        path.write_text(json.dumps(document) if name.endswith("json") else yaml.safe_dump(document))
        return path

    return write


@pytest.mark.parametrize("name", ["rayjobs.json", "ray.io_rayjobs.yaml"])
def test_load_schemas_reads_crds_of_kubectl_and_of_the_chart(
    crd: Callable[..., Path], job: KubeManifest, name: str
) -> None:
    lines = [finding.line("job.yaml") for finding in check([job], str(crd(name)))]
    assert "error: job.yaml: document 1, RayJob/nq-llama3: spec.entrypoint: unknown field" in "\n".join(lines)
    assert set(load_schemas(str(crd(name)))) == {("ray.io/v1", "RayJob")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder; set --crds to the CRDs of KubeRay"),
        ("{}", "no schema of RayJob or RayCluster; set --crds to the CRDs of KubeRay"),
        ("{", "cannot be read as a CRD"),
    ],
)
def test_load_schemas_rejects_files_without_crds(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "crds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_schemas(str(path))


# --- run_cluster


def test_run_cluster_render_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster", "render", "gke", "quickstart", "spec.sampling.max=3", "training.epochs=1"]
    assert command_line.main(words) == 0
    printed = capsys.readouterr().out
    assert "maxReplicas: 3" in printed
    assert "study quickstart training.epochs=1 " in printed
    assert command_line.main([*words, "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "nq-mistral.yaml").read_text() == printed
    assert capsys.readouterr().out == f"{tmp_path}/new/nq-mistral.yaml\n"


def test_run_cluster_render_writes_nothing_that_breaks_a_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        command_line.main(["cluster", "render", "gke", "spec.training.node.gpus=16", "--out", str(tmp_path / "new")])
        == 2
    )
    assert "16 GPUs, but a2-highgpu-8g has 8" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_run_cluster_validate_reports_every_violation(
    job: KubeManifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(to_yaml([changed(changed(job, "spec.backoffLimit", -1), f"{SAMPLING}.minReplicas", 99)]))
    assert command_line.main(["cluster", "validate", str(path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith(f"error: {path}: document 1, RayJob/nq-llama3: spec.") for line in errors)


def test_run_cluster_validate_reports_what_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["cluster", "validate", "onprem"]) == 0
    assert capsys.readouterr().out == "6 manifests are valid (rules only; to check the schema too, set --crds)\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["render", "gek"], "gek: no such cluster spec; did you mean 'gke'?"),
        (["render", "gke", "spec.sampling.mx=1"], "sampling.mx: unknown field; did you mean 'max'?"),
        (
            ["render", "gke", "sampling.max=1"],
            "sampling.max=1: expected the recipe before all settings; to change the spec, write spec.sampling.max=1",
        ),
        (
            ["validate", "gke", "quickstart", "sampling.max=1"],
            "sampling.max=1: is a setting of the spec; write spec.sampling.max=1",
        ),
        (["validate", "MANIFESTS", "quickstart"], "contains manifests, which take no recipe and no overrides"),
        (["render", "gke", "--out", "run.py"], "--out: cannot write run.py/nq-mistral.yaml (File exists); choose"),
        (
            ["validate", "gke", "--crds", "/nowhere"],
            "/nowhere: no such file or folder; set --crds to the CRDs of KubeRay",
        ),
    ],
)
def test_run_cluster_user_error_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        {"MANIFESTS": str(RENDERED / "gke.yaml"), "run.py": str(PROJECT / "run.py")}.get(word, word) for word in words
    ]
    message = message.replace("run.py", str(PROJECT / "run.py"))
    assert command_line.main(["cluster", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_run_cluster_imports_no_heavy_packages() -> None:
    code = (
        "import sys\nfrom pipelines.cli import command_line\n"
        "command_line.main(['cluster', 'validate', 'gke', 'quickstart'])\n"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'deepspeed'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_run_cluster_validate_prints_findings_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["cluster", "validate", "onprem", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"manifests": 6, "findings": [], "exit_code": 0}
    assert printed.err == "6 manifests are valid (rules only; to check the schema too, set --crds)\n"
    assert command_line.main(["cluster", "validate", "onprem", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")

    faulty = tmp_path / "faulty.yaml"
    faulty.write_text((RENDERED / "gke.yaml").read_text().replace("backoffLimit: 2", "backoffLimit: true"))
    assert command_line.main(["cluster", "validate", str(faulty), "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "manifests": 6,
        "findings": [
            {
                "level": "error",
                "document": 6,
                "object": "RayJob/nq-mistral",
                "field": "spec.backoffLimit",
                "message": "expected an integer, got true or false",
            }
        ],
        "exit_code": 2,
    }
    assert printed.err.startswith(f"error: {faulty}: document 6, RayJob/nq-mistral: spec.backoffLimit: expected")


def test_run_cluster_render_has_no_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is refused for it, also where the manifests are."""
    assert run_cluster("render", "gke", []).summary is None
    assert run_cluster("render", "gke", ["spec.training.node.gpus=16"]) == Outcome(ExitCode.USER_ERROR)
    assert "16 GPUs, but a2-highgpu-8g has 8" in capsys.readouterr().err


def test_run_cluster_validate_prints_warnings_of_a_spec_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster", "validate", "gke", "nq_mistral_7b", "data.path=gs://b/nq.jsonl", WORKERS, DISKLESS, "--json"]
    assert command_line.main(words) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["level"], finding["document"], finding["object"], finding["field"]) == ("warning", None, None, None)
    assert "training.node.disk" in finding["message"]


# --- the server

WORKERS = "runtime.trainers.workers=8"
DISKLESS = "spec.training.node.disk=null"
WORD = "hunter2"  # in the position of a password

REFUSALS = f"""\
Warning: resource rayjobs/nq-llama3 is missing the annotation
Error from server (BadRequest): error when creating "STDIN": RayJob in version "v1" cannot be handled as a RayJob
Error from server (Forbidden): admission webhook denied https://me:{WORD}@host
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Path]:
    """`kubectl(errors, exit_code)` puts a kubectl on the PATH that prints them; returns the file with its arguments."""

    def script(errors: str, exit_code: int) -> Path:
        (tmp_path / "errors").write_text(errors)
        (tmp_path / "kubectl").write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/applied\n'
            f"cat {tmp_path}/errors >&2\nexit {exit_code}\n"
        )
        (tmp_path / "kubectl").chmod(0o755)
        return tmp_path / "arguments"

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return script


def test_run_cluster_validate_asks_the_server(
    kubectl: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = kubectl("", 0)
    assert command_line.main(["cluster", "validate", "kind", "quickstart", "--server"]) == 0
    assert capsys.readouterr().out == (
        "6 manifests are valid (rules only; to check the schema too, set --crds, and the server accepts them)\n"
    )
    assert "--dry-run=server --validate=strict" in arguments.read_text()
    assert len(list(yaml.safe_load_all((arguments.parent / "applied").read_text()))) == 6


def test_run_cluster_validate_reports_what_the_server_rejects(
    kubectl: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl(REFUSALS, 1)
    assert command_line.main(["cluster", "validate", "kind", "quickstart", "--server"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        'error: kind: Error from server (BadRequest): error when creating "STDIN": RayJob in version "v1" cannot be '
        "handled as a RayJob",
        "error: kind: Error from server (Forbidden): admission webhook denied https://me:***@host",
    ]
    kubectl("", 3)
    assert command_line.main(["cluster", "validate", "kind", "quickstart", "--server"]) == 2
    assert capsys.readouterr().err == "error: kind: kubectl apply: exit code 3\n"


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        (
            "Get localhost:8080: connection refused",
            "kubectl: no cluster is configured; choose one with `kubectl config use-context NAME`, or set KUBECONFIG",
        ),
        (
            "Unable to connect to the server: dial tcp 10.0.0.5:443: i/o timeout",
            "kubectl apply: Unable to connect to the server: dial tcp 10.0.0.5:443: i/o timeout",
        ),
        (
            "error: error validating data: failed to download openapi: the server has asked for credentials",
            "kubectl apply: error validating data: failed to download openapi: the server has asked for credentials",
        ),
    ],
)
def test_run_cluster_validate_needs_a_server_that_answers(
    kubectl: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str], errors: str, message: str
) -> None:
    kubectl(errors, 1)
    assert command_line.main(["cluster", "validate", "kind", "quickstart", "--server"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("spec.pods.env={RAY_REDIS_ADDRESS: 'r:6379'}", "pods.env: RAY_REDIS_ADDRESS is set automatically; remove it"),
        ("spec.pods.env={REDIS_USERNAME: me}", "pods.env: REDIS_USERNAME is set automatically; remove it"),
        (
            "spec.head.node_selector={pool: a b}",
            "head.node_selector: 'a b' is not a valid label; use at most 63",
        ),
        (
            "spec.training.node.gpus=16",
            "16 GPUs, but a2-highgpu-8g has 8, so that the pod would wait forever; lower it",
        ),
        ("spec.job.queue=Research", "job.queue: "),
    ],
)
def test_run_cluster_render_checks_what_a_spec_is_rendered_to(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["cluster", "render", "gke", override]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert all(line.startswith(("error: ", "policy: gke: document ")) for line in printed.err.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [
                "gke",
                "nq_mistral_7b",
                "data.path=gs://b/x",
                "runtime.trainers.workers=8",
                "spec.training.node.disk=null",
            ],
            "training.node.disk: not set, so it is not checked whether the machines hold the 159Gi that a pod writes "
            "(model, trained model, checkpoint); set what `kubectl describe node` shows as Allocatable",
        ),
        (
            ["gke", "spec.model_billions=7", "spec.sampling.node.disk=null"],
            "sampling.node.disk: not set, so it is not checked whether the machines hold the 77Gi that a pod",
        ),
        (
            ["gke", "spec.storage.url=s3://b/runs"],
            "pods.secrets: machines of platform gke may have no rights for s3://, and no variable names credentials; "
            "set AWS_ACCESS_KEY_ID",
        ),
        (
            [
                "eks",
                "quickstart",
                "runtime.storage=gs://b/runs",
                "spec.training.node={gpus: 0, cpus: 8, memory: 64Gi, disk: 100Gi}",
                "spec.sampling.node={gpus: 0, cpus: 8, memory: 64Gi, disk: 100Gi}",
            ],
            "pods.secrets: machines of platform karpenter may have no rights for gs://, and no variable names",
        ),
        (
            ["gke", "spec.pods={service_account_annotations: {iam.gke.io/gcp-service-acount: a@b.c}}"],
            "pods.service_account_annotations: iam.gke.io/gcp-service-account is not set, so the pods have no rights "
            "for gs:// unless the new ServiceAccount or the machines have them; set it",
        ),
        (
            ["eks", "spec.pods={}"],
            "pods.service_account_annotations: eks.amazonaws.com/role-arn is not set, so the pods have no rights for",
        ),
        (
            [
                "eks",
                "spec.history={image: 'kuberay/collector:v1.7.1', region: eu-central-1}",
                "spec.pods.env={AWS_ENDPOINT_URL: 'https://store.example.org', AWS_REGION: eu-central-1}",
            ],
            "history: KubeRay's collector does not get AWS_ENDPOINT_URL of pods.env, so that it may not reach s3://; "
            "use the cloud's own store with the rights of the ServiceAccount, or remove it",
        ),
        (
            [
                "gke",
                "spec.history={image: 'kuberay/collector:v1.7.1', region: eu-central-1}",
                "spec.storage.url=s3://b/runs",
                "spec.pods.secrets=[{env: AWS_ACCESS_KEY_ID, secret: s, key: k}]",
                "spec.pods.env={AWS_ENDPOINT_URL: 'https://store.example.org'}",
            ],
            "history: KubeRay's collector does not get AWS_ACCESS_KEY_ID of pods.secrets and AWS_ENDPOINT_URL of pods.",
        ),
        (
            ["gke", "spec.network.egress=[{cidr: 0.0.0.0/0}]"],
            "network.egress: no rule lets the pods ask the metadata server, from which they get their rights for "
            "gs://; add {cidr: 169.254.169.254/32, ports: [80]}",
        ),
        (
            [
                "eks",
                "spec.storage.url=s3://b/runs",
                "spec.pods.service_account=ml",
                "spec.pods.service_account_annotations={}",
            ],
            "network.egress: no rule lets the pods ask the agent of EKS Pod Identity; if ServiceAccount ml has its "
            "rights from it, add {cidr: 169.254.170.23/32, ports: [80]}",
        ),
        (
            ["gke", "nq_mistral_7b", "data.path=gs://b/x", "runtime.trainers.workers=4"],
            "runtime.trainers.workers: 4 workers need about 43 GB of GPU memory each, 4.3 GB of it for activations, "
            "but a GPU of a2-highgpu-8g has 40 GB; use more workers, or lower runtime.trainers.micro_batch_tokens",
        ),
        (
            ["gke", "quickstart"],
            "training.node.gpus: quickstart uses no GPU of these machines; use machines without GPUs",
        ),
    ],
)
def test_run_cluster_render_warns_of_what_only_the_cluster_can_tell(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["cluster", "render", *words]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"warning: {words[0]}: {message}")
    assert printed.err.count("\n") == 1
    assert "kind: Ray" in printed.out


@pytest.mark.parametrize(
    ("preset", "words"),
    [(preset, []) for preset in ("gke", "eks", "onprem", "kind")]
    + [
        ("gke", ["spec.storage.url=s3://b/runs", "spec.pods.secrets=[{env: AWS_ACCESS_KEY_ID, secret: s, key: k}]"]),
        ("gke", ["spec.model_billions=7"]),
        ("gke", ["spec.history={image: 'kuberay/collector:v1.7.1'}"]),
        ("gke", ["spec.pods={service_account: mine}"]),
        (
            "gke",
            ["spec.pods={env: {GOOGLE_APPLICATION_CREDENTIALS: /scratch/x}}", "spec.network.egress=[{cidr: '::/0'}]"],
        ),
        ("onprem", ["spec.model_billions=7"]),
        ("kind", ["quickstart"]),
    ],
)
def test_run_cluster_render_of_a_preset_warns_of_nothing(
    preset: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["cluster", "render", preset, *words]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("apiVersion: v1\nkind: A\non: 1\n", "line 3: the key 'on' is not a string; put it in quotes"),
        (f"kind: A\nspec: 0x{'f' * 5000}\n", "line 2: a number of more than 1000 characters"),
        ("kind: A\nkind: B\n", "line 2: the key 'kind' appears twice; remove one"),
        ("kind: A\n---\n[]\n", "document 2 is not a manifest; expected apiVersion, kind, metadata and spec"),
        (
            "kind: List\nitems: [{kind: A}, 5]\n",
            "document 2 is not a manifest; expected apiVersion, kind, metadata",
        ),
        ("kind: List\nitems: []\n", "is a List without items, as kubectl prints where nothing is found"),
        ("kind: [\n", "not valid YAML: line 2: did not find expected node content"),
    ],
    ids=lambda text: text[:60],
)
def test_run_cluster_validate_rejects_a_file_that_it_cannot_read(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert command_line.main(["cluster", "validate", str(path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {path}: {message}")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "document", [{"kind": "CustomResourceDefinition"}, {"kind": "CustomResourceDefinition", "spec": {"names": []}}]
)
def test_load_schemas_rejects_a_broken_crd(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "crds.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(UserError, match=r"crds.yaml: cannot be read as a CRD: its kind or schema is missing"):
        load_schemas(str(path))


def test_check_names_an_object_in_another_namespace() -> None:
    manifests = render(load_cluster("gke"))
    manifests[1] = changed(manifests[1], "metadata.namespace", "default")
    lines = [finding.line("job.yaml") for finding in check(manifests)]
    assert lines == [
        "policy: job.yaml: document 2, NetworkPolicy/nq-mistral: metadata.namespace: is not pos2distill, that of the "
        "other objects of this cluster; set it"
    ]


def test_load_schemas_reads_a_list_of_crds(crd: Callable[..., Path], job: KubeManifest, tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"kind": "List", "items": [json.loads(crd().read_text())]}))
    assert set(load_schemas(str(path))) == {("ray.io/v1", "RayJob")}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("spec.samplng.max=3", "command line: spec.samplng: unknown field; did you mean 'sampling'?"),
        ("spec.sampling.mxa=3", "command line: spec.sampling.mxa: unknown field; did you mean 'max'?"),
        ("spec.claim=mine", "command line: spec.claim: unknown field; did you mean 'spec.storage.claim'?"),
        (" spec.sampling.mxa = 3", "command line: spec.sampling.mxa: unknown field; did you mean 'max'?"),
        ("spec.head.image=a/b:1", "command line: spec.head.image: unknown field; did you mean 'spec.image'?"),
        ("spec.pods.env.0=x", "command line: spec.pods.env: '0' is not a valid name of an environment variable"),
        ("spec.pods.secrets.0=x", "spec.pods.secrets.0: 'secrets' is a list and has no fields"),
        ("spec.sampling.max=many", "command line: spec.sampling.max: input should be a valid integer"),
        ("spec.training.spot=true", "command line: spec.training.spot: the loss of one training node"),
        ("spec.name.x=1", "spec.name.x: 'name' is a single value and has no fields"),
        ("spec.sampling.max=[", "spec.sampling.max: cannot read the value"),
        ("spec.sampling", "spec.sampling: expected spec.section.field=value"),
    ],
)
def test_run_cluster_names_a_setting_of_the_spec_as_typed(
    setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["cluster", "render", "gke", "nq_mistral_7b", setting]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}")
    assert printed.count("\n") == 1
