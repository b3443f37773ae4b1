from typing import Any

import pytest
import yaml

from cluster.render import render, to_yaml
from cluster.spec import load_cluster, quantity_bytes
from cluster.validate import check
from pos2distill.placement import RAY_VARIABLES, SAMPLING, TRAINING
from scripts.render_presets import PRESETS, RENDERED, rendered

DATA = "data.path=gs://bucket/nq.jsonl.gz"
Manifest = dict[str, Any]


def kinds(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {manifest["kind"]: manifest for manifest in manifests}


@pytest.fixture
def cluster() -> Manifest:
    spec: Manifest = kinds(render(load_cluster("gke"), "nq_mistral_7b", [DATA]))["RayJob"]["spec"]["rayClusterSpec"]
    return spec


def pods(cluster: Manifest) -> list[Manifest]:
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("name", PRESETS)
def test_examples_render_to_the_files_that_lie_there(name: str) -> None:
    """Else run `make docs`."""
    assert (RENDERED / f"{name}.yaml").read_text() == rendered(name)


def test_there_is_no_file_without_an_example() -> None:
    assert {path.stem for path in RENDERED.glob("*.yaml")} == set(PRESETS)


def test_yaml_reads_back_and_has_no_anchors() -> None:
    manifests = render(load_cluster("gke"), "nq_mistral_7b", [DATA])
    text = to_yaml(manifests)
    assert list(yaml.safe_load_all(text)) == manifests
    assert "&id" not in text


def test_rendering_is_pure() -> None:
    spec = load_cluster("eks")
    first = render(spec)
    first[-1]["spec"].clear()
    assert render(spec) == render(load_cluster("eks"))


def test_work_finds_its_nodes(cluster: Manifest) -> None:
    sampling, training, data = cluster["workerGroupSpecs"]
    assert sampling["labels"]["ray-subcluster"] == data["labels"]["ray-subcluster"] == "sampling"
    assert "ray-subcluster" not in training["labels"]
    assert training["labels"]["pool"] == "trainer"
    # One unit a GPU.
    assert (sampling["resources"], training["resources"]) == ({"sampler": "1"}, {"trainer": "8"})
    assert "resources" not in data
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["headGroupSpec"]["labels"] == {"routing": "pools"}
    assert "resources" not in cluster["headGroupSpec"]


def test_a_cluster_without_gpus_has_its_pools_all_the_same() -> None:
    sampling, training = render(load_cluster("kind"), "quickstart")[-1]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (sampling["resources"], training["resources"]) == ({"sampler": "1"}, {"trainer": "1"})
    assert "nvidia.com/gpu" not in str((sampling, training))


def test_the_pools_are_as_ray_wants_them() -> None:
    assert SAMPLING.labels == {"ray-subcluster": "sampling"}
    assert TRAINING.labels == {"pool": "trainer"}
    assert (SAMPLING.resource, TRAINING.resource) == ("sampler", "trainer")
    assert (TRAINING.units(8), TRAINING.units(0)) == (8, 1)


def test_rays_autoscaler_reads_the_pools_as_they_are_meant() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    read = _derive_autoscaling_config_from_ray_cr(render(load_cluster("gke"))[-1])
    types = read["available_node_types"]
    market = "ray.io/market-type"
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert types["headgroup"]["labels"] == {"routing": "pools"}
    assert types["sampling"]["resources"].items() >= {"CPU": 11, "GPU": 1, "sampler": 1}.items()
    assert types["sampling"]["labels"] == {"ray-subcluster": "sampling", market: "spot"}
    assert types["training"]["resources"].items() >= {"CPU": 90, "GPU": 8, "trainer": 8}.items()
    assert types["training"]["labels"] == {"pool": "trainer", market: "on-demand"}
    assert not {"GPU", "sampler", "trainer"} & types["data"]["resources"].keys()
    limits = {name: (each["min_workers"], each["max_workers"]) for name, each in types.items()}
    assert limits == {"headgroup": (0, 0), "sampling": (0, 8), "training": (0, 1), "data": (0, 4)}
    assert (types["sampling"]["idle_timeout_s"], types["training"]["idle_timeout_s"]) == (120, 600)


def test_work_may_use_the_grace_of_its_group(cluster: Manifest) -> None:
    """Ray ends its work after a time of its own, 30 s if nothing is said, whatever Kubernetes would allow."""
    from ray._private import ray_constants

    assert ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S == 30
    for pod, grace_s in zip(pods(cluster), (60, 30, 600, 30), strict=True):
        variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        assert pod["spec"]["terminationGracePeriodSeconds"] == grace_s
        assert variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == str(grace_s - 15)
        assert variables.items() >= RAY_VARIABLES.items()


def test_the_autoscaler_is_set_in_one_way(cluster: Manifest) -> None:
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert "RAY_enable_autoscaler_v2" not in str(cluster)
    assert [group["idleTimeoutSeconds"] for group in cluster["workerGroupSpecs"]] == [120, 600, 120]
    assert all(pod["spec"]["restartPolicy"] == "Never" for pod in pods(cluster))


@pytest.mark.parametrize(
    ("platform", "spot", "on_demand"),
    [
        ("eks", ("eks.amazonaws.com/capacityType", "SPOT"), ("eks.amazonaws.com/capacityType", "ON_DEMAND")),
        ("karpenter", ("karpenter.sh/capacity-type", "spot"), ("karpenter.sh/capacity-type", "on-demand")),
    ],
)
def test_samplers_are_spot_and_trainers_are_not(
    platform: str, spot: tuple[str, str], on_demand: tuple[str, str]
) -> None:
    made = render(load_cluster("eks", [f"platform={platform}"]))[-1]["spec"]
    sampling, training = (group["template"]["spec"]["nodeSelector"] for group in made["workerGroupSpecs"])
    assert spot in sampling.items()
    assert on_demand in training.items()


def test_trainers_on_gke_keep_off_spot_machines(cluster: Manifest) -> None:
    sampling, training, _ = (group["template"]["spec"] for group in cluster["workerGroupSpecs"])
    assert sampling["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert "DoesNotExist" in str(training["affinity"])


def test_every_container_is_locked_and_can_write_where_it_must(cluster: Manifest) -> None:
    job = kinds(render(load_cluster("onprem"), "quickstart"))["RayJob"]["spec"]
    for template in [*pods(cluster), *pods(job["rayClusterSpec"]), job["submitterPodTemplate"]]:
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"] == container["resources"]["limits"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        home = next(variable["value"] for variable in container["env"] if variable["name"] == "HOME")
        assert "emptyDir" in mounted["/tmp"]
        assert "emptyDir" in mounted[home]
    assert cluster["autoscalerOptions"]["securityContext"]["readOnlyRootFilesystem"] is True


def test_only_the_head_has_a_token_of_the_api(cluster: Manifest) -> None:
    assert [pod["spec"]["automountServiceAccountToken"] for pod in pods(cluster)] == [True, False, False, False]
    assert cluster["authOptions"] == {"mode": "token"}


def test_shared_memory_and_shared_storage_are_mounted() -> None:
    made = render(load_cluster("onprem"))[-1]["spec"]
    for template in pods(made):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        paths = {mount["mountPath"]: mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert volumes[paths["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert volumes[paths["/mnt/storage"]]["persistentVolumeClaim"] == {"claimName": "pos2distill"}


def test_a_job_ends_and_takes_its_cluster_with_it() -> None:
    job = kinds(render(load_cluster("gke", ["job.backoff_limit=0"]), "nq_mistral_7b", [DATA]))["RayJob"]
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert (spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"], spec["backoffLimit"]) == (600, 604800, 0)
    assert "kueue.x-k8s.io/queue-name" not in job["metadata"]["labels"]


def test_the_submitter_stays_where_it_is() -> None:
    job = render(load_cluster("gke", ["pods.priority_class=research"]), "nq_mistral_7b", [DATA])[-1]["spec"]
    pod = job["submitterPodTemplate"]
    assert job["submitterConfig"] == {"backoffLimit": 6}
    assert pod["metadata"]["annotations"] == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    assert "DoesNotExist" in str(pod["spec"]["affinity"])
    assert pod["spec"]["priorityClassName"] == "research"


def test_a_queue_is_named_if_asked_for_and_gets_a_cluster_of_fixed_size() -> None:
    manifests = render(load_cluster("eks", ["job.queue=research", "sampling.min=16", "training.min=1"]))
    labels = [manifest["metadata"]["labels"] for manifest in manifests]
    assert labels[-1]["kueue.x-k8s.io/queue-name"] == "research"
    assert all("kueue.x-k8s.io/queue-name" not in each for each in labels[:-1])
    cluster = manifests[-1]["spec"]
    assert cluster["enableInTreeAutoscaling"] is False
    assert "autoscalerOptions" not in cluster
    assert not any(pod["spec"]["automountServiceAccountToken"] for pod in pods(cluster))
    assert check(manifests) == []


def test_the_object_store_fits_into_shared_memory(cluster: Manifest) -> None:
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        volumes = {volume["name"]: volume["emptyDir"] for volume in group["template"]["spec"]["volumes"]}
        shm = quantity_bytes(volumes["shared-mem"]["sizeLimit"])
        assert 0.85 * shm < int(group["rayStartParams"]["object-store-memory"]) < 0.95 * shm


def test_disk_is_asked_for(cluster: Manifest) -> None:
    sizes = [pod["spec"]["containers"][0]["resources"]["requests"]["ephemeral-storage"] for pod in pods(cluster)]
    assert sizes == ["50Gi", "100Gi", "200Gi", "20Gi"]


def test_without_a_recipe_the_cluster_stands_alone() -> None:
    assert "RayCluster" in kinds(render(load_cluster("onprem")))
    assert "RayJob" not in kinds(render(load_cluster("onprem")))


def test_an_account_that_exists_is_used() -> None:
    manifests = render(load_cluster("onprem", ["pods.service_account=mine"]))
    assert "ServiceAccount" not in kinds(manifests)
    assert {pod["spec"]["serviceAccountName"] for pod in pods(manifests[-1]["spec"])} == {"mine"}


def test_policies_select_the_pods_and_let_through_what_is_needed() -> None:
    manifests = render(load_cluster("onprem"))
    everyone, head = (manifest["spec"] for manifest in manifests if manifest["kind"] == "NetworkPolicy")
    pod_labels = [template["metadata"]["labels"] for template in pods(manifests[-1]["spec"])]
    for labels in pod_labels:
        assert everyone["podSelector"]["matchLabels"].items() <= labels.items()
    assert everyone["policyTypes"] == head["policyTypes"] == ["Ingress", "Egress"]
    assert "'port': 53" in str(everyone["egress"])
    assert "monitoring" in str(everyone["ingress"])
    assert head["podSelector"]["matchLabels"]["ray.io/node-type"] == "head"
    assert "kuberay-operator" in str(head["ingress"])
    assert head["egress"][0]["to"] == [{"ipBlock": {"cidr": "10.0.0.10/32"}}]
    assert "0.0.0.0/0" not in str(everyone)


def test_head_and_trainers_are_not_drained_away() -> None:
    budgets = [each for each in render(load_cluster("gke")) if each["kind"] == "PodDisruptionBudget"]
    assert [(each["metadata"]["name"], each["spec"]["minAvailable"]) for each in budgets] == [
        ("nq-mistral-head", 1),
        ("nq-mistral-training", 1),
    ]


def test_secrets_are_references_only() -> None:
    text = to_yaml(render(load_cluster("eks"), "nq_llama3_8b", [DATA]))
    variables = [
        variable
        for pod in pods(render(load_cluster("eks"))[-1]["spec"])
        for variable in pod["spec"]["containers"][0]["env"]
        if variable["name"] == "HF_TOKEN"
    ]
    assert len(variables) == 3
    assert all(variable.keys() == {"name", "valueFrom"} for variable in variables)
    assert "hf_" not in text


def test_no_value_of_the_environment_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecretsecret")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    text = to_yaml(render(load_cluster("eks"), "nq_llama3_8b", [DATA]))
    assert "secretsecret" not in text
    assert "0123456789abcdef" not in text
