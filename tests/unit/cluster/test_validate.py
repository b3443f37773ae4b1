import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.render import render, to_yaml
from cluster.schema import load_schemas
from cluster.spec import load_cluster
from cluster.types import KubeManifest
from cluster.validate import check, load_manifests
from pipelines import command_line
from pos2distill.errors import UserError
from scripts.render_presets import PRESETS, RENDERED
from tests.support.crds import write_crds
from tests.support.paths import PUBLISHED_CRDS

CHECKOUT = Path(command_line.__file__).parents[1]
needs_published_crds = pytest.mark.skipif(
    not PUBLISHED_CRDS.is_dir(),
    reason=f"no CRD schemas at {PUBLISHED_CRDS}; set POS2DISTILL_CRDS to a folder with them",
)

CLUSTER = "spec.rayClusterSpec"
HEAD = f"{CLUSTER}.headGroupSpec"
SAMPLING, TRAINING = (f"{CLUSTER}.workerGroupSpecs[{index}]" for index in (0, 1))
POD = "template.spec"
RAY = f"{POD}.containers[0]"


@pytest.fixture(scope="module", params=["stand-in", pytest.param("published", marks=needs_published_crds)])
def crds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A path with schemas of RayJob and RayCluster: the stand-in, and KubeRay's own where they are present."""
    if request.param == "published":
        return str(PUBLISHED_CRDS)
    return str(write_crds(tmp_path_factory.mktemp("crds") / "crds.yaml"))


@pytest.fixture(scope="module")
def job() -> KubeManifest:
    return render(load_cluster("eks"), "nq_llama3_8b", ["data.path=s3://bucket/nq.jsonl.gz"])[-1]


def changed(manifest: KubeManifest, path: str, value: Any) -> KubeManifest:
    """A copy with one value set, or removed where the value is `...`."""
    manifest = copy.deepcopy(manifest)
    parts = [part for part in path.replace("[", "|[").replace(".", "|").replace("~", ".").split("|") if part]
    inner: Any = manifest
    for part in parts[:-1]:
        inner = inner[int(part[1:-1])] if part.startswith("[") else inner.setdefault(part, {})
    last = parts[-1]
    key: Any = int(last[1:-1]) if last.startswith("[") else last
    if value is ...:
        del inner[key]
    else:
        inner[key] = value
    return manifest


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


# --- the rules, one violation each. In a path, ~ is a dot inside a name.

RULES: list[tuple[str, Any, str]] = [
    ("kind", "RayJbo", "kind: 'RayJbo' is not supported; did you mean 'RayJob'?"),
    ("kind", "RayCronJob", "kind: RayCronJob requires a feature gate that is off by default; use a RayJob"),
    ("apiVersion", "ray.io/v1alpha1", "apiVersion: is 'ray.io/v1alpha1', but RayJob is served as ray.io/v1; set that"),
    ("metadata.name", "a" * 48, "metadata.name: has 48 characters; shorten it to 47"),
    ("metadata.name", "9lives", "metadata.name: '9lives' is not a valid DNS label; use a to z"),
    ("metadata.labels.team", "a b", "metadata.labels.team: 'a b' is not a valid label; use at most"),
    ("spec.entrypoint", ..., "spec.entrypoint: missing; set the command"),
    ("spec.shutdownAfterJobFinishes", False, "spec.ttlSecondsAfterFinished: requires shutdownAfterJobFinishes: true"),
    (
        "metadata.labels.kueue~x-k8s~io/queue-name",
        "research",
        "queue-name: Kueue rejects clusters that autoscale; remove",
    ),
    ("spec.ttlSecondsAfterFinished", -1, "spec.ttlSecondsAfterFinished: is -1; set it to 0 or more"),
    ("spec.backoffLimit", -1, "spec.backoffLimit: is -1; set it to 0 or more"),
    ("spec.activeDeadlineSeconds", 0, "spec.activeDeadlineSeconds: is 0; set it to 1 or more"),
    ("spec.activeDeadlineSeconds", ..., "spec.activeDeadlineSeconds: missing: a job that hangs would keep its GPUs"),
    ("spec.submissionMode", "K8JobMode", "spec.submissionMode: 'K8JobMode' is unknown; did you mean 'K8sJobMode'?"),
    ("spec.submissionMode", "InteractiveMode", "spec.backoffLimit: is not supported in InteractiveMode; set 0"),
    ("spec.submissionMode", "SidecarMode", "spec.submitterPodTemplate: is not supported in SidecarMode; remove it"),
    ("spec.clusterSelector", {"ray.io/cluster": "x"}, "spec.backoffLimit: a retry creates a new cluster, but cluster"),
    ("spec.rayClusterSpec", ..., "spec.rayClusterSpec: missing; describe the job's cluster"),
    (
        "spec.deletionStrategy",
        {"deletionRules": [{"policy": "DeleteCluster"}]},
        "spec.deletionStrategy.deletionRules: are not supported with shutdownAfterJobFinishes; remove one",
    ),
    (
        "spec.deletionStrategy",
        {"deletionRules": [{"policy": "DeleteWorkers"}]},
        "deletionRules[0].policy: DeleteWorkers is not supported with autoscaling; use DeleteCluster",
    ),
    ("spec.managedBy", "me", "spec.managedBy: expected ray.io/kuberay-operator or kueue.x-k8s.io/multikueue"),
    ("spec.runtimeEnvYAML", "a: [", "spec.runtimeEnvYAML: is not valid YAML; fix it"),
    (f"{CLUSTER}.rayVersion", ..., "rayVersion: missing: authOptions requires it; set the version in the image"),
    (f"{CLUSTER}.rayVersion", "2.51.0", "rayVersion: authOptions requires Ray 2.52 or newer, got 2.51.0; use a newer"),
    (f"{CLUSTER}.rayVersion", "new", "rayVersion: 'new' is not a valid version; expected for example 2.60.0"),
    (f"{CLUSTER}.authOptions", ..., "authOptions.mode: anyone who can reach the head may run code on it; set token"),
    (
        f"{CLUSTER}.authOptions.enableK8sTokenAuth",
        True,
        "enableK8sTokenAuth: is not supported for the cluster of a job",
    ),
    (f"{CLUSTER}.networkPolicy", {}, "networkPolicy: requires a feature gate that is off by default"),
    (f"{CLUSTER}.tlsOptions", {}, "tlsOptions: requires a feature gate that is off by default"),
    (f"{CLUSTER}.upgradeStrategy", {}, "upgradeStrategy: is not supported for the cluster of a job; remove it"),
    (f"{CLUSTER}.gcsFaultToleranceOptions", {"redisAddress": "r"}, "does not survive a retry of the job; remove it"),
    (f"{CLUSTER}.enableInTreeAutoscaling", False, "enableInTreeAutoscaling: is off, so that 'sampling' never grows"),
    (f"{CLUSTER}.autoscalerOptions.version", "v1", "idleTimeoutSeconds: requires autoscaler v2; set"),
    (
        f"{HEAD}.{RAY}.env",
        [{"name": "RAY_enable_autoscaler_v2", "value": "1"}],
        "RAY_enable_autoscaler_v2 repeats autoscalerOptions.version; remove the variable",
    ),
    (
        f"{HEAD}.{POD}.restartPolicy",
        "Always",
        "restartPolicy: is Always, but autoscaler v2 replaces pods itself; set Never",
    ),
    (f"{HEAD}.rayStartParams.num-cpus", "4", 'rayStartParams.num-cpus: the head must not run work; set "0"'),
    (f"{HEAD}.rayStartParams.num-cpus", ..., 'rayStartParams.num-cpus: the head must not run work; set "0"'),
    (f"{HEAD}.{RAY}.resources.limits.nvidia~com/gpu", "1", "the head runs no work and needs no GPU; remove it"),
    (f"{HEAD}.labels", {"pool": "trainer"}, "headGroupSpec.labels: the head must not be in a pool; remove pool"),
    (f"{HEAD}.labels", ..., "headGroupSpec.labels.routing: missing: work would be placed on nodes of any pool; set"),
    (f"{SAMPLING}.minReplicas", 99, "minReplicas: 99 is more than maxReplicas, 16; lower it"),
    (f"{SAMPLING}.replicas", 99, "replicas: 99 is not between minReplicas and maxReplicas; set 0"),
    (f"{SAMPLING}.numOfHosts", 2, "numOfHosts: is 2, but a replica must be one node; set 1"),
    (f"{SAMPLING}.groupName", "training", "groupName: 'training' is used twice; rename one"),
    (f"{SAMPLING}.suspend", True, "suspend: is not supported with autoscaling; set maxReplicas: 0 instead"),
    (
        f"{SAMPLING}.rayStartParams.labels",
        "a=b",
        "rayStartParams.labels: KubeRay does not support labels here; move them",
    ),
    (f"{SAMPLING}.rayStartParams.num-gpus", "1", "rayStartParams.num-gpus: is not supported together with"),
    (f"{SAMPLING}.resources.sampler", 1, "resources.sampler: is not a string; put it in quotes"),
    (f"{SAMPLING}.labels.ray-subcluster", ..., "labels: no work is placed on this group; set ray-subcluster: sampling"),
    (f"{SAMPLING}.labels.ray-subcluster", "smapling", "ray-subcluster: 'smapling' is not a pool; set sampling"),
    (f"{SAMPLING}.resources", ..., "resources.sampler: missing on nodes for sampling; set one for each GPU"),
    (f"{SAMPLING}.resources.trainer", "1", "provides both sampling and training; make two groups of it"),
    (f"{TRAINING}.labels.ray-subcluster", "sampling", "ray-subcluster: with this label, training never gets its nodes"),
    (f"{TRAINING}.labels.pool", ..., "labels.pool: missing on nodes for training; set trainer"),
    (f"{TRAINING}.resources", ..., "resources.trainer: missing on nodes for training; set one for each"),
    (f"{TRAINING}.labels.ray~io/market-type", "spot", "training must not use spot machines, since the loss of one"),
    (f"{TRAINING}.{RAY}.resources.limits.nvidia~com/gpu", ..., "missing: training needs GPUs; set the number of a pod"),
    (
        f"{SAMPLING}.{POD}.nodeSelector",
        {"nvidia.com/gpu.count": "0"},
        "1 GPUs, but the selected machines have 0, so that the pod would wait forever; lower it",
    ),
    (
        f"{TRAINING}.{POD}.nodeSelector.node~kubernetes~io/instance-type",
        "g6.12xlarge",
        "8 GPUs, but g6.12xlarge has 4, so that the pod would wait forever",
    ),
    (f"{SAMPLING}.{RAY}.resources.requests.cpu", "1", "requests.cpu: 1 is not the limit, 14; make them equal"),
    (f"{SAMPLING}.{RAY}.resources.limits.memory", ..., "limits.memory: missing: Ray takes the size of its node from"),
    (f"{SAMPLING}.{RAY}.image", "repo/p:latest", "image: 'repo/p:latest' may change between pods; name a version"),
    (f"{SAMPLING}.{RAY}.env[0]", {"name": "HF_TOKEN", "value": "hunter2"}, "'HF_TOKEN' looks like a secret in clear"),
    (f"{SAMPLING}.{RAY}.args", ["--key=hf_abcdefghijklmnopqrst"], "args[0]: contains what looks like a secret; use"),
    (f"{SAMPLING}.{RAY}.volumeMounts[0].name", "tpm", "volumeMounts[0].name: there is no volume 'tpm'; add it"),
    (f"{SAMPLING}.{RAY}.volumeMounts", [], "volumeMounts: Ray writes to /tmp, which is read-only; mount an emptyDir"),
    (
        f"{SAMPLING}.{RAY}.securityContext.readOnlyRootFilesystem",
        ...,
        "readOnlyRootFilesystem: writable by default; set",
    ),
    (f"{SAMPLING}.{RAY}.securityContext.allowPrivilegeEscalation", ..., "allowPrivilegeEscalation: allowed by default"),
    (f"{SAMPLING}.{RAY}.securityContext.capabilities", ..., "capabilities.drop: capabilities are kept by default; set"),
    (f"{SAMPLING}.{RAY}.securityContext.privileged", True, "privileged: gives the container all rights on the host"),
    (f"{SAMPLING}.{POD}.securityContext.runAsNonRoot", ..., "runAsNonRoot: missing: the pod may run as root; set true"),
    (f"{SAMPLING}.{POD}.securityContext.runAsUser", 0, "securityContext.runAsUser: 0 is root; set for example 1000"),
    (f"{SAMPLING}.{POD}.securityContext.seccompProfile", ..., "seccompProfile: missing: every system call is allowed"),
    (f"{SAMPLING}.{POD}.initContainers", [{"name": "a", "image": "b"}], "initContainers[0].image: 'b' may change"),
    (f"{CLUSTER}.autoscalerOptions.securityContext", ..., "autoscalerOptions.securityContext.readOnlyRootFilesystem"),
    (
        f"{TRAINING}.{POD}.terminationGracePeriodSeconds",
        500,
        "must be a number below terminationGracePeriodSeconds, 500",
    ),
    (f"{TRAINING}.{RAY}.env", [], "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S is missing: work stops after 30 s; set"),
    (f"{SAMPLING}.{POD}.hostNetwork", True, "hostNetwork: gives the pod access to the host; remove it"),
    (f"{SAMPLING}.{POD}.containers", [], "containers: missing; a pod requires the Ray container"),
]


@pytest.mark.parametrize(("path", "value", "message"), RULES)
def test_check_reports_a_broken_rule(job: KubeManifest, path: str, value: Any, message: str) -> None:
    lines = check([changed(job, path, value)])
    assert any(message in line for line in lines), lines
    for line in lines:
        assert "\n" not in line
        assert line.count(": ") >= 2  # manifest, path, message
        assert "hunter2" not in line
        assert "hf_abc" not in line


def test_check_requires_a_queued_job_to_release_its_quota(job: KubeManifest) -> None:
    queued = changed(job, "metadata.labels.kueue~x-k8s~io/queue-name", "research")
    lines = check([changed(queued, "spec.shutdownAfterJobFinishes", False)])
    assert any("shutdownAfterJobFinishes: a job in a Kueue queue must release" in line for line in lines)


def test_check_accepts_an_elastic_job_that_autoscales(job: KubeManifest) -> None:
    queued = changed(job, "metadata.labels.kueue~x-k8s~io/queue-name", "research")
    assert check([changed(queued, "metadata.annotations", {"kueue.x-k8s.io/elastic-job": "true"})]) == []


def test_check_requires_a_suspended_job_to_shut_down(job: KubeManifest) -> None:
    suspended = changed(changed(job, "spec.suspend", True), "spec.shutdownAfterJobFinishes", False)
    assert any(
        "spec.suspend: requires that the cluster is deleted after the job" in line for line in check([suspended])
    )


def test_check_priority_requires_a_new_ray(job: KubeManifest) -> None:
    assert check([changed(job, f"{SAMPLING}.priority", 5)]) == []
    old = changed(changed(job, f"{SAMPLING}.priority", 5), f"{CLUSTER}.rayVersion", "2.55.0")
    assert any("priority: requires rayVersion 2.56 or newer" in line for line in check([old]))


def test_check_accepts_redis_for_a_cluster_without_a_job() -> None:
    cluster = render(load_cluster("onprem"))[-1]
    assert check([changed(cluster, "spec.gcsFaultToleranceOptions", {"redisAddress": "redis:6379"})]) == []
    twice = changed(cluster, "spec.headGroupSpec.template.spec.containers[0].env", [{"name": "RAY_REDIS_ADDRESS"}])
    twice = changed(twice, "spec.gcsFaultToleranceOptions", {"redisAddress": "redis:6379"})
    assert any("env: RAY_REDIS_ADDRESS repeats gcsFaultTolerance" in line for line in check([twice]))
    rocks = changed(cluster, "spec.gcsFaultToleranceOptions", {"backend": "rocksdb"})
    assert any("rocksdb requires a feature gate that is off by default; use redis" in line for line in check([rocks]))


def test_check_reports_a_repeated_name(job: KubeManifest) -> None:
    assert any("metadata.name: is used twice; rename one of the manifests" in line for line in check([job, job]))


def test_check_handles_values_of_the_wrong_type(job: KubeManifest) -> None:
    for path, value, message in (
        ("kind", ["RayJob"], "kind: '['RayJob']' is not supported"),
        ("metadata.labels", {1: "a"}, "metadata.labels.1: is not a string; put it in quotes"),
        (f"{SAMPLING}.{POD}.volumes[0].name", [], "there is no volume 'tmp'; add it to the pod's volumes"),
    ):
        assert any(message in line for line in check([changed(job, path, value)]))
    groups: dict[str, Any] = {"workerGroupSpecs": [None, 1, {}]}
    specs: tuple[Any, ...] = (None, [], "x", {"rayClusterSpec": []}, {"rayClusterSpec": groups})
    for spec in specs:
        manifest = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "a"}, "spec": spec}
        assert check([manifest])


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
    lines = check([changed(job, path, value)], crds)
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
    lines = check([job], str(crd(name)))
    assert any("RayJob/nq-llama3: spec.entrypoint: unknown field" in line for line in lines)
    assert set(load_schemas(str(crd(name)))) == {"RayJob"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder; set --crds to the CRDs of KubeRay"),
        ("{}", "no schema of RayJob or RayCluster; set --crds to the CRDs of KubeRay"),
        ("{", "cannot be read as a CRD"),
    ],
)
def test_load_schemas_refuses_files_without_crds(tmp_path: Path, content: str | None, message: str) -> None:
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
    assert all(line.startswith("error: RayJob/nq-llama3: spec.") for line in errors)


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
            "sampling.max=1: expected a recipe first; to change the spec, write spec.sampling.max=1",
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
        {"MANIFESTS": str(RENDERED / "gke.yaml"), "run.py": str(CHECKOUT / "run.py")}.get(word, word) for word in words
    ]
    message = message.replace("run.py", str(CHECKOUT / "run.py"))
    assert command_line.main(["cluster", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_run_cluster_imports_no_heavy_packages() -> None:
    code = (
        "import sys\nfrom pipelines import command_line\n"
        "command_line.main(['cluster', 'validate', 'gke', 'quickstart'])\n"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'deepspeed'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
