"""Pod templates: every container has fixed resources, restricted rights and writable volumes where it needs them."""

from collections.abc import Mapping

from pos2distill.node_pools import DRAIN_VARIABLE, RAY_VARIABLES

from .names import (
    GKE_PREEMPTIBLE_LABEL,
    GKE_SPOT_LABEL,
    GPU,
    GPU_COUNT_LABEL,
    INSTANCE_TYPE_LABEL,
    LOST_NODE_TAINTS,
    ON_DEMAND_SELECTORS,
    SPOT_SELECTORS,
    SUBMITTER_MODULE,
    TOKEN_FOLDER,
)
from .nodes import NodeGroup, NodeSection
from .recipe_file import FOLDER as RECIPE_FOLDER
from .recipe_file import RecipeFile
from .sections import HistorySection, VolumeSection
from .spec import ClusterSpec
from .types import KubeManifest

HOME = "/scratch"
HEAD_GRACE_SECONDS = 60
RAY_SHUTDOWN_SECONDS = 15  # the end of a pod's grace period, in which Ray itself shuts down
SUBMITTER_SIZE = {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "2Gi"}
AUTOSCALER_SIZE = {"cpu": "1", "memory": "2Gi"}
COLLECTOR_SIZE = {"cpu": "200m", "memory": "256Mi"}  # KubeRay's own limits

# KubeRay gives up on a job if its head has not answered for 300 s, so the pod of a lost head must be deleted earlier.
_LOST_NODE_SECONDS = 60

# Variables of Ray 2.60's autoscaler, in seconds. Kubernetes takes every request for a pod at once, so that only a pod
# that does not start shows that a group has no machines.
_FALLBACK_VARIABLES = {
    # Then the group counts as failed, and the next one is used. By default after an hour.
    "RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S": "1200",
    # Pods that still wait for a machine and that nothing needs any more are deleted. By default they wait on.
    "RAY_AUTOSCALER_PENDING_NODE_IDLE_TIMEOUT_S": "600",
}

_WRITABLE_MOUNTS = (("tmp", "/tmp"), ("scratch", HOME))
# What Kubernetes mounts by itself where a token is mounted automatically.
_API_ACCESS = "api-access"
_API_ACCESS_SOURCES: list[KubeManifest] = [
    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
]
_HEAD_PORTS = (("gcs-server", 6379), ("dashboard", 8265))


def recipe_map_name(spec: ClusterSpec, recipe: RecipeFile) -> str:
    """The name of the ConfigMap with the user's recipe. Each recipe has its own, so that none is overwritten."""
    return f"{spec.name}-recipe-{recipe.digest}"


def head_template(spec: ClusterSpec, own: RecipeFile | None = None) -> KubeManifest:
    """The pod of the head, on which the job's driver runs. It is never evicted.

    Its autoscaler reads the token of the Kubernetes API. The Ray container does not: whoever may submit jobs runs code
    in it, and the token allows creating pods.

    Args:
        own: the user's recipe, to mount.
    """
    disk = spec.head.scratch
    container = _ray_container(spec, spec.head, "ray-head", disk, grace_s=HEAD_GRACE_SECONDS, ports=_HEAD_PORTS)
    volumes = _volumes(spec, spec.head, disk)
    if spec.scales:
        volumes.append({"name": _API_ACCESS, "projected": {"sources": _API_ACCESS_SOURCES}})
    if own is not None:
        container["volumeMounts"].append({"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True})
        volumes.append({"name": "recipe", "configMap": {"name": recipe_map_name(spec, own)}})
    return _template(spec, spec.head, container, volumes, spot=False, evictable=False, grace_s=HEAD_GRACE_SECONDS)


def group_template(spec: ClusterSpec, group: NodeGroup, disk: str, *, evictable: bool) -> KubeManifest:
    """The pods of a node group.

    Args:
        disk: the disk space that they may use.
        evictable: whether Kubernetes may evict a running pod to use its nodes better.
    """
    container = _ray_container(spec, group.node, "ray-worker", disk, grace_s=group.grace_s)
    return _template(
        spec,
        group.node,
        container,
        _volumes(spec, group.node, disk),
        spot=group.spot,
        evictable=evictable,
        grace_s=group.grace_s,
    )


def submitter_template(spec: ClusterSpec, entrypoint: str) -> KubeManifest:
    """The pod that submits the job to the head and prints its log. Like the head, it is never evicted.

    KubeRay 1.7 keeps a command that is set here. `pipelines/jobs/rayjob_submitter.py` says why its own is not used.
    """
    container = {
        "name": "ray-job-submitter",
        "image": spec.image,
        "workingDir": spec.pods.project,
        # Kubernetes would replace $(NAME) in a command by a variable of the container; $$ stands for $.
        "command": ["python", "-m", SUBMITTER_MODULE, entrypoint.replace("$", "$$")],
        "env": [{"name": "HOME", "value": HOME}],
        "resources": {"requests": dict(SUBMITTER_SIZE), "limits": dict(SUBMITTER_SIZE)},
        "securityContext": _container_security(),
        "volumeMounts": _writable_mounts(),
    }
    volumes = [{"name": name, "emptyDir": {"sizeLimit": "1Gi"}} for name, _ in _WRITABLE_MOUNTS]
    return _template(spec, spec.head, container, volumes, spot=False, evictable=False)


def autoscaler_options(*, has_fallbacks: bool) -> KubeManifest:
    """The autoscaler's container, which KubeRay adds to the pod of the head.

    Its version is set here and nowhere else: KubeRay 1.7 rejects a cluster that also sets the environment variable.

    Args:
        has_fallbacks: whether another group may be used when the machines of one do not come.
    """
    variables = {"HOME": HOME} | (_FALLBACK_VARIABLES if has_fallbacks else {})
    return {
        "version": "v2",
        "resources": {"requests": dict(AUTOSCALER_SIZE), "limits": dict(AUTOSCALER_SIZE)},
        "securityContext": _container_security(),
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [
            *_writable_mounts(),
            {"name": _API_ACCESS, "mountPath": TOKEN_FOLDER, "readOnly": True},
        ],
    }


def collector_options(spec: ClusterSpec, history: HistorySection) -> KubeManifest:
    """The container that KubeRay adds to the pods of the head and of all groups for its History Server.

    It has the user and the identity of the pod. KubeRay 1.7 offers no security context for it, so pods with it do not
    meet the level Restricted.
    """
    scheme, _, path = spec.storage.url.partition("://")
    bucket = path.partition("/")[0]
    variables = {"STORAGE_BACKEND": "gcs", "GCS_BUCKET": bucket}
    if scheme == "s3":
        variables = {"STORAGE_BACKEND": "s3", "S3_BUCKET": bucket, "S3_REGION": str(history.region)}
    variables["STORAGE_ROOT_DIR"] = history.folder
    return {
        "image": history.image,
        "resources": {"requests": dict(COLLECTOR_SIZE), "limits": dict(COLLECTOR_SIZE)},
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }


def _template(
    spec: ClusterSpec,
    node: NodeSection,
    container: KubeManifest,
    volumes: list[KubeManifest],
    *,
    spot: bool,
    evictable: bool,
    grace_s: int | None = None,
) -> KubeManifest:
    metadata: KubeManifest = {"labels": {**spec.labels, **spec.pods.labels}}
    annotations = dict(spec.pods.annotations)
    if not evictable:
        annotations.update(_no_eviction(spec))
    if annotations:
        metadata["annotations"] = annotations
    pod: KubeManifest = {
        "serviceAccountName": spec.pods.service_account or spec.name,
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
    }
    if node.gpus and spec.pods.runtime_class:
        pod["runtimeClassName"] = spec.pods.runtime_class
    if spec.pods.scheduler:
        pod["schedulerName"] = spec.pods.scheduler
    if grace_s is not None:
        pod["terminationGracePeriodSeconds"] = grace_s
    pod.update(_scheduling(spec, node, spot=spot))
    pod["securityContext"] = _pod_security(spec)
    if spec.pods.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.pods.pull_secrets]
    pod["containers"] = [container]
    pod["volumes"] = volumes
    return {"metadata": metadata, "spec": pod}


def _ray_container(
    spec: ClusterSpec, node: NodeSection, name: str, disk: str, *, grace_s: int, ports: tuple[tuple[str, int], ...] = ()
) -> KubeManifest:
    container: KubeManifest = {"name": name, "image": spec.image, "workingDir": spec.pods.project}
    if ports:
        container["ports"] = [{"name": port_name, "containerPort": number} for port_name, number in ports]
    container["env"] = _environment(spec, grace_s)
    size = {"cpu": f"{node.cpus:g}", "memory": node.memory, "ephemeral-storage": disk}
    if node.gpus:
        size[GPU] = str(node.gpus)
    size.update(node.resources)
    container["resources"] = {"requests": size, "limits": dict(size)}
    container["securityContext"] = _container_security()
    mounts = _writable_mounts()
    mounts.append({"name": "shared-mem", "mountPath": "/dev/shm"})
    if spec.storage.claim:
        mounts.append({"name": "storage", "mountPath": spec.storage.mount})
    for index, volume in enumerate(spec.pods.volumes):
        mount: KubeManifest = {"name": f"volume-{index}", "mountPath": volume.mount}
        if not volume.is_writable:
            mount["readOnly"] = True
        mounts.append(mount)
    container["volumeMounts"] = mounts
    return container


def _environment(spec: ClusterSpec, grace_s: int) -> list[KubeManifest]:
    variables = {
        "HOME": HOME,  # the root file system is read-only; caches of models and compiled kernels are written here
        "USER": "ray",  # the user id may have no name in the image, and torch looks one up
        DRAIN_VARIABLE: str(grace_s - RAY_SHUTDOWN_SECONDS),
        **RAY_VARIABLES,
        "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to Ray's developers, unless pods.env says otherwise
        **spec.pods.env,
    }
    if spec.pods.model_cache:
        variables["HF_HUB_CACHE"] = spec.pods.model_cache
    environment: list[KubeManifest] = [{"name": name, "value": value} for name, value in variables.items()]
    for secret in spec.pods.secrets:
        reference = {"name": secret.secret, "key": secret.key}
        environment.append({"name": secret.env, "valueFrom": {"secretKeyRef": reference}})
    return environment


def _volumes(spec: ClusterSpec, node: NodeSection, disk: str) -> list[KubeManifest]:
    volumes: list[KubeManifest] = [
        # Ray's session folder, objects that it spills, models from URLs, and checkpoints.
        {"name": "tmp", "emptyDir": {"sizeLimit": disk}},
        {"name": "scratch", "emptyDir": {"sizeLimit": disk}},
        {"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": node.shm}},
    ]
    if spec.storage.claim:
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": spec.storage.claim}})
    for index, volume in enumerate(spec.pods.volumes):
        volumes.append({"name": f"volume-{index}", **_source(volume)})
    return volumes


def _source(volume: VolumeSection) -> KubeManifest:
    if volume.secret:
        return {"secret": {"secretName": volume.secret}}
    if volume.config_map:
        return {"configMap": {"name": volume.config_map}}
    claim: KubeManifest = {"claimName": volume.claim}
    if volume.read_only:
        claim["readOnly"] = True
    return {"persistentVolumeClaim": claim}


def _writable_mounts() -> list[KubeManifest]:
    return [{"name": name, "mountPath": path} for name, path in _WRITABLE_MOUNTS]


def _scheduling(spec: ClusterSpec, node: NodeSection, *, spot: bool) -> KubeManifest:
    """The fields of a pod that decide on which machines it may run, and its priority."""
    selector = dict(SPOT_SELECTORS[spec.platform] if spot else ON_DEMAND_SELECTORS[spec.platform])
    if node.instance_type:
        selector[INSTANCE_TYPE_LABEL] = node.instance_type
    selector.update(node.node_selector)
    tolerations: list[KubeManifest] = [toleration.model_dump(exclude_none=True) for toleration in node.tolerations]
    for key in LOST_NODE_TAINTS:
        tolerations.append(
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_SECONDS}
        )
    if node.gpus:
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    if spot and spec.platform == "gke":
        # GKE taints its spot machines with the same key and value as their label.
        toleration = {"key": GKE_SPOT_LABEL, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        tolerations.append(toleration)
    fields: KubeManifest = {}
    if spec.pods.priority_class:
        fields["priorityClassName"] = spec.pods.priority_class
    if selector:
        fields["nodeSelector"] = selector
    if spec.platform == "gke" and not spot:
        fields["affinity"] = _not_on_gke_spot(selector)
    if spec.platform == "other" and spec.training.node.gpus and not node.gpus:
        fields["affinity"] = _rather_not_on_gpus()
    fields["tolerations"] = tolerations
    return fields


def _not_on_gke_spot(selector: Mapping[str, str]) -> KubeManifest:
    """Nor on the older preemptible machines, which have no taint of their own, unless the spec chooses them."""
    labels = [GKE_SPOT_LABEL]
    if GKE_PREEMPTIBLE_LABEL not in selector:
        labels.append(GKE_PREEMPTIBLE_LABEL)
    absent = [{"key": label, "operator": "DoesNotExist"} for label in labels]
    term = {"matchExpressions": absent}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def _rather_not_on_gpus() -> KubeManifest:
    """Machines of one's own with GPUs often have no taint, and a pod beside the trainers would take their CPUs."""
    term = {"matchExpressions": [{"key": GPU_COUNT_LABEL, "operator": "DoesNotExist"}]}
    preferred = {"weight": 100, "preference": term}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}


def _no_eviction(spec: ClusterSpec) -> dict[str, str]:
    if spec.platform == "karpenter":
        return {"karpenter.sh/do-not-disrupt": "true"}
    return {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def _container_security() -> KubeManifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _pod_security(spec: ClusterSpec) -> KubeManifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": spec.pods.user,
        "runAsGroup": spec.pods.user,
        "fsGroup": spec.pods.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
