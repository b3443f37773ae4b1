"""Clusters beyond the presets: fallback groups, queues, volumes, networks for RDMA, gang schedulers, monitoring."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.job_command import load_job
from cluster.nodes import quantity_bytes
from cluster.render import render
from cluster.sections import PodsSection
from cluster.spec import RAY, load_cluster
from cluster.spec_warnings import spec_warnings
from cluster.types import KubeManifest
from cluster.validate import check
from pipelines.executors.ray.coordinator import _GAUGES
from pos2distill.errors import UserError
from pos2distill.node_pools import SAMPLER_UNITS_PER_ACTOR, SAMPLING

ROOT = Path(__file__).parents[3]
DATA = "data.path=gs://bucket/nq.jsonl.gz"
ON_DEMAND = (
    "sampling_fallbacks={on-demand: {max: 2, spot: false, node: {instance_type: a2-highgpu-1g, gpus: 1, cpus: 11, "
    "memory: 75Gi, shm: 16Gi}}}"
)
SHAPES: dict[str, list[str]] = {
    "fallback": [ON_DEMAND],
    "elastic": ["job.queue=research", "job.elastic=true"],
    "gang": ["pods.scheduler=kai-scheduler", "job.labels={kai.scheduler/queue: research}"],
    "cache": ["pods.volumes=[{claim: models, mount: /models}]", "pods.model_cache=/models/hub"],
    "rdma": ["training.node.resources={rdma/hca: '8'}", "pods.annotations={k8s.v1.cni.cncf.io/networks: rdma}"],
    "history": ["history.image=kuberay/collector:v1.7.1"],
    "cost": ["pods.labels={team: search}"],
    "files": ["pods.volumes=[{secret: key, mount: /key}, {config_map: ca, mount: /ca}]"],
    "runtime": ["pods.runtime_class=nvidia"],
    "store": [
        "network.egress=[{cidr: 0.0.0.0/0}, {namespace: storage, ports: [9000]}]",
        "pods.env={STORAGE_EMULATOR_HOST: 'http://gcs.storage:9000'}",
    ],
    "monitor": ["network.metrics_namespace=monitoring", "network.pod_monitor={release: prometheus}"],
}


def rendered(name: str) -> list[KubeManifest]:
    return render(load_cluster("gke", SHAPES[name]), load_job("nq_mistral_7b", [DATA]))


def groups(name: str) -> list[KubeManifest]:
    found: list[KubeManifest] = rendered(name)[-1]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_render_of_every_shape_is_valid(name: str, crds: str) -> None:
    assert check(rendered(name), crds) == []


def test_render_prefers_the_first_group_for_sampling() -> None:
    sampling, on_demand, training, _ = groups("fallback")
    assert (sampling["groupName"], sampling["priority"]) == ("sampling", 2)
    assert (on_demand["groupName"], on_demand["priority"]) == ("on-demand", 1)
    assert sampling["resources"] == on_demand["resources"] == {"sampler": "1"}
    assert on_demand["labels"] == {"ray-subcluster": "sampling", "ray.io/market-type": "on-demand"}
    assert "priority" not in training
    assert "DoesNotExist" in str(on_demand["template"]["spec"]["affinity"])


def nodes_for_samplers(count: int, manifest: KubeManifest, recovered: dict[str, float]) -> dict[str, int]:
    """The nodes that Ray's autoscaler requests by group, for samplers with one GPU each on an empty cluster.

    Args:
        recovered: 0 for a group that has just failed to provide machines, which rises to 1.
    """
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.core.generated.autoscaler_pb2 import ResourceRequest, ResourceRequestByCount

    config = AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(manifest), skip_content_hash=True)
    sampler = ResourceRequest(resources_bundle={"CPU": 1.0, "GPU": 1.0, SAMPLING.resource: SAMPLER_UNITS_PER_ACTOR})
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_nodes(),
        resource_requests=[ResourceRequestByCount(request=sampler, count=count)],
        cloud_resource_availabilities=recovered,
        recoverable_resource_availabilities=recovered,
    )
    reply = ResourceDemandScheduler(Mock()).schedule(request)
    return {each.instance_type: each.count for each in reply.to_launch if each.instance_type != "training"}


def test_autoscaler_of_ray_prefers_the_first_group_for_sampling() -> None:
    manifest = render(load_cluster("gke", [ON_DEMAND, "sampling.max=3"]))[-1]
    assert nodes_for_samplers(2, manifest, {}) == {"sampling": 2}
    assert nodes_for_samplers(5, manifest, {}) == {"sampling": 3, "on-demand": 2}
    assert nodes_for_samplers(2, manifest, {"sampling": 0.0}) == {"on-demand": 2}


def test_render_with_fallbacks_lets_the_autoscaler_give_up_on_machines_that_do_not_come() -> None:
    from ray.autoscaler._private import constants
    from ray.autoscaler.v2.instance_manager import config

    options = rendered("fallback")[-1]["spec"]["rayClusterSpec"]["autoscalerOptions"]
    variables = {each["name"]: each["value"] for each in options["env"]}
    known = Path(config.__file__).read_text() + Path(constants.__file__).read_text()
    for name, seconds in {"RECONCILE_ALLOCATE_STATUS_TIMEOUT_S": "1200", "PENDING_NODE_IDLE_TIMEOUT_S": "600"}.items():
        assert variables.pop(f"RAY_AUTOSCALER_{name}") == seconds
        assert f'"RAY_AUTOSCALER_{name}"' in known
    without = rendered("cost")[-1]["spec"]["rayClusterSpec"]["autoscalerOptions"]
    assert without["env"] == [{"name": name, "value": value} for name, value in variables.items()]


def test_make_entrypoint_counts_the_fallback_groups() -> None:
    """The recipe's 4 samplers and 2 teachers need 6 GPUs."""
    spec = load_cluster("gke", [ON_DEMAND, "sampling.max=4"])
    assert render(spec, load_job("nq_mistral_7b", [DATA]))[-1]["kind"] == "RayJob"


def test_render_of_an_elastic_job_scales_in_its_queue() -> None:
    job = rendered("elastic")[-1]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert job["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"
    assert job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is True


def test_render_for_a_gang_scheduler_names_it_in_all_pods() -> None:
    job = rendered("gang")[-1]
    assert job["metadata"]["labels"]["kai.scheduler/queue"] == "research"
    assert all(group["template"]["spec"]["schedulerName"] == "kai-scheduler" for group in groups("gang"))


def test_render_sets_the_labels_of_all_pods_beside_those_of_selectors() -> None:
    job = rendered("cost")[-1]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    for pod in (head["template"], job["spec"]["submitterPodTemplate"], *(each["template"] for each in groups("cost"))):
        assert pod["metadata"]["labels"] == {**load_cluster("gke", []).labels, "team": "search"}


def test_render_with_a_model_cache_mounts_it_and_needs_less_disk() -> None:
    for group, without in zip(groups("cache"), groups("rdma"), strict=True):
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "volume-0", "mountPath": "/models"} in container["volumeMounts"]
        assert {"name": "HF_HUB_CACHE", "value": "/models/hub"} in container["env"]
        assert {"name": "volume-0", "persistentVolumeClaim": {"claimName": "models"}} in group["template"]["spec"][
            "volumes"
        ]
        if group["groupName"] == "training":
            sizes = [each["template"]["spec"]["containers"][0]["resources"]["limits"] for each in (group, without)]
            saved = quantity_bytes(sizes[1]["ephemeral-storage"]) - quantity_bytes(sizes[0]["ephemeral-storage"])
            assert saved == pytest.approx(2 * 7.25e9, rel=0.1)


def test_make_entrypoint_reads_from_a_read_only_volume_and_does_not_write_to_it() -> None:
    spec = load_cluster("gke", ["pods.volumes=[{claim: data, mount: /data, read_only: true}]"])
    assert render(spec, load_job("nq_mistral_7b", ["data.path=/data/nq.jsonl.gz"]))[-1]["kind"] == "RayJob"
    with pytest.raises(UserError, match=r"runtime.storage: /data/runs does not exist in the pods; set a URL"):
        render(spec, load_job("nq_mistral_7b", [DATA, "runtime.storage=/data/runs"]))


def test_render_requests_further_resources() -> None:
    _, training, _ = groups("rdma")
    (container,) = training["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["rdma/hca"] == container["resources"]["limits"]["rdma/hca"] == "8"
    assert training["template"]["metadata"]["annotations"] == {
        "k8s.v1.cni.cncf.io/networks": "rdma",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    }


def test_pod_monitor_selects_the_pods_and_is_selected() -> None:
    manifests = rendered("monitor")
    (monitor,) = [each for each in manifests if each["kind"] == "PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    selector = monitor["spec"]["selector"]["matchLabels"]
    for group in groups("monitor"):
        assert selector.items() <= group["template"]["metadata"]["labels"].items()


def test_render_with_a_history_server_names_the_bucket(crds: str) -> None:
    collector = rendered("history")[-1]["spec"]["rayClusterSpec"]["historyServerOptions"]["collectorOptions"]
    assert collector["image"] == "kuberay/collector:v1.7.1"
    assert collector["resources"]["requests"] == collector["resources"]["limits"]
    variables = {variable["name"]: variable["value"] for variable in collector["env"]}
    assert variables == {"STORAGE_BACKEND": "gcs", "GCS_BUCKET": "my-bucket", "STORAGE_ROOT_DIR": "ray-history"}
    overrides = [*SHAPES["history"], "history.region=eu-central-1", "history.folder=logs/ray"]
    manifests = render(load_cluster("eks", overrides))
    assert check(manifests, crds) == []
    collector = manifests[-1]["spec"]["historyServerOptions"]["collectorOptions"]
    variables = {variable["name"]: variable["value"] for variable in collector["env"]}
    assert variables == {
        "STORAGE_BACKEND": "s3",
        "S3_BUCKET": "my-bucket",
        "S3_REGION": "eu-central-1",
        "STORAGE_ROOT_DIR": "logs/ray",
    }


def test_render_has_no_history_server_by_default() -> None:
    for preset in ("gke", "eks", "onprem", "kind"):
        assert "historyServerOptions" not in render(load_cluster(preset))[-1]["spec"]


def test_dashboard_shows_metrics_that_exist() -> None:
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    dashboard = json.loads((ROOT / "cluster" / "monitoring" / "grafana_dashboard.json").read_text())
    exported = {f"ray_pos2distill_{name}" for name in _GAUGES} | {f"ray_{name}" for name in METRICS_GAUGES}
    shown = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            shown |= set(re.findall(r"ray_\w+", target["expr"]))
    assert {f"ray_pos2distill_{name}" for name in _GAUGES} <= shown <= exported


def test_rendered_pods_fit_the_restricted_level_of_pod_security(crds: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, of Kubernetes 1.34."""
    allowed_volumes = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "projected", "secret"}
    allowed_volumes.add("persistentVolumeClaim")
    for name in SHAPES.keys() - {"history"}:  # for which KubeRay adds a container that does not fit it
        job = rendered(name)[-1]["spec"]
        cluster = job["rayClusterSpec"]
        templates = [job["submitterPodTemplate"], cluster["headGroupSpec"]["template"]]
        templates += [group["template"] for group in cluster["workerGroupSpecs"]]
        for template in templates:
            pod = template["spec"]
            assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] != 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for volume in pod["volumes"]:
                assert volume.keys() - {"name"} <= allowed_volumes
            contexts = [container["securityContext"] for container in pod["containers"]]
            for context in [*contexts, cluster["autoscalerOptions"]["securityContext"]]:
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert "privileged" not in context


def test_ray_version_is_that_of_the_lock() -> None:
    lock = (ROOT / "requirements" / "gpu.txt").read_text()
    assert re.search(rf"^ray(\[.*\])?=={RAY[0]}\.{RAY[1]}\.", lock, re.MULTILINE)
    assert PodsSection().project == "/opt/pos2distill"


def test_egress_to_a_store_in_the_cluster_is_by_its_namespace_and_port() -> None:
    policies = [each for each in rendered("store") if each["kind"] == "NetworkPolicy"]
    expected = {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "storage"}}}],
        "ports": [{"protocol": "TCP", "port": 9000}],
    }
    assert expected in policies[0]["spec"]["egress"]


def test_secrets_and_config_maps_are_mounted_as_files_that_pods_only_read() -> None:
    volumes = "pods.volumes=[{secret: key, mount: /key}, {config_map: ca, mount: /ca}, {claim: data, mount: /data}]"
    pod = render(load_cluster("gke", [volumes]))[-1]["spec"]["headGroupSpec"]["template"]["spec"]
    assert [each for each in pod["volumes"] if each["name"].startswith("volume-")] == [
        {"name": "volume-0", "secret": {"secretName": "key"}},
        {"name": "volume-1", "configMap": {"name": "ca"}},
        {"name": "volume-2", "persistentVolumeClaim": {"claimName": "data"}},
    ]
    mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
    assert [mounts[path].get("readOnly", False) for path in ("/key", "/ca", "/data")] == [True, True, False]
    with pytest.raises(UserError, match=r"model_cache: /ca/hub is not below the mount of a writable volume"):
        load_cluster("gke", [volumes, "pods.model_cache=/ca/hub"])


def test_runtime_class_is_that_of_pods_with_gpus() -> None:
    cluster = render(load_cluster("gke", ["pods.runtime_class=nvidia"]))[-1]["spec"]
    assert "runtimeClassName" not in cluster["headGroupSpec"]["template"]["spec"]
    groups = {each["groupName"]: each["template"]["spec"] for each in cluster["workerGroupSpecs"]}
    assert groups["training"]["runtimeClassName"] == groups["sampling"]["runtimeClassName"] == "nvidia"


def test_spec_warnings_of_a_grace_period_that_is_too_short_for_a_checkpoint() -> None:
    (warning,) = [
        each
        for each in spec_warnings(load_cluster("gke", ["training.grace_s=60"]), load_job("nq_mistral_7b", [DATA]))
        if each.startswith("training.grace_s")
    ]
    assert warning == (
        "training.grace_s: 60 leaves 45 s to write a checkpoint of 87 GB, so that the steps since the last one may be "
        "lost; set 102"
    )
    warnings = spec_warnings(load_cluster("gke"), load_job("nq_mistral_7b", [DATA]))
    assert not any(each.startswith("training.grace_s") for each in warnings)


def warnings_about(field: str, spec: list[str], *overrides: str, command: str = "study") -> list[str]:
    warnings = spec_warnings(load_cluster("gke", spec), load_job("nq_mistral_7b", [DATA, *overrides], command=command))
    return [each for each in warnings if field in each]


def test_spec_warnings_of_a_server_whose_key_is_not_set() -> None:
    server = ["model.engine=openai", "model.path=m", "runtime.endpoint.base_url=https://host/v1"]
    keyed = [*server, "runtime.endpoint.api_key_env=MY_KEY"]
    assert warnings_about("MY_KEY", [], *keyed, command="evaluate") == [
        "pods.secrets: runtime.endpoint.api_key_env names MY_KEY, which is not set in the pods, so that the job may "
        "end at once; set the names of a Secret and its key"
    ]
    secret = ["pods.secrets=[{env: MY_KEY, secret: keys, key: mine}]"]
    assert warnings_about("MY_KEY", secret, *keyed, command="evaluate") == []
    assert warnings_about("api_key_env", [], *server, command="evaluate") == []  # a server may want none
    assert warnings_about("MY_KEY", [], keyed[-1]) == []  # no server is used


@pytest.mark.parametrize(
    ("spec", "command", "warns"),
    [
        ([], "study", True),
        (["pods.env={WANDB_MODE: online}"], "distill", True),
        (["pods.env={WANDB_MODE: offline}"], "study", False),
        (["pods.secrets=[{env: WANDB_API_KEY, secret: wandb, key: key}]"], "study", False),
        ([], "evaluate", False),
    ],
)
def test_spec_warnings_of_a_tracker_whose_key_is_not_set(spec: list[str], command: str, *, warns: bool) -> None:
    assert (warnings_about("wandb", spec, "runtime.trackers=[wandb]", command=command) != []) == warns
    assert warnings_about("wandb", spec, "runtime.trackers=[tensorboard]", command=command) == []


def test_spec_warnings_of_more_workers_than_the_nodes_hold() -> None:
    field, elastic = "runtime.trainers.max_workers", "runtime.trainers.max_workers=16"
    assert warnings_about(field, [], elastic) == [
        "training.max: the nodes of training hold 8 workers, fewer than runtime.trainers.max_workers, 16; raise it, or "
        "lower runtime.trainers.max_workers"
    ]
    assert warnings_about(field, ["training.max=2"], elastic) == []
    assert warnings_about(field, [], "runtime.trainers.max_workers=8") == []
    assert warnings_about(field, [], elastic, command="evaluate") == []


@pytest.mark.parametrize(
    ("setting", "warns"),
    [
        ("pods.secrets=[{env: AWS_REGION, secret: s3, key: id}]", True),
        ("pods.secrets=[{env: AWS_ACCESS_KEY_ID, secret: s3, key: id}]", False),
        ("pods.service_account=mine", False),
        ("pods.service_account_annotations={eks.amazonaws.com/role-arn: 'arn:aws:iam::1:role/p2d'}", False),
    ],
)
def test_spec_warnings_of_a_bucket_without_credentials_on_own_machines(setting: str, *, warns: bool) -> None:
    settings = [
        *("storage.url=s3://p2d/runs", "storage.claim=null", "network.egress=[{cidr: 0.0.0.0/0}]"),
        setting,
    ]
    warnings = spec_warnings(load_cluster("onprem", settings))
    assert any("machines of platform other may have no rights for s3://" in each for each in warnings) == warns
