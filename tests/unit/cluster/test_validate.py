import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import run
from cluster.render import render, to_yaml
from cluster.schema import load_schemas
from cluster.spec import load_cluster
from cluster.validate import check, load_manifests
from pos2distill.errors import UserError
from scripts.render_presets import PRESETS, RENDERED
from tests.support.crds import write_crds
from tests.support.paths import PUBLISHED_CRDS

Manifest = dict[str, Any]

CHECKOUT = Path(run.__file__).parent
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
def job() -> Manifest:
    return render(load_cluster("eks"), "nq_llama3_8b", ["data.path=s3://bucket/nq.jsonl.gz"])[-1]


def changed(manifest: Manifest, place: str, value: Any) -> Manifest:
    """A copy with one value set, or removed where the value is `...`."""
    manifest = copy.deepcopy(manifest)
    parts = [part for part in place.replace("[", "|[").replace(".", "|").replace("~", ".").split("|") if part]
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
def test_every_example_keeps_the_rules(name: str) -> None:
    manifests = load_manifests(RENDERED / f"{name}.yaml")
    assert manifests
    assert check(manifests) == []


@pytest.mark.parametrize("name", PRESETS)
def test_every_example_keeps_to_the_schema(name: str, crds: str) -> None:
    manifests = load_manifests(RENDERED / f"{name}.yaml")
    assert manifests
    assert check(manifests, crds) == []


# --- one fault each. In a place, ~ stands for a dot inside a name.

RULES: list[tuple[str, Any, str]] = [
    ("kind", "RayJbo", "kind: 'RayJbo' is not known here; did you mean 'RayJob'?"),
    ("kind", "RayCronJob", "kind: RayCronJob is behind a gate that is off by default; use a RayJob"),
    ("apiVersion", "ray.io/v1alpha1", "apiVersion: is 'ray.io/v1alpha1', but RayJob is served as ray.io/v1; set that"),
    ("metadata.name", "a" * 48, "metadata.name: has 48 characters; shorten it to 47"),
    ("metadata.name", "9lives", "metadata.name: '9lives' is no DNS label; use a to z"),
    ("metadata.labels.team", "a b", "metadata.labels.team: 'a b' is no label; use letters"),
    ("spec.entrypoint", ..., "spec.entrypoint: missing; give the command"),
    ("spec.shutdownAfterJobFinishes", False, "spec.ttlSecondsAfterFinished: has no effect alone; set shutdown"),
    (
        "metadata.labels.kueue~x-k8s~io/queue-name",
        "research",
        "queue-name: Kueue refuses clusters that autoscale; leave",
    ),
    ("spec.ttlSecondsAfterFinished", -1, "spec.ttlSecondsAfterFinished: is -1; set it to 0 or more"),
    ("spec.backoffLimit", -1, "spec.backoffLimit: is -1; set it to 0 or more"),
    ("spec.activeDeadlineSeconds", 0, "spec.activeDeadlineSeconds: is 0; set it to 1 or more"),
    ("spec.activeDeadlineSeconds", ..., "spec.activeDeadlineSeconds: missing: a job that hangs would keep its GPUs"),
    ("spec.submissionMode", "K8JobMode", "spec.submissionMode: 'K8JobMode' is unknown; did you mean 'K8sJobMode'?"),
    ("spec.submissionMode", "InteractiveMode", "spec.backoffLimit: does not go with InteractiveMode; set 0"),
    ("spec.submissionMode", "SidecarMode", "spec.submitterPodTemplate: does not go with SidecarMode; remove it"),
    ("spec.clusterSelector", {"ray.io/cluster": "x"}, "spec.backoffLimit: a retry makes a new cluster, but cluster"),
    ("spec.rayClusterSpec", ..., "spec.rayClusterSpec: missing; describe the job's cluster"),
    (
        "spec.deletionStrategy",
        {"deletionRules": [{"policy": "DeleteCluster"}]},
        "spec.deletionStrategy.deletionRules: does not go with shutdownAfterJobFinishes; remove one",
    ),
    (
        "spec.deletionStrategy",
        {"deletionRules": [{"policy": "DeleteWorkers"}]},
        "deletionRules[0].policy: DeleteWorkers does not go with autoscaling; use DeleteCluster",
    ),
    ("spec.managedBy", "me", "spec.managedBy: expected ray.io/kuberay-operator or kueue.x-k8s.io/multikueue"),
    ("spec.runtimeEnvYAML", "a: [", "spec.runtimeEnvYAML: is no YAML; mend it"),
    (f"{CLUSTER}.rayVersion", ..., "rayVersion: missing: authOptions needs it; give the image's version"),
    (f"{CLUSTER}.rayVersion", "2.51.0", "rayVersion: authOptions needs Ray 2.52 or newer, got 2.51.0; use a newer"),
    (f"{CLUSTER}.rayVersion", "new", "rayVersion: 'new' is no version; expected for example 2.60.0"),
    (f"{CLUSTER}.authOptions", ..., "authOptions.mode: whoever reaches the head may run code on it; set token"),
    (f"{CLUSTER}.authOptions.enableK8sTokenAuth", True, "enableK8sTokenAuth: is refused on the cluster of a job"),
    (f"{CLUSTER}.networkPolicy", {}, "networkPolicy: is behind a gate that is off by default"),
    (f"{CLUSTER}.tlsOptions", {}, "tlsOptions: is behind a gate that is off by default"),
    (f"{CLUSTER}.upgradeStrategy", {}, "upgradeStrategy: is refused on the cluster of a job; remove it"),
    (f"{CLUSTER}.gcsFaultToleranceOptions", {"redisAddress": "r"}, "does not survive a job's retry; remove it"),
    (f"{CLUSTER}.enableInTreeAutoscaling", False, "enableInTreeAutoscaling: off, so 'sampling' never grows"),
    (f"{CLUSTER}.autoscalerOptions.version", "v1", "idleTimeoutSeconds: of a group needs autoscaler v2; set"),
    (
        f"{HEAD}.{RAY}.env",
        [{"name": "RAY_enable_autoscaler_v2", "value": "1"}],
        "RAY_enable_autoscaler_v2 says again what autoscalerOptions.version says; remove the variable",
    ),
    (
        f"{HEAD}.{POD}.restartPolicy",
        "Always",
        "restartPolicy: is Always; autoscaler v2 replaces pods itself, set Never",
    ),
    (f"{HEAD}.rayStartParams.num-cpus", "4", 'rayStartParams.num-cpus: the head is not to get work; set "0"'),
    (f"{HEAD}.rayStartParams.num-cpus", ..., 'rayStartParams.num-cpus: the head is not to get work; set "0"'),
    (f"{HEAD}.{RAY}.resources.limits.nvidia~com/gpu", "1", "the head does no work and wants no GPU; remove it"),
    (f"{HEAD}.labels", {"pool": "trainer"}, "headGroupSpec.labels: the head is of no pool; remove pool"),
    (f"{HEAD}.labels", ..., "headGroupSpec.labels.routing: missing: work would be placed on nodes of any pool; set"),
    (f"{SAMPLING}.minReplicas", 99, "minReplicas: 99 is more than maxReplicas, 16; lower it"),
    (f"{SAMPLING}.replicas", 99, "replicas: 99 is not between minReplicas and maxReplicas; set 0"),
    (f"{SAMPLING}.numOfHosts", 2, "numOfHosts: is 2, but a replica here is one node; set 1"),
    (f"{SAMPLING}.groupName", "training", "groupName: 'training' is there twice; rename one"),
    (f"{SAMPLING}.suspend", True, "suspend: does not go with autoscaling; set maxReplicas: 0 instead"),
    (f"{SAMPLING}.rayStartParams.labels", "a=b", "rayStartParams.labels: KubeRay refuses labels here; move them to"),
    (f"{SAMPLING}.rayStartParams.num-gpus", "1", "rayStartParams.num-gpus: does not go with"),
    (f"{SAMPLING}.resources.sampler", 1, "resources.sampler: is no text; put it in quotes"),
    (f"{SAMPLING}.labels.ray-subcluster", ..., "labels: no work finds this group; set ray-subcluster: sampling"),
    (f"{SAMPLING}.labels.ray-subcluster", "smapling", "ray-subcluster: 'smapling' is no pool; set sampling"),
    (f"{SAMPLING}.resources", ..., "resources.sampler: missing on nodes that sample; set one for each GPU"),
    (f"{SAMPLING}.resources.trainer", "1", "offers sampling and training; make two groups of it"),
    (f"{TRAINING}.labels.ray-subcluster", "sampling", "ray-subcluster: on trainers, training never gets its nodes"),
    (f"{TRAINING}.labels.pool", ..., "labels.pool: missing on trainers; set trainer"),
    (f"{TRAINING}.resources", ..., "resources.trainer: missing on trainers; set one for each GPU"),
    (f"{TRAINING}.labels.ray~io/market-type", "spot", "trainers on spot machines: losing one stops all; use on demand"),
    (f"{TRAINING}.{RAY}.resources.limits.nvidia~com/gpu", ..., "missing: training wants GPUs; say how many a pod has"),
    (
        f"{SAMPLING}.{POD}.nodeSelector",
        {"nvidia.com/gpu.count": "0"},
        "1 GPUs, but machines with 0 GPUs: the pod would wait for ever; lower it or choose another machine",
    ),
    (
        f"{TRAINING}.{POD}.nodeSelector.node~kubernetes~io/instance-type",
        "g6.12xlarge",
        "8 GPUs, but g6.12xlarge has 4: the pod would wait for ever",
    ),
    (f"{SAMPLING}.{RAY}.resources.requests.cpu", "1", "requests.cpu: 1 is not the limit, 14; make them equal"),
    (f"{SAMPLING}.{RAY}.resources.limits.memory", ..., "limits.memory: missing: Ray takes the size of its node from"),
    (f"{SAMPLING}.{RAY}.image", "repo/p:latest", "image: 'repo/p:latest' may change between pods; name a version"),
    (f"{SAMPLING}.{RAY}.env[0]", {"name": "HF_TOKEN", "value": "hunter2"}, "'HF_TOKEN' looks like a secret in clear"),
    (f"{SAMPLING}.{RAY}.args", ["--key=hf_abcdefghijklmnopqrst"], "args[0]: holds what looks like a secret in clear"),
    (f"{SAMPLING}.{RAY}.volumeMounts[0].name", "tpm", "volumeMounts[0].name: there is no volume 'tpm'; add it"),
    (f"{SAMPLING}.{RAY}.volumeMounts", [], "volumeMounts: Ray writes to /tmp, which is read-only; mount an emptyDir"),
    (f"{SAMPLING}.{RAY}.securityContext.readOnlyRootFilesystem", ..., "readOnlyRootFilesystem: open by default; set"),
    (f"{SAMPLING}.{RAY}.securityContext.allowPrivilegeEscalation", ..., "allowPrivilegeEscalation: open by default"),
    (f"{SAMPLING}.{RAY}.securityContext.capabilities", ..., "capabilities.drop: capabilities are kept; set [ALL]"),
    (f"{SAMPLING}.{RAY}.securityContext.privileged", True, "privileged: gives the pod the machine; remove it"),
    (f"{SAMPLING}.{POD}.securityContext.runAsNonRoot", ..., "runAsNonRoot: missing: the pod may run as root; set true"),
    (f"{SAMPLING}.{POD}.securityContext.runAsUser", 0, "securityContext.runAsUser: 0 is root; set for example 1000"),
    (f"{SAMPLING}.{POD}.securityContext.seccompProfile", ..., "seccompProfile: missing: every system call is open"),
    (f"{SAMPLING}.{POD}.initContainers", [{"name": "a", "image": "b"}], "initContainers[0].image: 'b' may change"),
    (f"{CLUSTER}.autoscalerOptions.securityContext", ..., "autoscalerOptions.securityContext.readOnlyRootFilesystem"),
    (
        f"{TRAINING}.{POD}.terminationGracePeriodSeconds",
        500,
        "is no number below terminationGracePeriodSeconds: the pod",
    ),
    (f"{TRAINING}.{RAY}.env", [], "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S is missing: work ends 30 s after the warning"),
    (f"{SAMPLING}.{POD}.hostNetwork", True, "hostNetwork: opens the machine to the pod; remove it"),
    (f"{SAMPLING}.{POD}.containers", [], "containers: missing; a pod needs the Ray container"),
]


@pytest.mark.parametrize(("place", "value", "message"), RULES)
def test_a_fault_is_told_with_place_and_mend(job: Manifest, place: str, value: Any, message: str) -> None:
    lines = check([changed(job, place, value)])
    assert any(message in line for line in lines), lines
    for line in lines:
        assert "\n" not in line
        assert line.count(": ") >= 2  # manifest, place, fault
        assert "hunter2" not in line
        assert "hf_abc" not in line


def test_a_queue_gets_its_quota_back(job: Manifest) -> None:
    queued = changed(job, "metadata.labels.kueue~x-k8s~io/queue-name", "research")
    lines = check([changed(queued, "spec.shutdownAfterJobFinishes", False)])
    assert any("shutdownAfterJobFinishes: a job in a Kueue queue must give back" in line for line in lines)


def test_a_job_that_kueue_lets_grow_may_autoscale(job: Manifest) -> None:
    queued = changed(job, "metadata.labels.kueue~x-k8s~io/queue-name", "research")
    assert check([changed(queued, "metadata.annotations", {"kueue.x-k8s.io/elastic-job": "true"})]) == []


def test_suspended_jobs_shut_down(job: Manifest) -> None:
    suspended = changed(changed(job, "spec.suspend", True), "spec.shutdownAfterJobFinishes", False)
    assert any("spec.suspend: needs its cluster shut down after the job" in line for line in check([suspended]))


def test_a_priority_wants_a_new_ray(job: Manifest) -> None:
    assert check([changed(job, f"{SAMPLING}.priority", 5)]) == []
    old = changed(changed(job, f"{SAMPLING}.priority", 5), f"{CLUSTER}.rayVersion", "2.55.0")
    assert any("priority: needs rayVersion 2.56 or newer" in line for line in check([old]))


def test_a_cluster_alone_may_keep_its_head_in_redis() -> None:
    cluster = render(load_cluster("onprem"))[-1]
    assert check([changed(cluster, "spec.gcsFaultToleranceOptions", {"redisAddress": "redis:6379"})]) == []
    twice = changed(cluster, "spec.headGroupSpec.template.spec.containers[0].env", [{"name": "RAY_REDIS_ADDRESS"}])
    twice = changed(twice, "spec.gcsFaultToleranceOptions", {"redisAddress": "redis:6379"})
    assert any("env: RAY_REDIS_ADDRESS says again what gcsFaultTolerance" in line for line in check([twice]))
    rocks = changed(cluster, "spec.gcsFaultToleranceOptions", {"backend": "rocksdb"})
    assert any("rocksdb is behind a gate that is off by default; use redis" in line for line in check([rocks]))


def test_a_manifest_that_is_there_twice(job: Manifest) -> None:
    assert any("metadata.name: is there twice; rename one of them" in line for line in check([job, job]))


def test_shapes_that_are_quite_wrong_are_told_and_break_nothing(job: Manifest) -> None:
    for place, value, message in (
        ("kind", ["RayJob"], "kind: '['RayJob']' is not known here"),
        ("metadata.labels", {1: "a"}, "metadata.labels.1: is no text; put it in quotes"),
        (f"{SAMPLING}.{POD}.volumes[0].name", [], "there is no volume 'tmp'; add it to the pod's volumes"),
    ):
        assert any(message in line for line in check([changed(job, place, value)]))
    groups: dict[str, Any] = {"workerGroupSpecs": [None, 1, {}]}
    specs: tuple[Any, ...] = (None, [], "x", {"rayClusterSpec": []}, {"rayClusterSpec": groups})
    for spec in specs:
        manifest = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "a"}, "spec": spec}
        assert check([manifest])


# --- the schema


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("spec.shutdownAfterJobFinish", True, "shutdownAfterJobFinish: unknown field; did you mean 'shutdownAfterJob"),
        ("spec.backoffLimit", "2", "spec.backoffLimit: expected a whole number, got a text"),
        (f"{CLUSTER}.autoscalerOptions.version", "v3", "autoscalerOptions.version: expected one of: v1, v2; set one"),
        (f"{SAMPLING}.idleTimeoutSecond", 60, "idleTimeoutSecond: unknown field; did you mean 'idleTimeoutSeconds'?"),
        (f"{SAMPLING}.groupName", ..., "groupName: missing; add it"),
        (f"{SAMPLING}.resources.sampler", 1, "resources.sampler: expected a text (in quotes), got a number"),
        (f"{SAMPLING}.{POD}.tolerations", {}, "tolerations: expected a list, got a section"),
        (f"{SAMPLING}.{RAY}.resources.limits.cpu", "many", "limits.cpu: is no quantity; expected for example 4, 500m"),
        (f"{SAMPLING}.{RAY}.volumeMount", [], "volumeMount: unknown field; did you mean 'volumeMounts'?"),
        (f"{HEAD}.template", ..., "headGroupSpec.template: missing; add it"),
    ],
)
def test_a_fault_against_the_schema_is_told_with_place_and_mend(
    job: Manifest, crds: str, place: str, value: Any, message: str
) -> None:
    lines = check([changed(job, place, value)], crds)
    assert any(message in line for line in lines), lines


def test_what_the_api_server_fills_in_may_be_left_out(job: Manifest, crds: str) -> None:
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
def test_crds_are_read_as_kubectl_and_the_chart_give_them(crd: Callable[..., Path], job: Manifest, name: str) -> None:
    lines = check([job], str(crd(name)))
    assert any("RayJob/nq-llama3: spec.entrypoint: unknown field" in line for line in lines)
    assert set(load_schemas(str(crd(name)))) == {"RayJob"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder; give the CRDs of KubeRay"),
        ("{}", "no schema of RayJob or RayCluster; give the CRDs of KubeRay"),
        ("{", "cannot be read as a CRD"),
    ],
)
def test_crds_that_are_none(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "crds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_schemas(str(path))


# --- the command line


def test_render_prints_or_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster", "render", "gke", "quickstart", "spec.sampling.max=3", "training.epochs=1"]
    assert run.main(words) == 0
    printed = capsys.readouterr().out
    assert "maxReplicas: 3" in printed
    assert "study quickstart training.epochs=1 " in printed
    assert run.main([*words, "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "nq-mistral.yaml").read_text() == printed
    assert capsys.readouterr().out == f"{tmp_path}/new/nq-mistral.yaml\n"


def test_render_writes_nothing_that_breaks_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["cluster", "render", "gke", "spec.training.node.gpus=16", "--out", str(tmp_path / "new")]) == 2
    assert "16 GPUs, but a2-highgpu-8g has 8" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_validate_tells_every_fault_and_exits_with_2(
    job: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(to_yaml([changed(changed(job, "spec.backoffLimit", -1), f"{SAMPLING}.minReplicas", 99)]))
    assert run.main(["cluster", "validate", str(path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all(line.startswith("error: RayJob/nq-llama3: spec.") for line in told)


def test_validate_says_what_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["cluster", "validate", "onprem"]) == 0
    assert capsys.readouterr().out == "6 manifests are well, by the rules; the schema only with --crds\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["render", "gek"], "gek: no such cluster spec; did you mean 'gke'?"),
        (["render", "gke", "spec.sampling.mx=1"], "sampling.mx: unknown field; did you mean 'max'?"),
        (["render", "gke", "sampling.max=1"], "sampling.max=1: a setting of which recipe? Name one, or write spec."),
        (["validate", "MANIFESTS", "quickstart"], "holds manifests, which take no recipe and no settings"),
        (["render", "gke", "--out", "run.py"], "--out: run.py/nq-mistral.yaml cannot be written (File exists); give"),
        (["validate", "gke", "--crds", "/nowhere"], "/nowhere: no such file or folder; give the CRDs of KubeRay"),
    ],
)
def test_a_user_error_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [{"MANIFESTS": str(RENDERED / "gke.yaml"), "run.py": run.__file__}.get(word, word) for word in words]
    message = message.replace("run.py", run.__file__)
    assert run.main(["cluster", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1


def test_the_cluster_needs_no_heavy_packages() -> None:
    code = (
        "import sys, run\n"
        "run.main(['cluster', 'validate', 'gke', 'quickstart'])\n"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'deepspeed', 'pipelines'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
