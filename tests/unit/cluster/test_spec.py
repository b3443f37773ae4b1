from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import yaml

from cluster.render import render
from cluster.sections import READABLE
from cluster.spec import ClusterSpec, load_cluster
from cluster.types import Level
from cluster.validate import check
from pos2distill.config.read import RECIPES
from pos2distill.errors import UserError
from tests.support.minimal_spec import MINIMAL_SPEC


def test_load_cluster_fills_in_defaults(load: Callable[..., ClusterSpec]) -> None:
    spec = load("sampling.max=5")
    assert (spec.sampling.min, spec.sampling.max, spec.sampling.spot, spec.training.min) == (0, 5, True, 0)
    assert (spec.training.spot, spec.training.idle_timeout_s, spec.training.grace_s) == (False, 600, 600)
    assert (spec.sampling.idle_timeout_s, spec.sampling.grace_s) == (120, 30)
    assert (spec.ray_version, spec.pods.user, spec.job.backoff_limit, spec.data) == ("2.60.0", 1000, 2, None)


def test_load_cluster_training_defaults_give_way_to_the_spec(load: Callable[..., ClusterSpec]) -> None:
    training = load("training.grace_s=90").training
    assert (training.spot, training.idle_timeout_s, training.grace_s) == (False, 600, 90)


@pytest.mark.parametrize("name", ["gke", "eks", "onprem", "kind"])
def test_load_cluster_finds_presets_by_name(name: str) -> None:
    assert load_cluster(name).storage.url


# --- one error each, reported with its field and a remedy

WORD = "hunter2"  # in the position of a password

WRONG = [
    ("smapling.max=2", "smapling: unknown field; did you mean 'sampling'?"),
    ("sampling.node.gpu=1", "sampling.node.gpu: unknown field; did you mean 'gpus'?"),
    ("training.spot=true", "training.spot: the loss of one training node stops all workers; set false"),
    ("data={max: 1, node: {cpu: 1}}", "data.node.cpu: unknown field; did you mean 'cpus'?"),
    ("pods.secrets=[{env: A, sceret: b, key: c}]", "pods.secrets[0].sceret: unknown field; did you mean 'secret'?"),
    ("pods.secrets=[{env: A, secret: b, key: c, value: d}]", "pods.secrets[0].value: unknown field; expected one of"),
    ("name=Small", "name: expected a name of a to z, 0 to 9 and -, at most 63, for example team-a, got 'Small'"),
    ("name=default", "name: default may be the name of objects of another owner; choose another one"),
    ("name=try-head", "name: try-head may be the name of objects of another owner; choose another one"),
    (
        "network={metrics_namespace: m, pod_monitor: {app.kubernetes.io/instance: a}}",
        "network.pod_monitor: app.kubernetes.io/instance is set by `render`; remove it",
    ),
    (f"name={'a' * 48}", "name: string should have at most 47 characters"),
    (
        "image=pos2distill",
        "image: 'pos2distill' may change between pods; name a version, for example pos2distill:0.1.0",
    ),
    (
        "image=reg:5000/p:latest",
        "image: 'reg:5000/p:latest' may change between pods; name a version, for example reg:5000/p:0.1.0",
    ),
    (
        "image=reg:5000/p:nightly",
        "image: 'reg:5000/p:nightly' may change between pods; name a version, for example reg:5000/p:0.1.0",
    ),
    ("ray_version=2.51.0", "ray_version: the image has Ray 2.60, as requirements/gpu.txt, got 2.51.0"),
    ("ray_version=2.61.0", "ray_version: the image has Ray 2.60, as requirements/gpu.txt, got 2.61.0"),
    ("storage={url: /mnt/storage/../../tmp/x, claim: c}", "storage.url: /mnt/storage/../../tmp/x: expected a path wi"),
    ("storage.url=gs://bucket/../x", "storage.url: gs://bucket/../x: expected a path without '..'"),
    ("storage={url: /etc/x, claim: c, mount: /etc}", "storage.mount: /etc is reserved; choose another folder, for"),
    ("storage={url: /usr/x, claim: c, mount: /usr/lib}", "storage.mount: /usr/lib is reserved; choose another folder"),
    (
        "storage={url: /x, claim: c, mount: /mnt/../etc}",
        "storage.mount: expected an absolute folder, for example /mnt/storage",
    ),
    ("storage={url: /opt/x, claim: c, mount: /opt}", "pods.project: the volume at /opt hides /opt/pos2distill; mount"),
    (
        "storage={url: /opt/pos2distill/runs, claim: c, mount: /opt/pos2distill/runs}",
        "pods.project: the volume at /opt/pos2distill/runs hides /opt/pos2distill; mount it elsewhere",
    ),
    ("sampling.grace_s=3600", "sampling.grace_s: 3600, but a spot machine ends 30 s after its notice; lower it"),
    ("pods.env={PATH: /bin}", "pods.env: PATH of the image must stay as it is; remove it"),
    ("pods.env={NVIDIA_VISIBLE_DEVICES: none}", "pods.env: NVIDIA_VISIBLE_DEVICES of the image must stay as it is"),
    ("pods.env={HF_HOME: /opt/hf}", "pods.env: HF_HOME: set pods.model_cache to a folder of one of pods.volumes"),
    ("pods.project=/opt/$(id)", "pods.project: expected an absolute folder, for example /mnt/storage"),
    ("pods.project=/opt/../x", "pods.project: expected an absolute folder, for example /mnt/storage"),
    ("pods.model_cache=/models", "pods.model_cache: /models is not below the mount of a writable volume"),
    (
        "pods={volumes: [{claim: m, mount: /models, read_only: true}], model_cache: /models}",
        "pods.model_cache: /models is not below the mount of a writable volume",
    ),
    (
        "pods.volumes=[{claim: a, mount: /m}, {claim: b, mount: /m/}]",
        "pods.volumes: two are mounted at /m; choose another folder for one of them",
    ),
    ("pods.volumes=[{claim: a, mount: /usr}]", "pods.volumes[0].mount: /usr is reserved; choose another folder"),
    (
        "sampling_fallbacks={data: {max: 1, node: {cpus: 8, memory: 32Gi, gpus: 1}}}",
        "sampling_fallbacks: 'data' is not a valid group name; choose another DNS label",
    ),
    (
        "sampling_fallbacks={od: {max: 1, node: {cpus: 8, memory: 32Gi}}}",
        "od.node.gpus: expected 1 or more, since training has GPUs; or set 0 for both",
    ),
    (
        "sampling_fallbacks={od: {max: 1, node: {cpus: 12, memory: 32Gi, gpus: 1}}}",
        "sampling_fallbacks.od.node.cpus: 12, but sampling has 8; set the same for both, since Ray's autoscaler",
    ),
    (
        "sampling_fallbacks={od: {max: 1, node: {cpus: 8, memory: 32Gi, gpus: 2}}}",
        "sampling_fallbacks.od.node.gpus: 2, but sampling has 1; set the same for both, since Ray's autoscaler",
    ),
    ("job.elastic=true", "job.elastic: applies to jobs in a Kueue queue; set queue too, or remove it"),
    ("network.dns=[kube-dns]", "network.dns: expected a network, for example 10.0.0.0/16, got kube-dns"),
    ("network.pod_monitor={release: p}", "network.pod_monitor: set metrics_namespace too, from which Prometheus may"),
    *(
        (f"{field}={value}", f"{field}: {message}")
        for field, value, message in (
            ("sampling.node.scratch", f"{'9' * 400}Gi", "expected an amount in Mi, Gi or Ti, for example 64Gi, got"),
            ("sampling.node.memory", "1.0000Gi", "expected an amount in Mi, Gi or Ti, for example 64Gi, got"),
            ("sampling.node.gpus", "9" * 400, "input should be less than or equal to 1000, got 999"),
            ("sampling.node.cpus", "1e300", "input should be less than or equal to 10000, got"),
            ("sampling.node.cpus", "1e-9", "input should be greater than or equal to 0.001, got"),
            ("sampling.max", "9" * 400, "input should be less than or equal to 100000, got 999"),
            ("sampling.max", "9" * 5000, "cannot read the value: line 1: a number of more than 1000 characters"),
            ("training.grace_s", "9" * 400, "input should be less than or equal to 2147483647, got 999"),
            ("job.deadline_s", "9" * 400, "input should be less than or equal to 2147483647, got 999"),
            ("pods.user", "9" * 400, "input should be less than or equal to 2147483647, got 999"),
            ("model_billions", "1e300", "input should be less than or equal to 1000000, got"),
        )
    ),
    (
        "image=Reg/Proj:1",
        "image: 'Reg/Proj:1' is not a valid image reference; expected REGISTRY/NAME:VERSION, with a lower-case name; "
        "did you mean 'reg/proj:1'?",
    ),
    ("image=registry.example.org:5000/Team/P:V1", "did you mean 'registry.example.org:5000/team/p:V1'?"),
    ("image=https://registry.example.org/p:1", "'https://registry.example.org/p:1' is not a valid image reference"),
    ("image='a b:1'", "image: 'a b:1' is not a valid image reference; expected REGISTRY/NAME:VERSION"),
    ("image=''", "image: '' is not a valid image reference; expected REGISTRY/NAME:VERSION"),
    ("pods.pull_secrets=[ok, Reg_1]", "pods.pull_secrets: 'Reg_1' is not a valid name; use a to z, 0 to 9, - and dots"),
    ("pods.pull_secrets=[Reg_1]", "; did you mean 'reg-1'?"),
    (
        "pods.priority_class=High",
        "pods.priority_class: 'High' is not a valid name; use a to z, 0 to 9, - and dots; did",
    ),
    ("pods.secrets=[{env: A, secret: a..b, key: c}]", "pods.secrets[0].secret: 'a..b' is not a valid name; use a to z"),
    ("pods.secrets=[{env: A, secret: a, key: b/c}]", "pods.secrets[0].key: 'b/c' is not a valid Secret key; use"),
    ("pods.secrets=[{env: A, secret: a, key: ''}]", "pods.secrets[0].key: '' is not a valid Secret key; use letters"),
    ("pods.annotations={a b: c}", "pods.annotations: 'a b' is not a valid key; use at most 63 letters, digits"),
    ("pods.service_account_annotations={a b: c}", "pods.service_account_annotations: 'a b' is not a valid key; use at"),
    ("job.labels={a b: c}", "job.labels: 'a b' is not a valid key; use at most 63 letters, digits"),
    ("pods.labels={a: b c}", "pods.labels: 'b c' is not a valid label; use at most 63 letters, digits"),
    ("job.labels={a: b c}", "job.labels: 'b c' is not a valid label; use at most 63 letters, digits"),
    (
        "network={metrics_namespace: m, pod_monitor: {a b: c}}",
        "network.pod_monitor: 'a b' is not a valid key; use at most 63 letters, digits",
    ),
    ("head.node_selector={a b: c}", "head.node_selector: 'a b' is not a valid key; use at most 63 letters"),
    ("training.node.instance_type='a b'", "training.node.instance_type: 'a b' is not a valid label; use at most 63"),
    ("training.node.instance_type=''", "training.node.instance_type: '' is not a valid label; use at most 63"),
    ("head.tolerations=[{key: a b}]", "head.tolerations[0].key: 'a b' is not a valid key; use at most 63 letters"),
    ("head.tolerations=[{key: ''}]", "head.tolerations[0].key: '' is not a valid key; use at most 63 letters"),
    (
        "head.tolerations=[{key: a, operator: Equal, value: b c}]",
        "head.tolerations[0].value: 'b c' is not a valid label; use at most 63 letters",
    ),
    (
        "head.tolerations=[{key: a, effect: NoSchedul}]",
        "head.tolerations[0].effect: input should be 'NoSchedule', 'PreferNoSchedule' or 'NoExecute', got 'NoSchedul'",
    ),
    *(
        (f"training.node.resources={{{resource}}}", f"training.node.resources: {message}")
        for resource, message in (
            ("rdma/h c: '1'", "'rdma/h c' is not a device resource; expected for example rdma/hca"),
            ("hca: '1'", "'hca' is not a device resource; expected for example rdma/hca"),
            ("rdma/hca: '0.5'", "rdma/hca: expected a number of devices, for example '4', got '0.5'"),
            ("rdma/hca: 2Gi", "rdma/hca: expected a number of devices, for example '4', got '2Gi'"),
            ("hugepages-2Mi: '4'", "hugepages-2Mi: expected an amount of memory, for example 512Mi, got '4'"),
            ("nvidia.com/gpu: '4'", "nvidia.com/gpu: set gpus instead"),
            ("cpu: '4'", "cpu: set cpus instead"),
        )
    ),
    ("history.image=kuberay/collector", "history.image: 'kuberay/collector' may change between pods; name a version"),
    ("history={image: 'a/b:1', folder: ../x}", "history.folder: expected a folder in a bucket, for example a/b"),
    ("network.egress=[{cidr: 10.0.0.0/8, namespace: a}]", "network.egress[0].cidr: set either cidr or namespace"),
    ("network.egress=[{ports: [9000]}]", "network.egress[0].cidr: set either cidr or namespace"),
    ("network.egress=[{namespce: a}]", "network.egress[0].namespce: unknown field; did you mean 'namespace'?"),
    (f"network.egress=[{{namespace: {'a' * 64}}}]", "network.egress[0].namespace: expected a name of a to z, 0 to 9 "),
    (
        "network.api_server={namespace: default}",
        "network.api_server: expected a cidr with the address of the Kubernet",
    ),
    ("pods.env={A: 1}", "pods.env: A: expected a text; write the value in quotes (on the command line: '\"1\"')"),
    ("pods.volumes=[{mount: /m}]", "pods.volumes[0].claim: set one of claim, secret and config_map"),
    ("pods.volumes=[{secret: a, config_map: b, mount: /m}]", "pods.volumes[0].config_map: set one of claim, secret an"),
    (
        "pods.volumes=[{secret: a, read_only: false, mount: /m}]",
        "pods.volumes[0].read_only: pods cannot write to a volume of a secret; remove it",
    ),
    (
        "pods.runtime_class=Nvidia",
        "pods.runtime_class: 'Nvidia' is not a valid name; use a to z, 0 to 9, - and dots; d",
    ),
    (
        "pods.volumes=[{secret: Ca, mount: /m}]",
        "pods.volumes[0].secret: 'Ca' is not a valid name; use a to z, 0 to 9, - and dots; did you mean 'ca'?",
    ),
    ("network.egress=[{cidr: 0.0.0.0/0, protocol: UDP}]", "network.egress: gs://bucket/runs: no rule lets the pods co"),
    (
        "network.egress=[{cidr: 10.0.0.1}]",
        "network.egress[0].cidr: expected a network, for example 10.0.0.0/16, got 10",
    ),
    ("namespace=kube-system", "namespace: kube-system belongs to Kubernetes; choose another one"),
    ("sampling.node.instance_type=p4d.24xlarge", "sampling.node.instance_type: p4d.24xlarge is not a machine"),
    ("head.instance_type=m6i.xlarge", "head.instance_type: m6i.xlarge is not a machine type of platform gke"),
    ("network.dns=[10.0.0.0/255.0.0.0]", "network.dns: expected a network, for example 10.0.0.0/16, got 10.0.0.0/255"),
    ("ray_version=newest", "ray_version: expected a full version, for example 2.60.0, got newest"),
    ("sampling.min=3", "sampling.min: 3 is more than max, 2"),
    ("training.max=0", "training.max: input should be greater than or equal to 1, got 0"),
    ("training.node.gpus=0", "training.node.gpus: expected 1 or more, since sampling has GPUs; or set 0 for both"),
    ("sampling.node.gpus=0", "sampling.node.gpus: expected 1 or more, since training has GPUs; or set 0 for both"),
    ("head.gpus=1", "head.gpus: the head runs no work and needs no GPU; set 0"),
    ("data={max: 1, node: {cpus: 1, memory: 16Gi, gpus: 1}}", "data.node.gpus: data tasks need no GPU; set 0"),
    ("head.memory=64GB", "head.memory: expected an amount in Mi, Gi or Ti, for example 64Gi, got '64GB'"),
    ("head.shm=16Gi", "head.shm: 16Gi must be less than memory, 16Gi; lower it"),
    ("head.shm=64Mi", "head.shm: 64Mi is too small for Ray's object store; set 128Mi or more"),
    ("job.queue=research", "sampling.min: Kueue requires groups of a fixed size; set it to max, 2"),
    ("platform=other", "sampling.spot: spot machines are not supported on platform 'other'; set false"),
    ("storage.url=/tmp/runs", "storage.url: expected a bucket URL, or a folder with claim set, got /tmp/runs"),
    ("storage.url=gcs://bucket/runs", "storage.url: the image cannot write to gcs://; did you mean 'gs'?"),
    ("storage.url=abfs://c@me/runs", "storage.url: the image cannot write to abfs://; expected one of: gs, s3"),
    ("storage={url: /other, claim: c}", "storage.url: /other is not below mount, /mnt/storage"),
    ("storage={url: s3://b, claim: c, mount: /tmp/x}", "storage.mount: /tmp/x is reserved; choose another folder"),
    (f"storage.url=s3://me:{WORD}@bucket", "storage.url: contains what looks like a secret; set the names"),
    (f"pods.env={{HF_TOKEN: {WORD}}}", "pods.env: 'HF_TOKEN' looks like a secret in clear text; put it into a Kuber"),
    (
        f"pods.env={{NOTE: https://me:{WORD}@host}}",
        "pods.env.NOTE: contains what looks like a secret; set the",
    ),
    (f"pods.user=https://me:{WORD}@host", "pods.user: contains what looks like a secret; set the names of"),
    ("pods.env={2X: a}", "pods.env: '2X' is not a valid name of an environment variable"),
    ("pods.secrets=[{env: HF-TOKEN, secret: a, key: b}]", "pods.secrets[0].env: expected the name of an environment"),
    (
        f"pods.secrets=[{{env: T, secret: a, key: 's3://me:{WORD}@b'}}]",
        "pods.secrets[0].key: contains what looks like a secret; set the names of a Kubernetes Secret and its key",
    ),
    ("pods={env: {A: b}, secrets: [{env: A, secret: b, key: c}]}", "pods.secrets: the environment variable A is set"),
    ("pods.env={HOME: /root}", "pods.env: HOME is set automatically; remove it"),
    ("pods.secrets=[{env: RAY_ADDRESS, secret: a, key: b}]", "pods.env: RAY_ADDRESS is set automatically; remove it"),
    ("head.scratch=0Mi", "head.scratch: 0Mi is too small for Ray's logs and the caches of libraries; set 1Gi or more"),
    ("job.labels={app.kubernetes.io/part-of: x}", "job.labels: app.kubernetes.io/part-of is set by `render`; remove"),
    ("job.labels={kueue.x-k8s.io/queue-name: x}", "job.labels: kueue.x-k8s.io/queue-name is set by `render`; remove"),
    ("pods.labels={kueue.x-k8s.io/queue-name: x}", "pods.labels: kueue.x-k8s.io/queue-name is set by `render`; remove"),
    (
        "network.api_server={cidr: 10.0.0.1/32, protocol: UDP}",
        "network.api_server: expected a cidr with the address of",
    ),
    ("pods.labels={app.kubernetes.io/name: x}", "pods.labels: app.kubernetes.io/name is set by KubeRay; remove it"),
    ("pods.labels={kueue.x-k8s.io/x: y}", "pods.labels: kueue.x-k8s.io/x is set by Kueue; remove it"),
    ("pods.labels={ray.io/group: x}", "pods.labels: ray.io/group is set by KubeRay; remove it"),
    ("pods.project=/scratch/p", "pods.project: /scratch/p is in /scratch, which is an empty folder in the pods"),
    ("storage.url=gs://my bucket/runs", "storage.url: gs://my bucket/runs: expected a bucket or path without blanks"),
    ("network.egress=[{cidr: 10.0.0.0/16, ports: []}]", "network.egress[0].ports: expected at least 1 in the list"),
    (
        "sampling_fallbacks={od: {max: 1, node: {cpus: 1, memory: 16Gi, gpuz: 1}}}",
        "sampling_fallbacks.od.node.gpuz: unknown field; did you mean 'gpus'?",
    ),
    (
        f"sampling_fallbacks={{{'a' * 64}: {{max: 1, node: {{cpus: 1, memory: 16Gi, gpus: 1}}}}}}",
        f"sampling_fallbacks: '{'a' * 60}' is not a valid group name; choose another DNS label of at most 63",
    ),
    ("training.grace_s=5", "training.grace_s: input should be greater than or equal to 20, got 5"),
    ("pods.user=0", "pods.user: input should be greater than or equal to 1, got 0"),
    (
        "pods={service_account: mine, service_account_annotations: {a: b}}",
        "pods.service_account_annotations: apply to a new account only; remove service_account",
    ),
    ("network.egress=[{cidr: everywhere}]", "network.egress[0].cidr: expected a network, for example 10.0.0.0/16"),
    (
        "network.api_server={cidr: 10.0.0.1/32, ports: [0]}",
        "network.api_server.ports: 0 is not a valid port; expected 1 to",
    ),
    ("job.start_deadline_s=999999", "job.start_deadline_s: 999999 is not before deadline_s, 604800"),
    (
        "sampling.node.tolerations=[{key: a, operator: Equal}]",
        "sampling.node.tolerations[0].value: operator 'Equal' requires a value",
    ),
    (
        "sampling.node.tolerations=[{key: a, value: b}]",
        "sampling.node.tolerations[0].value: operator 'Exists' takes no value; remove it",
    ),
]


@pytest.mark.parametrize(("override", "message"), WRONG, ids=lambda text: text[:60])
def test_load_cluster_rejects_a_wrong_spec_with_one_line(
    load: Callable[..., ClusterSpec], override: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    error = str(caught.value)
    assert message in error
    assert error.startswith(("command line: ", "/", f"{override.partition('=')[0]}: cannot read the value: "))
    assert "\n" not in error
    assert WORD not in error


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("storage={url: /mnt/storage/x, claim: c}", "history: KubeRay's collector writes to a bucket; set storage.url"),
        (
            "storage.url=s3://bucket/x",
            "history.region: missing; set the region of the bucket, for example eu-central-1",
        ),
    ],
)
def test_load_cluster_rejects_a_history_server_without_a_bucket(
    load: Callable[..., ClusterSpec], storage: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load("history.image=kuberay/collector:v1.7.1", storage)


@pytest.mark.parametrize("override", ['ray_version="2.60.0\\n"', 'pods.env={"A\\n": b}', 'name="a\\n"'])
def test_load_cluster_rejects_a_line_break_behind_a_valid_value(
    load: Callable[..., ClusterSpec], override: str
) -> None:
    with pytest.raises(UserError, match=r"(expected a full version|is not a valid name|expected a name of)"):
        load(override)


@pytest.mark.parametrize(
    "override",
    [
        "image=localhost:5000/team/pos2distill:v0.1_2",
        "image=pos2distill:0.1.0",
        f"image=ghcr.io/me/my__project@sha256:{'0a' * 32}",
        f"image=ghcr.io/me/my-project:1@sha256:{'0a' * 32}",
        "pods.pull_secrets=[registry.example.org, a1]",
        "pods.priority_class=system-node-critical",
        "pods.secrets=[{env: A, secret: a.b, key: .dockerconfigjson}]",
        "pods.annotations={K8s.io/x: 'any {text}', plain: ''}",
        "job.labels={kai.scheduler/queue: ''}",
        "training.node.resources={rdma/hca: '8', hugepages-2Mi: 512Mi}",
        "head.tolerations=[{key: example.org/team, operator: Equal, value: ''}]",
        "network.egress=[{cidr: 'fd00::/8'}, {namespace: 3scale}]",
        "pods.runtime_class=nvidia.v1",
    ],
)
def test_load_cluster_accepts_every_valid_name(load: Callable[..., ClusterSpec], override: str) -> None:
    manifests = render(load(override))
    assert [finding for finding in check(manifests) if finding.level is Level.ERROR] == []


def test_load_cluster_suggests_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"^gek: no such cluster spec; did you mean 'gke'\?$"):
        load_cluster("gek")


def test_load_cluster_rejects_a_recipe() -> None:
    recipe = RECIPES / "quickstart.yaml"
    with pytest.raises(UserError, match=f"^{recipe}: is a recipe; expected a cluster spec, with the sections name, "):
        load_cluster(str(recipe))


def test_load_cluster_names_a_missing_section(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in MINIMAL_SPEC.items() if key != "storage"}))
    with pytest.raises(UserError, match=r"small.yaml: storage: missing$"):
        load_cluster(str(path))


@pytest.mark.parametrize("scheme", READABLE)
def test_readable_schemes_open_with_every_installation(scheme: str) -> None:
    assert fsspec.get_filesystem_class(scheme)
