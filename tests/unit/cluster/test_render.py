import importlib.util

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster.job_command import load_job
from cluster.nodes import quantity_bytes
from cluster.render import render, to_yaml
from cluster.spec import load_cluster
from cluster.types import KubeManifest
from cluster.validate import check
from pos2distill.node_pools import RAY_VARIABLES, SAMPLING, TRAINING
from scripts.render_presets import PRESETS, RENDERED, rendered

DATA = "data.path=gs://bucket/nq.jsonl.gz"


def kinds(manifests: list[KubeManifest]) -> dict[str, KubeManifest]:
    return {manifest["kind"]: manifest for manifest in manifests}


@pytest.fixture
def cluster() -> KubeManifest:
    manifests = render(load_cluster("gke"), load_job("nq_mistral_7b", [DATA]))
    spec: KubeManifest = kinds(manifests)["RayJob"]["spec"]["rayClusterSpec"]
    return spec


def pods(cluster: KubeManifest) -> list[KubeManifest]:
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("name", PRESETS)
def test_render_gives_the_committed_files(name: str) -> None:
    """If this fails, run `make docs`."""
    assert (RENDERED / f"{name}.yaml").read_text() == rendered(name)


def test_render_presets_have_no_other_files() -> None:
    assert {path.stem for path in RENDERED.glob("*.yaml")} == set(PRESETS)


def test_to_yaml_reads_back_and_has_no_anchors() -> None:
    manifests = render(load_cluster("gke"), load_job("nq_mistral_7b", [DATA]))
    text = to_yaml(manifests)
    assert list(yaml.safe_load_all(text)) == manifests
    assert "&id" not in text


def quotes_of(value: str) -> str | None:
    """The quotes that a value is written in; None if there are none."""
    document = yaml.compose(to_yaml([{"value": value}]))
    assert isinstance(document, yaml.MappingNode)
    ((_, node),) = document.value
    style: str | None = node.style
    return style


@pytest.mark.parametrize(
    "value", ["y", "N", "1e5", "1E-5", "1234567890123e45", "08", "1_0e5", "-_0", "-.5", "+1.", "0o17", "0X1F", "on"]
)
def test_to_yaml_quotes_what_kubectl_would_read_as_another_type(value: str) -> None:
    assert quotes_of(value) == "'"
    assert yaml.safe_load(to_yaml([{"value": value}])) == {"value": value}


@given(st.text(alphabet="0123456789eE+-._xXoObBaf", min_size=1, max_size=12))
def test_to_yaml_writes_no_number_without_quotes(value: str) -> None:
    """By Python's own conversions, which take all finite numbers that go-yaml 2 takes."""
    if quotes_of(value) is None:
        for convert in (float, lambda text: int(text, 0)):
            with pytest.raises(ValueError, match=r"could not convert|invalid literal"):
                convert(value.replace("_", ""))


def test_render_is_pure() -> None:
    spec = load_cluster("eks")
    first = render(spec)
    first[-1]["spec"].clear()
    assert render(spec) == render(load_cluster("eks"))


def test_cluster_spec_sets_labels_and_resources_of_the_pools(cluster: KubeManifest) -> None:
    sampling, training, data = cluster["workerGroupSpecs"]
    assert sampling["labels"]["ray-subcluster"] == data["labels"]["ray-subcluster"] == "sampling"
    assert "ray-subcluster" not in training["labels"]
    assert training["labels"]["pool"] == "trainer"
    # One unit per GPU.
    assert (sampling["resources"], training["resources"]) == ({"sampler": "1"}, {"trainer": "8"})
    assert "resources" not in data
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["headGroupSpec"]["labels"] == {"routing": "pools"}
    assert "resources" not in cluster["headGroupSpec"]


def test_cluster_spec_without_gpus_has_both_pools() -> None:
    cluster = render(load_cluster("kind"), load_job("quickstart"))[-1]["spec"]["rayClusterSpec"]
    sampling, training = cluster["workerGroupSpecs"]
    assert (sampling["resources"], training["resources"]) == ({"sampler": "1"}, {"trainer": "1"})
    assert "nvidia.com/gpu" not in str((sampling, training))


def test_pool_names_are_those_that_ray_requires() -> None:
    assert SAMPLING.labels == {"ray-subcluster": "sampling"}
    assert TRAINING.labels == {"pool": "trainer"}
    assert (SAMPLING.resource, TRAINING.resource) == ("sampler", "trainer")
    assert (TRAINING.units(8), TRAINING.units(0)) == (8, 1)


def test_render_is_understood_by_the_autoscaler_of_ray() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    config = _derive_autoscaling_config_from_ray_cr(render(load_cluster("gke"))[-1])
    types = config["available_node_types"]
    market = "ray.io/market-type"
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert types["headgroup"]["labels"] == {"routing": "pools"}
    assert types["sampling"]["resources"].items() >= {"CPU": 11, "GPU": 1, "sampler": 1}.items()
    assert types["sampling"]["labels"] == {"ray-subcluster": "sampling", market: "spot"}
    assert types["training"]["resources"].items() >= {"CPU": 90, "GPU": 8, "trainer": 8}.items()
    assert types["training"]["labels"] == {"pool": "trainer", market: "on-demand"}
    assert not {"sampler", "trainer"} & types["data"]["resources"].keys()
    # Not what Ray finds: some container runtimes show the GPUs of a machine to every pod.
    assert types["headgroup"]["resources"]["GPU"] == types["data"]["resources"]["GPU"] == 0
    limits = {name: (each["min_workers"], each["max_workers"]) for name, each in types.items()}
    assert limits == {"headgroup": (0, 0), "sampling": (0, 8), "training": (0, 1), "data": (0, 4)}
    assert (types["sampling"]["idle_timeout_s"], types["training"]["idle_timeout_s"]) == (120, 600)


def test_pod_templates_let_work_use_the_grace_period(cluster: KubeManifest) -> None:
    """Ray stops work after its own drain timeout (default 30 s), even if Kubernetes would allow more."""
    from ray._private import ray_constants

    assert ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S == 30
    for pod, grace_s in zip(pods(cluster), (60, 30, 600, 30), strict=True):
        variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        assert pod["spec"]["terminationGracePeriodSeconds"] == grace_s
        assert variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == str(grace_s - 15)
        assert variables.items() >= RAY_VARIABLES.items()


def test_cluster_spec_sets_the_autoscaler_version_once(cluster: KubeManifest) -> None:
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
def test_group_template_selects_spot_machines_for_sampling_only(
    platform: str, spot: tuple[str, str], on_demand: tuple[str, str]
) -> None:
    made = render(load_cluster("eks", [f"platform={platform}"]))[-1]["spec"]
    sampling, training = (group["template"]["spec"]["nodeSelector"] for group in made["workerGroupSpecs"])
    assert spot in sampling.items()
    assert on_demand in training.items()


def test_pods_without_gpus_avoid_machines_with_gpus_where_nothing_taints_these() -> None:
    """Beside the head, a training pod that asks for all CPUs of its machine would not fit."""
    cluster = render(load_cluster("onprem"), load_job("quickstart"))[-1]["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    (preferred,) = head["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (term,) = preferred["preference"]["matchExpressions"]
    assert term == {"key": "nvidia.com/gpu.count", "operator": "DoesNotExist"}
    assert all("affinity" not in group["template"]["spec"] for group in cluster["workerGroupSpecs"])


def test_group_template_excludes_spot_machines_on_gke_for_training(cluster: KubeManifest) -> None:
    sampling, training, _ = (group["template"]["spec"] for group in cluster["workerGroupSpecs"])
    assert sampling["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    (term,) = training["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"] == [
        {"key": "cloud.google.com/gke-spot", "operator": "DoesNotExist"},
        {"key": "cloud.google.com/gke-preemptible", "operator": "DoesNotExist"},
    ]


def test_group_template_leaves_the_choice_of_preemptible_machines_to_the_spec() -> None:
    """They are older machines without a taint; a selector and an affinity that contradict it would wait for ever."""
    preemptible = {"cloud.google.com/gke-preemptible": "true"}
    spec = load_cluster("gke", ["sampling.spot=false", f"sampling.node.node_selector={preemptible}"])
    cluster = render(spec, load_job("quickstart"))[-1]["spec"]["rayClusterSpec"]
    pod = cluster["workerGroupSpecs"][0]["template"]["spec"]
    assert preemptible.items() <= pod["nodeSelector"].items()
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "cloud.google.com/gke-spot", "operator": "DoesNotExist"}]


def test_pod_templates_restrict_rights_and_mount_writable_folders(cluster: KubeManifest) -> None:
    job = kinds(render(load_cluster("onprem"), load_job("quickstart")))["RayJob"]["spec"]
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


def test_autoscaler_alone_mounts_the_api_token(cluster: KubeManifest) -> None:
    assert not any(pod["spec"]["automountServiceAccountToken"] for pod in pods(cluster))
    holders = [pod for pod in pods(cluster) if "serviceAccountToken" in str(pod["spec"]["volumes"])]
    assert holders == [cluster["headGroupSpec"]["template"]]
    assert "api-access" not in str(holders[0]["spec"]["containers"])
    mounts = {each["name"]: each["mountPath"] for each in cluster["autoscalerOptions"]["volumeMounts"]}
    assert mounts["api-access"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert cluster["authOptions"] == {"mode": "token"}


def test_pod_templates_mount_shared_memory_and_storage() -> None:
    made = render(load_cluster("onprem"))[-1]["spec"]
    for template in pods(made):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        paths = {mount["mountPath"]: mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert volumes[paths["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert volumes[paths["/mnt/storage"]]["persistentVolumeClaim"] == {"claimName": "pos2distill"}


def test_ray_job_deletes_its_cluster_at_the_end() -> None:
    job = kinds(render(load_cluster("gke", ["job.backoff_limit=0"]), load_job("nq_mistral_7b", [DATA])))["RayJob"]
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert (spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"], spec["backoffLimit"]) == (60, 604800, 0)
    assert "kueue.x-k8s.io/queue-name" not in job["metadata"]["labels"]


@pytest.mark.parametrize(("command", "smallest"), [("study", 1), ("distill", 1), ("evaluate", 0), ("sample", 0)])
def test_cluster_spec_reserves_no_training_machine_for_a_command_that_does_not_train(
    command: str, smallest: int
) -> None:
    spec = load_cluster("onprem", ["training.min=1", "sampling.min=1"])
    job = load_job("quickstart", ["runtime.storage=/mnt/storage/x"], command=command)
    groups = {each["groupName"]: each for each in render(spec, job)[-1]["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    training, sampling = groups["training"], groups["sampling"]
    assert (training["replicas"], training["minReplicas"]) == (smallest, smallest)
    assert training["maxReplicas"] > 0
    assert (sampling["replicas"], sampling["minReplicas"]) == (1, 1)


def test_submitter_template_is_not_evicted() -> None:
    job = render(load_cluster("gke", ["pods.priority_class=research"]), load_job("nq_mistral_7b", [DATA]))[-1]["spec"]
    pod = job["submitterPodTemplate"]
    assert job["submitterConfig"] == {"backoffLimit": 6}
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "pipelines.jobs.rayjob_submitter", job["entrypoint"]]
    assert importlib.util.find_spec("pipelines.jobs.rayjob_submitter")
    assert pod["metadata"]["annotations"] == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    assert "DoesNotExist" in str(pod["spec"]["affinity"])
    assert pod["spec"]["priorityClassName"] == "research"


def test_submitter_template_keeps_what_kubernetes_would_replace() -> None:
    """Kubernetes makes $(HOME) in a command the container's variable, and $$ a dollar sign."""
    manifests = render(load_cluster("gke"), load_job("nq_mistral_7b", [DATA, "description=$(HOME) costs $5"]))
    (container,) = manifests[-1]["spec"]["submitterPodTemplate"]["spec"]["containers"]
    assert "$(HOME) costs $5" in manifests[-1]["spec"]["entrypoint"]
    assert "$$(HOME) costs $$5" in container["command"][-1]
    assert check(manifests) == []


def test_render_with_a_queue_labels_a_cluster_of_fixed_size() -> None:
    manifests = render(load_cluster("eks", ["job.queue=research", "sampling.min=16", "training.min=1"]))
    labels = [manifest["metadata"]["labels"] for manifest in manifests]
    assert labels[-1]["kueue.x-k8s.io/queue-name"] == "research"
    assert all("kueue.x-k8s.io/queue-name" not in each for each in labels[:-1])
    cluster = manifests[-1]["spec"]
    assert cluster["enableInTreeAutoscaling"] is False
    assert "autoscalerOptions" not in cluster
    assert not any(pod["spec"]["automountServiceAccountToken"] for pod in pods(cluster))
    assert check(manifests) == []


def test_cluster_spec_object_store_fits_into_shared_memory(cluster: KubeManifest) -> None:
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        volumes = {volume["name"]: volume.get("emptyDir") for volume in group["template"]["spec"]["volumes"]}
        shm = quantity_bytes(volumes["shared-mem"]["sizeLimit"])
        assert 0.85 * shm < int(group["rayStartParams"]["object-store-memory"]) < 0.95 * shm


def test_pod_templates_request_disk(cluster: KubeManifest) -> None:
    sizes = [pod["spec"]["containers"][0]["resources"]["requests"]["ephemeral-storage"] for pod in pods(cluster)]
    assert sizes == ["50Gi", "78Gi", "159Gi", "20Gi"]


def test_render_without_a_recipe_gives_a_cluster() -> None:
    assert "RayCluster" in kinds(render(load_cluster("onprem")))
    assert "RayJob" not in kinds(render(load_cluster("onprem")))


def test_render_uses_an_existing_service_account() -> None:
    manifests = render(load_cluster("onprem", ["pods.service_account=mine"]))
    assert "ServiceAccount" not in kinds(manifests)
    assert {pod["spec"]["serviceAccountName"] for pod in pods(manifests[-1]["spec"])} == {"mine"}


def test_network_policies_select_the_pods_and_allow_required_traffic() -> None:
    manifests = render(load_cluster("onprem"))
    all_pods, head = (manifest["spec"] for manifest in manifests if manifest["kind"] == "NetworkPolicy")
    pod_labels = [template["metadata"]["labels"] for template in pods(manifests[-1]["spec"])]
    for labels in pod_labels:
        assert all_pods["podSelector"]["matchLabels"].items() <= labels.items()
    assert all_pods["policyTypes"] == head["policyTypes"] == ["Ingress", "Egress"]
    assert "'port': 53" in str(all_pods["egress"])
    assert "monitoring" in str(all_pods["ingress"])
    assert head["podSelector"]["matchLabels"]["ray.io/node-type"] == "head"
    assert "kuberay-operator" in str(head["ingress"])
    assert head["egress"][0]["to"] == [{"ipBlock": {"cidr": "10.0.0.10/32"}}]
    assert "0.0.0.0/0" not in str(all_pods)


def test_disruption_budgets_cover_the_head_and_training() -> None:
    budgets = [each for each in render(load_cluster("gke")) if each["kind"] == "PodDisruptionBudget"]
    assert [(each["metadata"]["name"], each["spec"]["minAvailable"]) for each in budgets] == [
        ("nq-mistral-head", 1),
        ("nq-mistral-training", 1),
    ]


def test_render_has_references_to_secrets_only() -> None:
    text = to_yaml(render(load_cluster("eks"), load_job("nq_llama3_8b", [DATA, "runtime.trainers.workers=8"])))
    variables = [
        variable
        for pod in pods(render(load_cluster("eks"))[-1]["spec"])
        for variable in pod["spec"]["containers"][0]["env"]
        if variable["name"] == "HF_TOKEN"
    ]
    assert len(variables) == 3
    assert all(variable.keys() == {"name", "valueFrom"} for variable in variables)
    assert "hf_" not in text


def test_render_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecretsecret")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    text = to_yaml(render(load_cluster("eks"), load_job("nq_llama3_8b", [DATA, "runtime.trainers.workers=8"])))
    assert "secretsecret" not in text
    assert "0123456789abcdef" not in text


def test_pod_templates_leave_a_lost_node_before_kuberay_gives_the_job_up() -> None:
    job = render(load_cluster("gke"), load_job("nq_mistral_7b", [DATA]))[-1]["spec"]
    for template in [*pods(job["rayClusterSpec"]), job["submitterPodTemplate"]]:
        seconds = {each["key"]: each.get("tolerationSeconds") for each in template["spec"]["tolerations"]}
        assert seconds["node.kubernetes.io/not-ready"] == seconds["node.kubernetes.io/unreachable"] == 60


def test_pod_templates_turn_usage_statistics_off_unless_the_spec_sets_them() -> None:
    for setting, expected in (("name=a", "0"), ("pods.env={RAY_USAGE_STATS_ENABLED: '1'}", "1")):
        cluster = render(load_cluster("gke", [setting]))[-1]["spec"]
        for node in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            variables = {each["name"]: each.get("value") for each in node["template"]["spec"]["containers"][0]["env"]}
            assert variables["RAY_USAGE_STATS_ENABLED"] == expected


def test_disruption_budgets_keep_workers_that_miss_a_probe() -> None:
    budgets = [each for each in render(load_cluster("gke")) if each["kind"] == "PodDisruptionBudget"]
    assert [budget["spec"]["unhealthyPodEvictionPolicy"] for budget in budgets] == ["IfHealthyBudget"] * 2
