"""Render a `ClusterSpec` as Kubernetes objects, as plain dicts. Reads no cluster and no clock.

With a recipe, a RayJob creates its cluster and deletes it afterwards (for production). Without one, a RayCluster runs
until it is deleted (for trying things out). docs/cluster.md describes every object and the reasons for it.
"""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from pos2distill.node_pools import POOLS_LABEL, SAMPLING, TRAINING, Pool

from .disk_sizing import OBJECT_STORE_FRACTION, Disks, disk_of, node_disks
from .entrypoint import job_storage, make_entrypoint
from .gpu_sizing import check_gpu_memory
from .job_command import JobCommand
from .names import (
    ELASTIC_ANNOTATION,
    GROUP_LABEL,
    MARKET_LABEL,
    NODE_TYPE_LABEL,
    QUEUE_LABEL,
    STORAGE_ANNOTATION,
)
from .network import EgressRule
from .nodes import NodeSection, quantity_bytes
from .pods import (
    autoscaler_options,
    collector_options,
    group_template,
    head_template,
    recipe_map_name,
    submitter_template,
)
from .recipe_file import RecipeFile
from .spec import ClusterSpec
from .types import KubeManifest

# Retries of the submitter's pod when it is lost, which take about ten minutes. A retry attaches to the job if the head
# knows it. After the last one, KubeRay marks the job as failed even if it still runs.
SUBMITTER_RETRIES = 6

_HEAD_LABELS = {NODE_TYPE_LABEL: "head"}
# Ray would count those of its machine, which some container runtimes show to every pod.
_NO_GPUS = {"num-gpus": "0"}


def render(spec: ClusterSpec, job: JobCommand | None = None) -> list[KubeManifest]:
    """All objects of a cluster, in the order in which they must be applied.

    Args:
        job: what the job runs; None for a cluster without a job.
    Raises:
        UserError: if the recipe cannot run on this cluster.
    """
    manifests = _companions(spec)
    if job is None:
        manifests.append(ray_cluster(spec))
    else:
        if job.own_recipe is not None:
            manifests.append(recipe_map(spec, job.own_recipe))
        manifests.append(ray_job(spec, job))
    return manifests


def _companions(spec: ClusterSpec) -> list[KubeManifest]:
    """The objects beside the job, or beside the cluster without a job."""
    manifests = []
    if not spec.pods.service_account:
        manifests.append(service_account(spec))
    manifests += network_policies(spec)
    manifests += disruption_budgets(spec)
    if spec.network.pod_monitor is not None:
        manifests.append(pod_monitor(spec))
    return manifests


def to_yaml(manifests: Sequence[KubeManifest]) -> str:
    """YAML documents, with keys in the order of Kubernetes' documentation and without anchors."""
    documents = [
        yaml.dump(manifest, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=1000)
        for manifest in manifests
    ]
    return "---\n".join(documents)


def recipe_map(spec: ClusterSpec, recipe: RecipeFile) -> KubeManifest:
    """The user's recipe, which the head mounts."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(spec, recipe_map_name(spec, recipe)),
        "data": {recipe.name: recipe.text},
    }


def ray_job(spec: ClusterSpec, job: JobCommand) -> KubeManifest:
    """The job and its cluster.

    KubeRay's fault tolerance of the head is not used, because it does not survive a retry of the job. A retry starts a
    new cluster, and the study resumes from its storage.
    """
    entrypoint = make_entrypoint(spec, job)
    check_gpu_memory(spec, job)
    disks = node_disks(spec, job)
    metadata = _queued_metadata(spec)
    metadata.setdefault("annotations", {})[STORAGE_ANNOTATION] = job_storage(spec, job)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            "entrypoint": entrypoint,
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": spec.job.ttl_s,
            "activeDeadlineSeconds": spec.job.deadline_s,
            "preRunningDeadlineSeconds": spec.job.start_deadline_s,
            "backoffLimit": spec.job.backoff_limit,
            "submitterConfig": {"backoffLimit": SUBMITTER_RETRIES},
            "submitterPodTemplate": submitter_template(spec, entrypoint),
            "rayClusterSpec": cluster_spec(spec, disks, job),
        },
    }


def ray_cluster(spec: ClusterSpec) -> KubeManifest:
    """A cluster without a job. It runs until it is deleted."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _queued_metadata(spec),
        "spec": cluster_spec(spec, node_disks(spec)),
    }


def cluster_spec(spec: ClusterSpec, disks: Disks, job: JobCommand | None = None) -> KubeManifest:
    """The head and the node groups.

    Args:
        disks: what `node_disks` returns.
        job: the job that runs there, whose recipe the head may mount.
    """
    fields: KubeManifest = {
        "rayVersion": spec.ray_version,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": spec.scales,
    }
    if spec.scales:
        fields["autoscalerOptions"] = autoscaler_options(has_fallbacks=bool(spec.sampling_fallbacks))
    if spec.history is not None:
        fields["historyServerOptions"] = {"collectorOptions": collector_options(spec, spec.history)}
    fields["headGroupSpec"] = {
        "labels": dict(POOLS_LABEL),
        # No CPUs, so that Ray places no work on the head: the driver and Ray's own processes request none.
        "rayStartParams": {"num-cpus": "0", **_NO_GPUS, "dashboard-host": "0.0.0.0", **_object_store(spec.head)},
        "template": head_template(spec, job.own_recipe if job else None),
    }
    fields["workerGroupSpecs"] = [_worker_group(spec, name, disks[name], job) for name in spec.groups]
    return fields


def _worker_group(spec: ClusterSpec, name: str, disk_parts: dict[str, int], job: JobCommand | None) -> KubeManifest:
    group = spec.groups[name]
    # Machines for training would be reserved, and idle, while a job only samples or evaluates.
    is_unused = name == "training" and job is not None and not job.facts.trains and spec.scales
    smallest = 0 if is_unused else group.min
    # Nodes for data tasks carry the label of sampling, because the label selector of Ray Data applies to all its tasks.
    pool: Pool = TRAINING if name == "training" else SAMPLING
    fields: KubeManifest = {
        "groupName": name,
        "replicas": smallest,
        "minReplicas": smallest,
        "maxReplicas": group.max,
    }
    if spec.scales:
        fields["idleTimeoutSeconds"] = group.idle_timeout_s
    preference = list(spec.sampling_groups)
    if name in preference and spec.sampling_fallbacks and spec.scales:
        # Among groups whose nodes have the same CPUs and GPUs, Ray's autoscaler takes the one with the greatest.
        fields["priority"] = len(preference) - preference.index(name)
    fields["labels"] = {**pool.labels, MARKET_LABEL: "spot" if group.spot else "on-demand"}
    if name != "data":  # without the custom resource, no sampler is placed on the nodes for data tasks
        fields["resources"] = {pool.resource: str(pool.units(group.node.gpus))}
    fields["rayStartParams"] = {**(_NO_GPUS if name == "data" else {}), **_object_store(group.node)}
    disk = disk_of(group.node.scratch, disk_parts)
    fields["template"] = group_template(spec, group, disk, evictable=name != "training")
    return fields


def _object_store(node: NodeSection) -> dict[str, str]:
    """The size of Ray's object store.

    By default, Ray 2.60 takes 0.3 of the memory, and stores objects on disk if /dev/shm is smaller than that.
    """
    return {"object-store-memory": str(int(OBJECT_STORE_FRACTION * quantity_bytes(node.shm)))}


def service_account(spec: ClusterSpec) -> KubeManifest:
    """The identity of all pods, with access to the storage. Only the autoscaler mounts its token."""
    metadata = _metadata(spec, spec.name)
    if spec.pods.service_account_annotations:
        metadata["annotations"] = dict(spec.pods.service_account_annotations)
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": False,
    }


def network_policies(spec: ClusterSpec) -> list[KubeManifest]:
    """Allowed connections: one policy for all pods, and a second one for the head.

    These are plain Kubernetes policies: the field `networkPolicy` of KubeRay 1.7 requires a feature gate that is off by
    default.
    """
    same_cluster = {"podSelector": {"matchLabels": spec.labels}}
    ingress: list[KubeManifest] = [{"from": [same_cluster]}]
    if spec.network.metrics_namespace:
        # 8080 is the port on which KubeRay exports the metrics of every Ray node.
        ingress.append({"from": [_namespace(spec.network.metrics_namespace)], "ports": _ports(8080)})
    dns_servers = [_namespace("kube-system")] + [_addresses(cidr) for cidr in spec.network.dns]
    # DNS uses UDP, and TCP for long answers.
    dns_ports = _ports(53, protocol="UDP") + _ports(53)
    egress = [{"to": [same_cluster]}, {"to": dns_servers, "ports": dns_ports}]
    egress += [_egress(rule) for rule in spec.network.egress]
    all_pods = _policy(spec, spec.name, {}, ingress, egress)

    # The operator requests the job's status from the dashboard; the autoscaler requests pods from the Kubernetes API.
    operator = {"from": [_namespace(spec.network.operator_namespace)], "ports": _ports(8265)}
    head = _policy(spec, f"{spec.name}-head", _HEAD_LABELS, [operator], [_egress(spec.network.api_server)])
    return [all_pods, head]


def disruption_budgets(spec: ClusterSpec) -> list[KubeManifest]:
    """Keep the head and the training nodes from being drained. All other nodes may be drained at any time."""
    head = _disruption_budget(spec, "head", _HEAD_LABELS, min_available=1)
    # All nodes of training, because the loss of one stops all workers.
    training = _disruption_budget(spec, "training", {GROUP_LABEL: "training"}, min_available=spec.training.max)
    return [head, training]


def pod_monitor(spec: ClusterSpec) -> KubeManifest:
    """Tells a Prometheus operator to scrape the Ray metrics of all pods of the cluster."""
    metadata = _metadata(spec, spec.name)
    metadata["labels"] = {**spec.labels, **(spec.network.pod_monitor or {})}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": spec.labels},
            "podMetricsEndpoints": [{"port": "metrics"}],  # KubeRay 1.7 gives every Ray container this port, 8080
        },
    }


def _disruption_budget(spec: ClusterSpec, name: str, labels: dict[str, str], *, min_available: int) -> KubeManifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(spec, f"{spec.name}-{name}"),
        "spec": {
            "minAvailable": min_available,
            # A worker under load may miss the probes of KubeRay for a while, and still trains.
            "unhealthyPodEvictionPolicy": "IfHealthyBudget",
            "selector": {"matchLabels": {**spec.labels, **labels}},
        },
    }


def _policy(
    spec: ClusterSpec, name: str, labels: dict[str, str], ingress: list[KubeManifest], egress: list[KubeManifest]
) -> KubeManifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(spec, name),
        "spec": {
            "podSelector": {"matchLabels": {**spec.labels, **labels}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _egress(rule: EgressRule) -> KubeManifest:
    peer = _namespace(rule.namespace) if rule.namespace else _addresses(str(rule.cidr))
    return {"to": [peer], "ports": _ports(*rule.ports, protocol=rule.protocol)}


def _addresses(cidr: str) -> KubeManifest:
    return {"ipBlock": {"cidr": cidr}}


def _namespace(name: str) -> KubeManifest:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _ports(*numbers: int, protocol: str = "TCP") -> list[KubeManifest]:
    return [{"protocol": protocol, "port": number} for number in numbers]


def _metadata(spec: ClusterSpec, name: str) -> KubeManifest:
    return {"name": name, "namespace": spec.namespace, "labels": spec.labels}


def _queued_metadata(spec: ClusterSpec) -> KubeManifest:
    """The metadata of the object that Kueue or a gang scheduler admits."""
    metadata = _metadata(spec, spec.name)
    metadata["labels"] = {**spec.labels, **spec.job.labels}
    if spec.job.queue:
        metadata["labels"][QUEUE_LABEL] = spec.job.queue
    if spec.job.elastic:
        metadata["annotations"] = {ELASTIC_ANNOTATION: "true"}
    return metadata


# What kubectl's YAML (go-yaml 2) takes for a boolean or a number without its underscores, but PyYAML does not: y, 1e5,
# 08, 0o17, 0X1F.
_NOT_TEXT_IN_GO = re.compile(
    r"[yYnN]|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?0([xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)"
)


class _PlainDumper(yaml.SafeDumper):
    """Writes no anchors, texts of several lines as blocks, and indents lists below their key."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)

    def represent_text(self, data: str) -> yaml.ScalarNode:
        """A text; PyYAML quotes what cannot be a block, and what it would itself read as another type."""
        style = "|" if "\n" in data else None
        if _NOT_TEXT_IN_GO.fullmatch(data.replace("_", "")):
            style = "'"
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_PlainDumper.add_representer(str, _PlainDumper.represent_text)
