"""From a `ClusterSpec` to manifests, as plain dicts. Pure: no files, no cluster, no clock.

A job makes its cluster and takes it away again (RayJob, for production); without a recipe a cluster stands alone
(RayCluster, for trying things out). docs/cluster.md says what is made and why.
"""

from collections.abc import Sequence
from typing import Any

import yaml

from cluster.entrypoint import make_entrypoint
from cluster.pods import HOME, container_security, instance_labels, pod_template, submitter_template
from cluster.spec import ClusterSpec, DataGroup, EgressRule, NodeSection, SamplingGroup, TrainingGroup, quantity_bytes
from pos2distill.placement import POOLS_LABEL, SAMPLING, TRAINING, Pool

Manifest = dict[str, Any]

HEAD_GRACE_S = 60
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
# Of the pod, in ten minutes; none submits the job twice. After the last one KubeRay gives up a job that still runs.
SUBMITTER_RETRIES = 6
AUTOSCALER = {"cpu": "1", "memory": "2Gi"}


def render(spec: ClusterSpec, recipe: str | None = None, overrides: Sequence[str] = ()) -> list[Manifest]:
    """All manifests of a cluster, in the order in which they are applied.

    Args:
        recipe: the study that the job runs; None for a cluster that stands alone.
        overrides: of the recipe, `section.field=value`.
    Raises:
        UserError: if the recipe cannot run on this cluster.
    """
    main = ray_cluster(spec) if recipe is None else ray_job(spec, make_entrypoint(spec, recipe, overrides))
    account = [] if spec.pods.service_account else [service_account(spec)]
    return [*account, *network_policies(spec), *disruption_budgets(spec), main]


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """YAML documents with keys in the order of Kubernetes' examples, without anchors."""
    return "---\n".join(
        yaml.dump(manifest, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=1000) for manifest in manifests
    )


def ray_job(spec: ClusterSpec, entrypoint: str) -> Manifest:
    """The job with its own cluster: production.

    KubeRay's own fault tolerance of the head is left out: it does not survive a job's retry. A retry starts a new
    cluster, and the study goes on from what lies in its storage.
    """
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(spec, spec.name, queued=True),
        "spec": {
            "entrypoint": entrypoint,
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": spec.job.ttl_s,
            "activeDeadlineSeconds": spec.job.deadline_s,
            "preRunningDeadlineSeconds": spec.job.start_deadline_s,
            "backoffLimit": spec.job.backoff_limit,
            "submitterConfig": {"backoffLimit": SUBMITTER_RETRIES},
            "submitterPodTemplate": submitter_template(spec),
            "rayClusterSpec": cluster_spec(spec),
        },
    }


def ray_cluster(spec: ClusterSpec) -> Manifest:
    """The cluster alone; it stays until it is deleted."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _metadata(spec, spec.name, queued=True),
        "spec": cluster_spec(spec),
    }


def cluster_spec(spec: ClusterSpec) -> Manifest:
    """The head and the groups. The autoscaler's version is set here and nowhere else (no environment variable)."""
    groups = [
        _group(spec, "sampling", spec.sampling, SAMPLING, spot=spec.sampling.spot),
        _group(spec, "training", spec.training, TRAINING, spot=False),
    ]
    if spec.data:
        groups.append(_group(spec, "data", spec.data, SAMPLING, spot=spec.data.spot))
    options = {
        "version": "v2",
        "resources": {"requests": dict(AUTOSCALER), "limits": dict(AUTOSCALER)},
        "securityContext": container_security(),
        "env": [{"name": "HOME", "value": HOME}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "scratch", "mountPath": HOME}],
    }
    return {
        "rayVersion": spec.ray_version,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": spec.scales,
        **({"autoscalerOptions": options} if spec.scales else {}),
        "headGroupSpec": {
            "labels": dict(POOLS_LABEL),
            # No CPUs, so that no work is placed there: the driver and Ray's own processes want none.
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **_object_store(spec.head)},
            "template": pod_template(spec, spec.head, "ray-head", grace_s=HEAD_GRACE_S, spot=False, head=True),
        },
        "workerGroupSpecs": groups,
    }


def _group(
    spec: ClusterSpec, name: str, group: SamplingGroup | TrainingGroup | DataGroup, pool: Pool, *, spot: bool
) -> Manifest:
    # Nodes for data tasks are of the sampling subcluster, since Ray Data's selector covers all its tasks; but they
    # offer no `sampler`, so no sampler is placed there.
    works = not isinstance(group, DataGroup)
    offers = {"resources": {pool.resource: str(pool.units(group.node.gpus))}} if works else {}
    return {
        "groupName": name,
        "replicas": group.min,
        "minReplicas": group.min,
        "maxReplicas": group.max,
        **({"idleTimeoutSeconds": group.idle_timeout_s} if spec.scales else {}),
        "labels": {**pool.labels, "ray.io/market-type": "spot" if spot else "on-demand"},
        **offers,
        "rayStartParams": _object_store(group.node),
        "template": pod_template(
            spec, group.node, "ray-worker", grace_s=group.grace_s, spot=spot, keep=isinstance(group, TrainingGroup)
        ),
    }


def _object_store(node: NodeSection) -> dict[str, str]:
    """Ray alone would take 0.3 of the memory, and a folder on disk where /dev/shm is smaller than that."""
    return {"object-store-memory": str(int(0.9 * quantity_bytes(node.shm)))}


def service_account(spec: ClusterSpec) -> Manifest:
    """The identity of all pods, with the cloud's access to the storage. Only the head gets a token of the API."""
    metadata = _metadata(spec, spec.name)
    if spec.pods.service_account_annotations:
        metadata["annotations"] = dict(spec.pods.service_account_annotations)
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": False,
    }


def network_policies(spec: ClusterSpec) -> list[Manifest]:
    """What pods may reach and who may reach them: one policy for all, a second one for the head.

    Plain Kubernetes policies: KubeRay's own `networkPolicy` is behind a gate that is off by default.
    """
    network, own = spec.network, {"podSelector": {"matchLabels": instance_labels(spec)}}
    ingress: list[Manifest] = [{"from": [own]}]
    if network.metrics_namespace:
        ingress.append({"from": [_namespace(network.metrics_namespace)], "ports": _ports(8080)})
    dns: Manifest = {
        "to": [_namespace("kube-system"), *({"ipBlock": {"cidr": cidr}} for cidr in network.dns)],
        "ports": [*_ports(53, protocol="UDP"), *_ports(53)],
    }
    everyone = _policy(spec, spec.name, {}, ingress, [{"to": [own]}, dns, *map(_egress, network.egress)])
    # The operator asks the dashboard how the job goes; the autoscaler asks the API for pods.
    operator = {"from": [_namespace(network.operator_namespace)], "ports": _ports(8265)}
    head = _policy(spec, f"{spec.name}-head", {"ray.io/node-type": "head"}, [operator], [_egress(network.api_server)])
    return [everyone, head]


def disruption_budgets(spec: ClusterSpec) -> list[Manifest]:
    """The head and the trainers are not drained away while they work. Samplers and data nodes may go at any time."""
    kept = {
        "head": ({"ray.io/node-type": "head"}, 1),
        "training": ({"ray.io/group": "training"}, spec.training.max),
    }
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": _metadata(spec, f"{spec.name}-{name}"),
            "spec": {
                "minAvailable": count,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": {**instance_labels(spec), **labels}},
            },
        }
        for name, (labels, count) in kept.items()
    ]


def _policy(
    spec: ClusterSpec, name: str, labels: dict[str, str], ingress: list[Manifest], egress: list[Manifest]
) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(spec, name),
        "spec": {
            "podSelector": {"matchLabels": {**instance_labels(spec), **labels}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _egress(rule: EgressRule) -> Manifest:
    return {"to": [{"ipBlock": {"cidr": rule.cidr}}], "ports": _ports(*rule.ports, protocol=rule.protocol)}


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _ports(*numbers: int, protocol: str = "TCP") -> list[Manifest]:
    return [{"protocol": protocol, "port": number} for number in numbers]


def _metadata(spec: ClusterSpec, name: str, *, queued: bool = False) -> Manifest:
    labels = instance_labels(spec)
    if queued and spec.job.queue:
        labels[QUEUE_LABEL] = spec.job.queue
    return {"name": name, "namespace": spec.namespace, "labels": labels}


class _Plain(yaml.SafeDumper):
    """No anchors, and lists indented below their key."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)
