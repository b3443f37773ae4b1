"""The cluster spec: `ClusterSpec`, read from a YAML file with the same overrides and error messages as a recipe.

It describes where and how a study runs, never what it computes. No part of it enters a fingerprint.
"""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from pos2distill.config import Section
from pos2distill.config.load import apply_override, find_yaml, read_sections, to_user_error
from pos2distill.errors import did_you_mean
from pos2distill.placement import DRAIN_VARIABLE
from pos2distill.secrets import holds_secret, looks_secret

from .names import AUTOSCALER_V2_VARIABLE, RAY_JOB_NAME_LENGTH

PRESETS = Path(__file__).parent / "presets"
STORES = ("gs", "s3")  # URL schemes that the image can write to; a test checks that it can open all of them
READABLE = (*STORES, "hf", "http", "https")

# Kubernetes and KubeRay derive the names of pods and services from these names.
_DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(Mi|Gi|Ti)$"
_REMOTE = re.compile(r"^[a-z][a-z0-9+.-]*://[^/]+")
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_BYTES = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SET_BY_RENDER = ("HOME", "USER", DRAIN_VARIABLE)
_SET_BY_KUBERAY = (
    *(AUTOSCALER_V2_VARIABLE, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_PORT", "RAY_IP", "FQ_RAY_IP"),
    *("RAY_CLUSTER_NAME", "RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME"),
)
_RESERVED_MOUNTS = ("/tmp", "/scratch", "/dev", "/proc", "/sys")

# Training differs from the other groups: a lost node stops all workers, and the grace period must fit a checkpoint.
TRAINING_DEFAULTS = {"spot": False, "idle_timeout_s": 600, "grace_s": 600}


def quantity_bytes(quantity: str) -> float:
    """The number of bytes of a memory quantity such as `64Gi`."""
    return float(quantity[:-2]) * _BYTES[quantity[-2:]]


class Toleration(Section):
    """A node taint that the pods of a group tolerate."""

    key: str = Field(min_length=1)
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = Field(None, description="with operator Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"

    @model_validator(mode="after")
    def _check_value(self) -> "Toleration":
        if self.operator == "Equal" and self.value is None:
            raise ValueError("value: operator 'Equal' requires a value")
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("value: operator 'Exists' takes no value; remove it")
        return self


class NodeSection(Section):
    """One Ray node, which is one pod, and the machine that it requires. Requests equal limits."""

    cpus: float = Field(gt=0)
    memory: str = Field(pattern=_QUANTITY, description="for example 64Gi; includes /dev/shm")
    gpus: int = Field(0, ge=0, description="GPUs per pod; 0 for both sampling and training: everything runs on CPUs")
    shm: str = Field("8Gi", pattern=_QUANTITY, description="size of /dev/shm: Ray's object store (0.9 of it), NCCL")
    scratch: str = Field(
        "50Gi", pattern=_QUANTITY, description="disk of the pod: home folder, model caches, objects that Ray spills"
    )
    instance_type: str | None = Field(None, description="the cloud's name of the machine, for example p4d.24xlarge")
    node_selector: dict[str, str] = Field({}, description="further node labels that the machine must carry")
    tolerations: tuple[Toleration, ...] = ()

    @model_validator(mode="after")
    def _check_shm(self) -> "NodeSection":
        # Kubernetes counts an emptyDir in memory towards the memory limit of the pod.
        if quantity_bytes(self.shm) >= quantity_bytes(self.memory):
            raise ValueError(f"shm: {self.shm} must be less than memory, {self.memory}; lower it")
        if quantity_bytes(self.shm) < 2**27:
            raise ValueError(f"shm: {self.shm} is too small for Ray's object store; set 128Mi or more")
        return self


class NodeGroup(Section):
    """Nodes of one kind, added when work needs them and removed when idle. If min equals max, their number is fixed."""

    node: NodeSection
    min: int = Field(0, ge=0, description="nodes that stay even when idle")
    max: int = Field(ge=1)
    spot: bool = Field(True, description="use spot machines, which the cloud may reclaim; always false for training")
    idle_timeout_s: int = Field(
        120, ge=1, description="seconds until an idle node is removed; default of training: 600"
    )
    grace_s: int = Field(
        30,
        ge=20,
        description="seconds between the termination notice and the end of a pod; default of training: 600, so that a "
        "checkpoint can be saved",
    )

    @model_validator(mode="after")
    def _check_size(self) -> "NodeGroup":
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max, {self.max}")
        return self


class StorageSection(Section):
    """Where results are stored: in a bucket, or on a volume that all pods mount."""

    url: str = Field(description="bucket URL (s3:// or gs://), or a folder below mount")
    claim: str | None = Field(
        None, pattern=_DNS_LABEL, description="an existing PersistentVolumeClaim, ReadWriteMany, mounted in every pod"
    )
    mount: str = Field("/mnt/storage", pattern=r"^/", description="where the claim is mounted")

    @model_validator(mode="after")
    def _check_url(self) -> "StorageSection":
        mount = PurePosixPath(self.mount)
        is_reserved = any(mount.is_relative_to(reserved) for reserved in _RESERVED_MOUNTS)
        if is_reserved or str(mount) == "/":
            raise ValueError(f"mount: {self.mount} is reserved; choose another folder, for example /mnt/storage")
        if looks_secret(self.url):
            raise ValueError("url: contains what looks like a secret; use the service account or pods.secrets instead")
        if self.claim is None and not _REMOTE.match(self.url):
            raise ValueError(f"url: expected a bucket URL, or a folder with claim set, got {self.url}")
        scheme, separator, _ = self.url.partition("://")
        if separator and scheme not in STORES:
            raise ValueError(f"url: the image cannot write to {scheme}://{did_you_mean(scheme, STORES)}")
        if not separator and not PurePosixPath(self.url).is_relative_to(mount):
            raise ValueError(f"url: {self.url} is not below mount, {self.mount}")
        return self


class SecretReference(Section):
    """One key of a Kubernetes Secret as an environment variable. The spec never contains its value."""

    env: str = Field(description="name of the environment variable")
    secret: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", description="name of the Secret")
    key: str = Field(min_length=1, description="key in the Secret")

    @model_validator(mode="after")
    def _check_names(self) -> "SecretReference":
        if not _ENV_NAME.match(self.env):
            raise ValueError("env: expected the name of an environment variable, for example HF_TOKEN")
        # A likely mistake is to enter the secret's value in place of its name.
        if looks_secret(self.key) or looks_secret(self.secret):
            raise ValueError("key: looks like the secret itself; set the names of the Secret and of its key")
        return self


class PodsSection(Section):
    """Settings of all pods of the cluster."""

    project: str = Field("/opt/pos2distill", pattern=r"^/[^\s]+$", description="folder of run.py in the image")
    user: int = Field(1000, ge=1, description="user and group id of the pods; never root")
    service_account: str | None = Field(
        None,
        pattern=_DNS_LABEL,
        description="an existing ServiceAccount; default: a new one with the name of the cluster",
    )
    service_account_annotations: dict[str, str] = Field(
        {}, description="of the new ServiceAccount: the cloud identity that has access to the storage"
    )
    pull_secrets: tuple[str, ...] = Field((), description="names of Secrets for the image registry")
    priority_class: str | None = None
    env: dict[str, str] = Field({}, description="environment variables; use `secrets` for secrets")
    secrets: tuple[SecretReference, ...] = ()

    # Before validation, because pydantic's own errors would repeat the value.
    @field_validator("env", mode="before")
    @classmethod
    def _check_env(cls, env: Any) -> Any:
        if not isinstance(env, dict):
            return env
        for name, value in env.items():
            if holds_secret(str(name), str(value)):
                raise ValueError(
                    f"'{name}' looks like a secret in clear text; put it into a Kubernetes Secret and name it in "
                    f"pods.secrets"
                )
            if not _ENV_NAME.match(str(name)):
                raise ValueError(f"'{name}' is not a valid name of an environment variable")
        return env

    @model_validator(mode="after")
    def _check_names(self) -> "PodsSection":
        names = list(self.env) + [secret.env for secret in self.secrets]
        for name in names:
            if name in _SET_BY_RENDER or name in _SET_BY_KUBERAY:
                raise ValueError(f"env: {name} is set automatically; remove it")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"secrets: the environment variable {name} is set twice")
        if self.service_account and self.service_account_annotations:
            raise ValueError("service_account_annotations: apply to a new account only; remove service_account")
        return self


class EgressRule(Section):
    """Addresses outside the cluster that pods may connect to."""

    cidr: str = Field(description="for example 0.0.0.0/0, or 10.0.20.15/32")
    ports: tuple[int, ...] = Field((443,), min_length=1)
    protocol: Literal["TCP", "UDP"] = "TCP"

    @model_validator(mode="after")
    def _check_network(self) -> "EgressRule":
        try:
            ipaddress.ip_network(self.cidr)
        except ValueError:
            raise ValueError(f"cidr: expected a network, for example 10.0.0.0/16, got {self.cidr}") from None
        for port in self.ports:
            if not 0 < port < 65536:
                raise ValueError(f"ports: {port} is not a valid port; expected 1 to 65535")
        return self


class NetworkSection(Section):
    """Which connections from and to the pods are allowed. All others are denied."""

    operator_namespace: str = Field(
        "kuberay-operator",
        pattern=_DNS_LABEL,
        description="namespace of KubeRay's operator, which requests the job's status from the head",
    )
    metrics_namespace: str | None = Field(
        None, pattern=_DNS_LABEL, description="namespace of Prometheus, if it is to scrape the pods' metrics"
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

    deadline_s: int = Field(7 * 24 * 3600, ge=1, description="a job that runs longer is stopped")
    start_deadline_s: int = Field(3600, ge=1, description="a job that has not started by then is stopped")
    ttl_s: int = Field(600, ge=0, description="seconds between the end of the job and the deletion of its cluster")
    backoff_limit: int = Field(2, ge=0, description="retries after a failure, each on a new cluster; the study resumes")
    queue: str | None = Field(
        None,
        pattern=_DNS_LABEL,
        description="a Kueue LocalQueue, which requires groups of a fixed size; default: no Kueue",
    )

    @model_validator(mode="after")
    def _check_deadlines(self) -> "JobSection":
        if self.start_deadline_s >= self.deadline_s:
            raise ValueError(f"start_deadline_s: {self.start_deadline_s} is not before deadline_s, {self.deadline_s}")
        return self


class ClusterSpec(Section):
    """A cluster for studies: a head that runs no work, and nodes for sampling, training and (optional) data tasks."""

    name: str = Field(pattern=_DNS_LABEL, max_length=RAY_JOB_NAME_LENGTH)
    namespace: str = Field("default", pattern=_DNS_LABEL, max_length=63)
    image: str = Field(min_length=1, description="with this project and its requirements/gpu.txt installed")
    ray_version: str = Field("2.60.0", description="of the image")
    platform: Literal["gke", "eks", "karpenter", "other"] = Field(
        "other", description="how spot machines are requested; other: not supported"
    )
    storage: StorageSection
    head: NodeSection
    sampling: NodeGroup = Field(description="for sampling; any node may be lost at any time")
    training: NodeGroup = Field(description="for training, on demand: the loss of one node stops all workers")
    data: NodeGroup | None = Field(
        None, description="without GPUs, for reading and permuting data, so that this keeps no GPU node busy"
    )
    pods: PodsSection = PodsSection()
    job: JobSection = JobSection()
    network: NetworkSection = NetworkSection()

    @property
    def groups(self) -> dict[str, NodeGroup]:
        """The node groups by name, in the order in which they are rendered."""
        groups = {"sampling": self.sampling, "training": self.training}
        if self.data:
            groups["data"] = self.data
        return groups

    @property
    def scales(self) -> bool:
        """Whether groups grow and shrink. Kueue admits a job as a whole and rejects clusters that do."""
        return self.job.queue is None

    @property
    def labels(self) -> dict[str, str]:
        """Kubernetes labels of every object and pod of this cluster.

        Selectors use them, because KubeRay generates the name of a job's cluster, so that name is not known here.
        """
        return {"app.kubernetes.io/part-of": "pos2distill", "app.kubernetes.io/instance": self.name}

    @field_validator("ray_version")
    @classmethod
    def _check_ray_version(cls, version: str) -> str:
        match = re.match(r"^(\d+)\.(\d+)\.(\d+)$", version)
        if not match:
            raise ValueError(f"expected a full version, for example 2.60.0, got {version}")
        if (int(match[1]), int(match[2])) < (2, 60):
            raise ValueError(f"the project requires Ray 2.60 or newer, got {version}")
        return version

    @field_validator("image")
    @classmethod
    def _check_image(cls, image: str) -> str:
        name = image.rpartition("/")[2]  # a registry's port also follows a colon
        tag = name.partition("@")[2] or name.partition(":")[2]
        if tag in ("", "latest"):
            pinned = f"{image.removesuffix(':latest')}:0.1.0"
            raise ValueError(f"'{image}' may change between pods; name a version, for example {pinned}")
        return image

    @field_validator("training", mode="before")
    @classmethod
    def _set_training_defaults(cls, training: Any) -> Any:
        if not isinstance(training, dict):
            return training
        return {**TRAINING_DEFAULTS, **training}

    @model_validator(mode="after")
    def _check_groups(self) -> "ClusterSpec":
        if self.head.gpus:
            raise ValueError("head.gpus: the head runs no work and needs no GPU; set 0")
        if self.data and self.data.node.gpus:
            raise ValueError("data.node.gpus: data tasks need no GPU; set 0")
        if self.training.spot:
            raise ValueError("training.spot: the loss of one training node stops all workers; set false")
        sampling_gpus, training_gpus = self.sampling.node.gpus, self.training.node.gpus
        if bool(sampling_gpus) != bool(training_gpus):
            name, other = ("training", "sampling") if sampling_gpus else ("sampling", "training")
            raise ValueError(f"{name}.node.gpus: expected 1 or more, since {other} has GPUs; or set 0 for both")
        for name, group in self.groups.items():
            if group.spot and self.platform == "other":
                raise ValueError(f"{name}.spot: spot machines are not supported on platform 'other'; set false")
        for name, group in self.groups.items():
            if self.job.queue and group.min != group.max:
                raise ValueError(f"{name}.min: Kueue requires groups of a fixed size; set it to max, {group.max}")
        return self


def load_cluster(name_or_path: str, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Read a cluster spec and apply `section.field=value` overrides.

    Args:
        name_or_path: the name of a preset (gke, eks, onprem, kind), or the path of a YAML file.
        overrides: for example `["sampling.max=16"]`.
    Raises:
        UserError: naming the file, the field and the closest valid name.
    """
    path = find_yaml(name_or_path, PRESETS, "cluster spec")
    raw = read_sections(path, "name, storage, sampling, …")
    overridden = [apply_override(raw, override) for override in overrides]
    try:
        return ClusterSpec.model_validate(raw)
    except ValidationError as error:
        raise to_user_error(error, ClusterSpec, path, overridden) from None
