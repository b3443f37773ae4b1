"""Pods of a cluster: hardened, of one size, with room to write where they must."""

from typing import Any

from cluster.spec import DRAIN_ENV, ClusterSpec, NodeSection
from pos2distill.placement import RAY_VARIABLES

GPU = "nvidia.com/gpu"
HOME = "/scratch"
RAY_END_S = 15  # of a pod's last seconds, for the end of Ray itself
SUBMITTER = {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "2Gi"}

# How each platform marks machines that may be taken away, and how it marks the others.
SPOT_SELECTORS = {
    "gke": {"cloud.google.com/gke-spot": "true"},
    "eks": {"eks.amazonaws.com/capacityType": "SPOT"},
    "karpenter": {"karpenter.sh/capacity-type": "spot"},
    "other": {},
}
ON_DEMAND_SELECTORS = {
    "gke": {},  # GKE has no label for these; see _affinity
    "eks": {"eks.amazonaws.com/capacityType": "ON_DEMAND"},
    "karpenter": {"karpenter.sh/capacity-type": "on-demand"},
    "other": {},
}

Manifest = dict[str, Any]


def instance_labels(spec: ClusterSpec) -> dict[str, str]:
    """On every object and pod of this cluster. KubeRay makes the name of a job's cluster, so that is no handle."""
    return {"app.kubernetes.io/part-of": "pos2distill", "app.kubernetes.io/instance": spec.name}


def container_security() -> Manifest:
    """What every container of the cluster may not do."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_template(
    spec: ClusterSpec,
    node: NodeSection,
    container: str,
    *,
    grace_s: int,
    spot: bool,
    head: bool = False,
    keep: bool = False,
) -> Manifest:
    """The template of a head or of a group.

    Args:
        grace_s: seconds between the warning and the end.
        head: with ports, and with the API's token for the autoscaler beside it.
        keep: not to be moved to pack nodes better. The head is never moved.
    """
    metadata: Manifest = {"labels": instance_labels(spec)}
    if head or keep:
        metadata["annotations"] = _stay(spec)
    pod: Manifest = {
        "serviceAccountName": spec.pods.service_account or spec.name,
        "automountServiceAccountToken": head and spec.scales,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        **_placement(spec, node, spot=spot),
        "securityContext": _pod_security(spec),
        **_pull_secrets(spec),
        "containers": [_ray_container(spec, node, container, grace_s=grace_s, head=head)],
        "volumes": _volumes(spec, node),
    }
    return {"metadata": metadata, "spec": pod}


def submitter_template(spec: ClusterSpec) -> Manifest:
    """The pod that hands the job to the head and shows its log, on a machine like the head's: it is to stay as well."""
    return {
        "metadata": {"labels": instance_labels(spec), "annotations": _stay(spec)},
        "spec": {
            "serviceAccountName": spec.pods.service_account or spec.name,
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            **_placement(spec, spec.head, spot=False),
            "securityContext": _pod_security(spec),
            **_pull_secrets(spec),
            "containers": [
                {
                    "name": "ray-job-submitter",
                    "image": spec.image,
                    "env": [{"name": "HOME", "value": HOME}],
                    "resources": {"requests": dict(SUBMITTER), "limits": dict(SUBMITTER)},
                    "securityContext": container_security(),
                    "volumeMounts": [
                        {"name": "tmp", "mountPath": "/tmp"},
                        {"name": "scratch", "mountPath": HOME},
                    ],
                }
            ],
            "volumes": [
                {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
                {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
            ],
        },
    }


def _ray_container(spec: ClusterSpec, node: NodeSection, name: str, *, grace_s: int, head: bool) -> Manifest:
    ports = [
        {"name": "gcs-server", "containerPort": 6379},
        {"name": "dashboard", "containerPort": 8265},
    ]
    mounts = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "scratch", "mountPath": HOME},
        {"name": "shared-mem", "mountPath": "/dev/shm"},
    ]
    if spec.storage.claim:
        mounts.append({"name": "storage", "mountPath": spec.storage.mount})
    size = {"cpu": f"{node.cpus:g}", "memory": node.memory, "ephemeral-storage": node.scratch}
    if node.gpus:
        size[GPU] = str(node.gpus)
    return {
        "name": name,
        "image": spec.image,
        "workingDir": spec.pods.project,
        **({"ports": ports} if head else {}),
        "env": _environment(spec, grace_s),
        "resources": {"requests": size, "limits": dict(size)},
        "securityContext": container_security(),
        "volumeMounts": mounts,
    }


def _environment(spec: ClusterSpec, grace_s: int) -> list[Manifest]:
    own = {
        "HOME": HOME,  # the root file system is read-only; caches of models and of compiled kernels go here
        "USER": "ray",  # the user id may have no name in the image, and torch asks for one
        DRAIN_ENV: str(grace_s - RAY_END_S),  # so long work may go on after the warning; Ray's default is 30 s
        **RAY_VARIABLES,
    }
    plain = [{"name": name, "value": value} for name, value in {**own, **spec.pods.env}.items()]
    return plain + [
        {"name": each.env, "valueFrom": {"secretKeyRef": {"name": each.secret, "key": each.key}}}
        for each in spec.pods.secrets
    ]


def _volumes(spec: ClusterSpec, node: NodeSection) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": node.scratch}},  # Ray's session, and what it spills
        {"name": "scratch", "emptyDir": {"sizeLimit": node.scratch}},
        {"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": node.shm}},
    ]
    if spec.storage.claim:
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": spec.storage.claim}})
    return volumes


def _placement(spec: ClusterSpec, node: NodeSection, *, spot: bool) -> Manifest:
    """Priority, and on which machines."""
    selector = dict((SPOT_SELECTORS if spot else ON_DEMAND_SELECTORS)[spec.platform])
    if node.instance_type:
        selector["node.kubernetes.io/instance-type"] = node.instance_type
    selector |= node.node_selector
    tolerations: list[Manifest] = [each.model_dump(exclude_none=True) for each in node.tolerations]
    if node.gpus:
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    if spot and spec.platform == "gke":
        key = "cloud.google.com/gke-spot"
        tolerations.append({"key": key, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    return {
        **({"priorityClassName": spec.pods.priority_class} if spec.pods.priority_class else {}),
        **({"nodeSelector": selector} if selector else {}),
        **({"affinity": _NOT_SPOT_ON_GKE} if spec.platform == "gke" and not spot else {}),
        **({"tolerations": tolerations} if tolerations else {}),
    }


_NOT_SPOT_ON_GKE = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "cloud.google.com/gke-spot", "operator": "DoesNotExist"}]}
            ]
        }
    }
}


def _stay(spec: ClusterSpec) -> dict[str, str]:
    if spec.platform == "karpenter":
        return {"karpenter.sh/do-not-disrupt": "true"}
    return {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def _pod_security(spec: ClusterSpec) -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": spec.pods.user,
        "runAsGroup": spec.pods.user,
        "fsGroup": spec.pods.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _pull_secrets(spec: ClusterSpec) -> Manifest:
    return {"imagePullSecrets": [{"name": name} for name in spec.pods.pull_secrets]} if spec.pods.pull_secrets else {}
