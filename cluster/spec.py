"""What a cluster is to be: `ClusterSpec`, read from its own YAML file with the same overrides and errors as a recipe.

It says where and how a study runs and never what it computes; nothing of it is fingerprinted.
"""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from pos2distill.config import Section
from pos2distill.config.load import apply_override, find_yaml, read_sections, to_user_error
from pos2distill.errors import did_you_mean
from pos2distill.secrets import holds_secret, looks_secret

PRESETS = Path(__file__).parent / "presets"
STORES = ("gs", "s3")  # what the image can write to; a test holds that the lock opens all of these
READABLE = (*STORES, "hf", "http", "https")
NAME_LENGTH = 47  # KubeRay: a RayJob's name, from which it makes longer ones

_DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(Mi|Gi|Ti)$"
_REMOTE = re.compile(r"^[a-z][a-z0-9+.-]*://[^/]+")
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_BYTES = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
DRAIN_ENV = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_RESERVED_ENV = (  # the first three are set here, the others by KubeRay
    *("HOME", "USER", DRAIN_ENV, "RAY_enable_autoscaler_v2", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"),
    *("RAY_PORT", "RAY_IP", "FQ_RAY_IP", "RAY_CLUSTER_NAME", "RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME"),
)
_CLAIM_MOUNTS_TAKEN = ("/tmp", "/scratch", "/dev", "/proc", "/sys")

G = TypeVar("G", "SamplingGroup", "TrainingGroup", "DataGroup")


def quantity_bytes(quantity: str) -> float:
    """The bytes in a quantity of memory: `64Gi`."""
    return float(quantity[:-2]) * _BYTES[quantity[-2:]]


class Toleration(Section):
    """A taint of nodes that the pods of a group put up with."""

    key: str = Field(min_length=1)
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = Field(None, description="with operator Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"

    @model_validator(mode="after")
    def _value_goes_with_equal(self) -> "Toleration":
        if (self.operator == "Equal") != (self.value is not None):
            raise ValueError(f"value: operator '{self.operator}' wants {'a' if self.value is None else 'no'} value")
        return self


class NodeSection(Section):
    """One pod, which is one Ray node, and the machine that it wants. Requests and limits are equal."""

    cpus: float = Field(gt=0)
    memory: str = Field(pattern=_QUANTITY, description="for example 64Gi; /dev/shm counts towards it")
    gpus: int = Field(0, ge=0, description="GPUs of one pod; 0 in both groups: all on CPUs")
    shm: str = Field("8Gi", pattern=_QUANTITY, description="size of /dev/shm: Ray's object store (0.9 of it), NCCL")
    scratch: str = Field(
        "50Gi", pattern=_QUANTITY, description="disk of the pod: home folder, caches of models, what Ray spills"
    )
    instance_type: str | None = Field(None, description="the cloud's name of the machine, for example p4d.24xlarge")
    node_selector: dict[str, str] = Field({}, description="further labels of the machine")
    tolerations: tuple[Toleration, ...] = ()

    @model_validator(mode="after")
    def _shm_fits(self) -> "NodeSection":
        if quantity_bytes(self.shm) >= quantity_bytes(self.memory):
            raise ValueError(f"shm: {self.shm} leaves nothing of memory, {self.memory}; lower it")
        if quantity_bytes(self.shm) < 2**27:
            raise ValueError(f"shm: {self.shm} is too small for Ray's object store; set 128Mi or more")
        return self


class SamplingGroup(Section):
    """The GPUs that sample (CPUs, to try it out): they come with work, go when idle, and any of them may be lost."""

    node: NodeSection
    min: int = Field(0, ge=0)
    max: int = Field(ge=1)
    spot: bool = Field(True, description="cheap machines that may be taken away; samples are not lost with them")
    idle_timeout_s: int = Field(120, ge=1, description="after this time without work a node is given back")
    grace_s: int = Field(30, ge=20, description="seconds between the warning and the end of a pod")

    @model_validator(mode="after")
    def _sensible(self) -> "SamplingGroup":
        return _check_group(self)


class TrainingGroup(Section):
    """The GPUs that train: on demand, since the loss of one stops all. Fixed if min equals max."""

    node: NodeSection
    min: int = Field(0, ge=0)
    max: int = Field(ge=1)
    idle_timeout_s: int = Field(600, ge=1, description="after this time without work a node is given back")
    grace_s: int = Field(600, ge=20, description="time for a checkpoint before a pod ends")

    @model_validator(mode="after")
    def _sensible(self) -> "TrainingGroup":
        return _check_group(self)


class DataGroup(Section):
    """Nodes without GPUs for reading and permuting, so that this does not keep GPU nodes awake."""

    node: NodeSection
    min: int = Field(0, ge=0)
    max: int = Field(ge=1)
    spot: bool = Field(True, description="cheap machines that may be taken away")
    idle_timeout_s: int = Field(120, ge=1, description="after this time without work a node is given back")
    grace_s: int = Field(30, ge=20, description="seconds between the warning and the end of a pod")

    @model_validator(mode="after")
    def _sensible(self) -> "DataGroup":
        if self.node.gpus:
            raise ValueError("node.gpus: data tasks want no GPU; set 0")
        return _check_group(self)


class StorageSection(Section):
    """Where results go: a bucket, or a volume that all pods share."""

    url: str = Field(description="bucket URL (s3:// or gs://), or a folder below mount")
    claim: str | None = Field(
        None, pattern=_DNS_LABEL, description="an existing PersistentVolumeClaim, ReadWriteMany, mounted in every pod"
    )
    mount: str = Field("/mnt/storage", pattern=r"^/", description="where the claim is mounted")

    @model_validator(mode="after")
    def _shared(self) -> "StorageSection":
        mount = PurePosixPath(self.mount)
        if any(mount.is_relative_to(taken) for taken in _CLAIM_MOUNTS_TAKEN) or str(mount) == "/":
            raise ValueError(f"mount: {self.mount} is taken; choose another folder, for example /mnt/storage")
        if looks_secret(self.url):
            raise ValueError("url: holds what looks like a secret; give access by the service account or pods.secrets")
        if self.claim is None and not _REMOTE.match(self.url):
            raise ValueError(f"url: pods share no folder, got {self.url}; give a bucket's URL, or set claim")
        if "://" in self.url and (scheme := self.url.partition("://")[0]) not in STORES:
            raise ValueError(f"url: the image cannot write to {scheme}://{did_you_mean(scheme, STORES)}")
        if self.claim and "://" not in self.url and not PurePosixPath(self.url).is_relative_to(mount):
            raise ValueError(f"url: {self.url} is not below mount, {self.mount}")
        return self


class SecretReference(Section):
    """One key of a Kubernetes Secret as an environment variable. Its value is never seen here."""

    env: str = Field(description="name of the environment variable")
    secret: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", description="name of the Secret")
    key: str = Field(min_length=1, description="key in the Secret")

    @model_validator(mode="after")
    def _name_is_one(self) -> "SecretReference":
        if not _ENV_NAME.match(self.env):
            raise ValueError("env: expected the name of an environment variable, for example HF_TOKEN")
        if looks_secret(self.key) or looks_secret(self.secret):
            raise ValueError("key: looks like the secret itself; give the names of the Secret and of its key")
        return self


class PodsSection(Section):
    """What all pods of the cluster have in common."""

    project: str = Field("/opt/pos2distill", pattern=r"^/[^\s]+$", description="folder of run.py in the image")
    user: int = Field(1000, ge=1, description="user and group id that pods run as; never root")
    service_account: str | None = Field(
        None, pattern=_DNS_LABEL, description="an existing ServiceAccount; default: one is made, named like the cluster"
    )
    service_account_annotations: dict[str, str] = Field(
        {}, description="of the ServiceAccount that is made: the cloud's identity with access to the storage"
    )
    pull_secrets: tuple[str, ...] = Field((), description="names of Secrets for the image registry")
    priority_class: str | None = None
    env: dict[str, str] = Field({}, description="plain settings; secrets go to `secrets`")
    secrets: tuple[SecretReference, ...] = ()

    @field_validator("env", mode="before")
    @classmethod
    def _no_secret_in_clear_text(cls, env: Any) -> Any:
        for name, value in env.items() if isinstance(env, dict) else ():
            if holds_secret(str(name), str(value)):
                raise ValueError(
                    f"'{name}' looks like a secret in clear text; put it into a Kubernetes Secret and name it in "
                    f"pods.secrets"
                )
            if not _ENV_NAME.match(str(name)):
                raise ValueError(f"'{name}' is no name of an environment variable")
        return env

    @model_validator(mode="after")
    def _names_are_used_once(self) -> "PodsSection":
        names = [*self.env, *(secret.env for secret in self.secrets)]
        if taken := [name for name in names if name in _RESERVED_ENV]:
            raise ValueError(f"env: {taken[0]} is set by the manifests themselves; remove it")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"secrets: the environment variable {twice[0]} is set twice")
        if self.service_account and self.service_account_annotations:
            raise ValueError("service_account_annotations: are for the account that is made; drop service_account")
        return self


class EgressRule(Section):
    """Addresses outside the cluster that pods may call."""

    cidr: str = Field(description="for example 0.0.0.0/0, or 10.0.20.15/32")
    ports: tuple[int, ...] = Field((443,), min_length=1)
    protocol: Literal["TCP", "UDP"] = "TCP"

    @model_validator(mode="after")
    def _is_a_network(self) -> "EgressRule":
        try:
            ipaddress.ip_network(self.cidr)
        except ValueError:
            raise ValueError(f"cidr: expected a network, for example 10.0.0.0/16, got {self.cidr}") from None
        if bad := [port for port in self.ports if not 0 < port < 65536]:
            raise ValueError(f"ports: {bad[0]} is no port; expected 1 to 65535")
        return self


class NetworkSection(Section):
    """Who may talk to the pods, and to whom they may talk. Everything else is closed."""

    operator_namespace: str = Field(
        "kuberay-operator", pattern=_DNS_LABEL, description="where KubeRay's operator runs: it asks the head for status"
    )
    metrics_namespace: str | None = Field(
        None, pattern=_DNS_LABEL, description="where Prometheus runs, if it is to read the pods' metrics"
    )
    dns: tuple[str, ...] = Field(
        ("169.254.20.10/32",), description="DNS caches on nodes; the DNS of kube-system is always allowed"
    )
    api_server: EgressRule = Field(
        EgressRule(cidr="0.0.0.0/0", ports=(443, 6443)), description="Kubernetes API, for the autoscaler on the head"
    )
    egress: tuple[EgressRule, ...] = Field(
        (EgressRule(cidr="0.0.0.0/0", ports=(443,)),),
        description="storage, model hub, trackers and the cloud's identity service",
    )


class JobSection(Section):
    """Limits of the RayJob."""

    deadline_s: int = Field(7 * 24 * 3600, ge=1, description="a job that runs longer is ended")
    start_deadline_s: int = Field(3600, ge=1, description="a job that has not started by then is ended")
    ttl_s: int = Field(600, ge=0, description="the cluster is deleted so long after the end of the job")
    backoff_limit: int = Field(2, ge=0, description="new clusters after a failure; the study goes on where it stopped")
    queue: str | None = Field(
        None,
        pattern=_DNS_LABEL,
        description="a Kueue LocalQueue, which wants groups of a fixed size; default: no Kueue",
    )

    @model_validator(mode="after")
    def _starts_before_it_ends(self) -> "JobSection":
        if self.start_deadline_s >= self.deadline_s:
            raise ValueError(f"start_deadline_s: {self.start_deadline_s} is not before deadline_s, {self.deadline_s}")
        return self


class ClusterSpec(Section):
    """A cluster for studies: one head without work, samplers, trainers, and if wanted nodes for data tasks."""

    name: str = Field(pattern=_DNS_LABEL, max_length=NAME_LENGTH)
    namespace: str = Field("default", pattern=_DNS_LABEL, max_length=63)
    image: str = Field(min_length=1, description="with this project and its requirements/gpu.txt installed")
    ray_version: str = Field("2.60.0", description="of the image")
    platform: Literal["gke", "eks", "karpenter", "other"] = Field(
        "other", description="how spot machines are asked for; other: not at all"
    )
    storage: StorageSection
    head: NodeSection
    sampling: SamplingGroup
    training: TrainingGroup
    data: DataGroup | None = None
    pods: PodsSection = PodsSection()
    job: JobSection = JobSection()
    network: NetworkSection = NetworkSection()

    @property
    def scales(self) -> bool:
        """Whether groups grow and shrink. Kueue, which gives a job its nodes at once, refuses clusters that do."""
        return self.job.queue is None

    @field_validator("ray_version")
    @classmethod
    def _ray_is_new_enough(cls, version: str) -> str:
        if not (match := re.match(r"^(\d+)\.(\d+)\.(\d+)$", version)):
            raise ValueError(f"expected a full version, for example 2.60.0, got {version}")
        if (int(match[1]), int(match[2])) < (2, 60):
            raise ValueError(f"the project needs Ray 2.60 or newer, got {version}")
        return version

    @field_validator("image")
    @classmethod
    def _image_is_pinned(cls, image: str) -> str:
        tag = image.rpartition("/")[2].partition("@")[2] or image.rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            raise ValueError(
                f"'{image}' may change between pods; name a version: {image.removesuffix(':latest')}:0.1.0"
            )
        return image

    @model_validator(mode="after")
    def _parts_go_together(self) -> "ClusterSpec":
        if self.head.gpus:
            raise ValueError("head.gpus: the head does no work and wants no GPU; set 0")
        for name, node, other in (
            ("sampling", self.sampling.node, self.training.node),
            ("training", self.training.node, self.sampling.node),
        ):
            if other.gpus and not node.gpus:
                raise ValueError(f"{name}.node.gpus: the group has no GPU, the other one has; set both, or 0 for both")
        for name, group in (("sampling", self.sampling), ("data", self.data)):
            if group and group.spot and self.platform == "other":
                raise ValueError(f"{name}.spot: on platform 'other' it is not known how to ask for it; set false")
        for name, each in (("sampling", self.sampling), ("training", self.training), ("data", self.data)):
            if each and self.job.queue and each.min != each.max:
                raise ValueError(f"{name}.min: Kueue takes only clusters of a fixed size; set it to max, {each.max}")
        return self


def load_cluster(name_or_path: str, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Read a cluster's file and apply `section.field=value` overrides.

    Args:
        name_or_path: an example's name (gke, eks, onprem, kind), or the path of a YAML file.
        overrides: for example `["sampling.max=16"]`.
    Raises:
        UserError: naming the file, the field and the nearest right name.
    """
    path = find_yaml(name_or_path, PRESETS, "cluster spec")
    raw = read_sections(path, "name, storage, sampling, …")
    overridden = [apply_override(raw, override) for override in overrides]
    try:
        return ClusterSpec.model_validate(raw)
    except ValidationError as error:
        raise to_user_error(error, ClusterSpec, path, overridden) from None


def _check_group(group: G) -> G:
    if group.min > group.max:
        raise ValueError(f"min: {group.min} is more than max, {group.max}")
    return group
