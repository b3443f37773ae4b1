"""What may be wrong with a spec and its recipe although they render: only the cluster or the image can tell."""

import math
from collections.abc import Iterator

from pos2distill.config import Recipe

from .disk_sizing import OBJECT_STORE_FRACTION, Disks, disk_of, hidden_state_bytes, node_disks
from .gpu_sizing import tight_memory
from .job_command import JobCommand
from .names import ENDPOINTS
from .nodes import quantity_bytes
from .pods import RAY_SHUTDOWN_SECONDS
from .recipe_checks import actors_per_node
from .spec import ClusterSpec

# The stores whose credentials are not those of a platform's machines.
_OTHER_STORES = {"gke": ("s3",), "eks": ("gs",), "karpenter": ("gs",), "other": ("gs", "s3")}
# The annotation of a ServiceAccount that names its account at the cloud, by platform and store.
_IDENTITIES = {
    ("gke", "gs"): "iam.gke.io/gcp-service-account",
    ("eks", "s3"): "eks.amazonaws.com/role-arn",
    ("karpenter", "s3"): "eks.amazonaws.com/role-arn",
}
_WRITE_RATE = 1e9  # bytes per second that a fast disk or network takes
_POD_IDENTITY_AGENT = "169.254.170.23"  # on machines of EKS
_METADATA_SERVER = "169.254.169.254"  # address of the metadata server on Google's machines
_CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_ROLE_ARN", "AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
}
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def spec_warnings(spec: ClusterSpec, job: JobCommand | None = None) -> list[str]:
    """One line for each risk, which begins with the field. The arguments are those that `render` accepts."""
    storage = spec.storage.url
    if job is not None:
        storage = job.storage or storage
    disks = node_disks(spec, job)
    warnings = [*_unchecked_disks(spec, disks), *_missing_credentials(spec, storage)]
    warnings += [*_missing_identity(spec, storage), *_unseen_by_collector(spec)]
    if job is not None:
        warnings += [
            *_unused_gpus(spec, job.recipe),
            *_small_scratch(spec, job),
            *_missing_server_key(spec, job),
        ]
    if job is not None and job.facts.trains:
        warnings += [*_short_grace(spec, disks), *tight_memory(spec, job)]
        warnings += [*_too_many_workers(spec, job.recipe), *_missing_tracker_key(spec, job.recipe)]
    return warnings


def _unchecked_disks(spec: ClusterSpec, disks: Disks) -> Iterator[str]:
    for name, parts in disks.items():
        node = spec.groups[name].node
        if parts and node.disk is None:
            yield (
                f"{name}.node.disk: not set, so it is not checked whether the machines hold the "
                f"{disk_of(node.scratch, parts)} that a pod writes ({', '.join(parts)}); set what `kubectl describe "
                f"node` shows as Allocatable"
            )


def _small_scratch(spec: ClusterSpec, job: JobCommand) -> Iterator[str]:
    """Ray spills to `scratch` what does not fit its object store. A block exists twice while it is passed on."""
    hidden = max(hidden_state_bytes(spec, cell.study) for cell in job.cells)
    for name, group in spec.groups.items():
        if 2 * hidden > quantity_bytes(group.node.scratch) + OBJECT_STORE_FRACTION * quantity_bytes(group.node.shm):
            yield (
                f"{name}.node.scratch: {group.node.scratch} may not hold what Ray spills if training falls behind: the "
                f"teacher's hidden states are {hidden / 1e9:.0f} GB; raise it, or set method.teacher: resident"
            )


def _short_grace(spec: ClusterSpec, disks: Disks) -> Iterator[str]:
    """A notice leaves time to write a checkpoint only at a rate that disks and networks have."""
    checkpoint = disks["training"].get("checkpoint", 0)
    seconds = spec.training.grace_s - RAY_SHUTDOWN_SECONDS
    needed = math.ceil(checkpoint / _WRITE_RATE) + RAY_SHUTDOWN_SECONDS
    if spec.training.grace_s < needed:
        yield (
            f"training.grace_s: {spec.training.grace_s} leaves {seconds} s to write a checkpoint of "
            f"{checkpoint / 1e9:.0f} GB, so that the steps since the last one may be lost; set {needed}"
        )


def _missing_credentials(spec: ClusterSpec, storage: str) -> Iterator[str]:
    scheme = storage.partition("://")[0]
    if scheme not in _OTHER_STORES[spec.platform]:
        return
    variables = _variables(spec)
    # On a user's own machines, an account may have rights by means that are not known here.
    has_account = spec.pods.service_account is not None or bool(spec.pods.service_account_annotations)
    if not variables.intersection(_CREDENTIALS[scheme]) and not (spec.platform == "other" and has_account):
        yield (
            f"pods.secrets: machines of platform {spec.platform} may have no rights for {scheme}://, and no variable "
            f"names credentials; set {_CREDENTIALS[scheme][0]}"
        )


def _missing_identity(spec: ClusterSpec, storage: str) -> Iterator[str]:
    """If the pods use the cloud's own store: whether they have an account of the cloud and can request its token."""
    scheme = storage.partition("://")[0]
    annotation = _IDENTITIES.get((spec.platform, scheme))
    variables = _variables(spec)
    if annotation is None or variables.intersection(_CREDENTIALS[scheme]):
        return
    if spec.pods.service_account is None and annotation not in spec.pods.service_account_annotations:
        yield (
            f"pods.service_account_annotations: {annotation} is not set, so the pods have no rights for {scheme}:// "
            f"unless the new ServiceAccount or the machines have them; set it"
        )
    elif spec.platform == "gke" and not spec.network.allows_port(80, _METADATA_SERVER):
        yield (
            f"network.egress: no rule lets the pods ask the metadata server, from which they get their rights for "
            f"{scheme}://; add {{cidr: {_METADATA_SERVER}/32, ports: [80]}}"
        )
    elif (
        spec.platform in ("eks", "karpenter")
        and annotation not in spec.pods.service_account_annotations
        and not spec.network.allows_port(80, _POD_IDENTITY_AGENT)
    ):
        yield (
            f"network.egress: no rule lets the pods ask the agent of EKS Pod Identity; if ServiceAccount "
            f"{spec.pods.service_account} has its rights from it, add {{cidr: {_POD_IDENTITY_AGENT}/32, ports: [80]}}"
        )


def _variables(spec: ClusterSpec) -> set[str]:
    """The environment variables that the spec sets in the pods."""
    return {*spec.pods.env, *(secret.env for secret in spec.pods.secrets)}


def _missing_server_key(spec: ClusterSpec, job: JobCommand) -> Iterator[str]:
    name = job.recipe.runtime.endpoint.api_key_env
    uses_server = any(not cell.study.has_weights for cell in job.cells)
    if uses_server and name is not None and name not in _variables(spec):
        yield (
            f"pods.secrets: runtime.endpoint.api_key_env names {name}, which is not set in the pods, so that the job "
            f"may end at once; set the names of a Secret and its key"
        )


def _missing_tracker_key(spec: ClusterSpec, recipe: Recipe) -> Iterator[str]:
    """Weights & Biases alone requires a key. It may also have one in a file of a mounted volume."""
    is_online = spec.pods.env.get("WANDB_MODE", "online") == "online"
    if "wandb" in recipe.runtime.trackers and is_online and not _variables(spec).intersection(_WANDB_KEYS):
        yield (
            "pods.secrets: runtime.trackers names wandb, and WANDB_API_KEY is not set in the pods, so that the job may "
            "end at once; set the names of a Secret and its key, or WANDB_MODE in pods.env to offline"
        )


def _too_many_workers(spec: ClusterSpec, recipe: Recipe) -> Iterator[str]:
    """Too few nodes for `runtime.trainers.workers` are an error; a maximum that does not fit is only never reached."""
    trainers, group = recipe.runtime.trainers, spec.training
    room = group.max * actors_per_node(trainers, group, is_trainer=True)
    if trainers.max_workers is not None and trainers.max_workers > room:
        yield (
            f"training.max: the nodes of training hold {room} workers, fewer than runtime.trainers.max_workers, "
            f"{trainers.max_workers}; raise it, or lower runtime.trainers.max_workers"
        )


def _unseen_by_collector(spec: ClusterSpec) -> Iterator[str]:
    """KubeRay passes the Ray container's variables to no other container. The collector writes only to the storage."""
    if spec.history is None:
        return
    scheme = spec.storage.url.partition("://")[0]
    fields = dict.fromkeys(spec.pods.env, "pods.env")
    fields.update((secret.env, "pods.secrets") for secret in spec.pods.secrets)
    names = (*_CREDENTIALS[scheme], *ENDPOINTS[scheme])
    unseen = [f"{name} of {fields[name]}" for name in names if name in fields]
    if unseen:
        yield (
            f"history: KubeRay's collector does not get {' and '.join(unseen)}, so that it may not reach {scheme}://; "
            f"use the cloud's own store with the rights of the ServiceAccount, or remove it"
        )


def _unused_gpus(spec: ClusterSpec, recipe: Recipe) -> Iterator[str]:
    runtime = recipe.runtime
    pools = (runtime.samplers, runtime.teachers, runtime.trainers)
    if spec.training.node.gpus and not any(pool.gpus for pool in pools):
        yield f"training.node.gpus: {recipe.name} uses no GPU of these machines; use machines without GPUs"
