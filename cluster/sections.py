"""Sections of the cluster spec that apply to the whole cluster: storage, pods, network and job."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from pos2distill.config import Section
from pos2distill.config.base import matches
from pos2distill.errors import did_you_mean
from pos2distill.node_pools import DRAIN_VARIABLE, JOB_DASHBOARD_VARIABLE, JOB_DEADLINE_VARIABLE
from pos2distill.secrets import holds_secret

from .names import SET_BY_KUBERAY
from .nodes import INT32
from .syntax import DNS_LABEL, SHOWN, check_annotations, check_labels, check_pinned, checked_name, is_config_key

STORES = ("gs", "s3")  # URL schemes that the image can write to; a test checks that it can open all of them
READABLE = (*STORES, "hf", "http", "https")

_LABEL = "a name of a to z, 0 to 9 and -, at most 63, for example team-a"
DnsLabel = Annotated[str, matches(rf"(?=.{{1,63}}$){DNS_LABEL}", _LABEL)]
Namespace = Annotated[str, matches(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", _LABEL)]
ObjectName = Annotated[str, AfterValidator(checked_name)]
# Without `..` and without what a shell would expand.
Folder = Annotated[str, matches(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+/?", "an absolute folder, for example /mnt/storage")]
Key = Annotated[
    str, matches(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", "a folder in a bucket, for example a/b")
]
Region = Annotated[str, matches(r"[a-z0-9-]+", "the name of a region, for example eu-central-1")]

_REMOTE = re.compile(r"^[a-z][a-z0-9+.-]*://[^/]+")
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_SET_BY_RENDER = ("HOME", "USER", DRAIN_VARIABLE, JOB_DASHBOARD_VARIABLE, JOB_DEADLINE_VARIABLE)
# The image and the device plugin set them; other values break Python, CUDA or the choice of GPUs.
_SET_BY_IMAGE = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "HOSTNAME",
    "TMPDIR",
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "RAY_TMPDIR",
)
_EMPTY_FOLDERS = ("/tmp", "/scratch")  # pods mount empty folders here to write to
# A mount hides what the image has in its folder.
_RESERVED_MOUNTS = (
    *_EMPTY_FOLDERS,
    "/dev",
    "/proc",
    "/sys",
    "/etc",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/boot",
    "/root",
    "/run",
    "/var",
)


def _check_mount(mount: str) -> None:
    is_reserved = any(PurePosixPath(mount).is_relative_to(reserved) for reserved in _RESERVED_MOUNTS)
    if is_reserved:
        raise ValueError(f"mount: {mount} is reserved; choose another folder, for example /mnt/storage")


def has_parent_segment(path: str) -> bool:
    """Whether a path or URL has `..` in it, which could leave a mounted folder."""
    return ".." in path.split("/")


class StorageSection(Section):
    """Where results are stored: in a bucket, or on a volume that all pods mount."""

    url: str = Field(description="Bucket URL (s3:// or gs://), or a folder below mount.")
    claim: ObjectName | None = Field(
        None,
        description="Existing PersistentVolumeClaim (ReadWriteMany), mounted in every pod. Default: none, for a "
        "bucket.",
    )
    mount: Folder = Field("/mnt/storage", description="Folder at which the claim is mounted.")

    @model_validator(mode="after")
    def _check_url(self) -> "StorageSection":
        _check_mount(self.mount)
        if has_parent_segment(self.url):
            raise ValueError(f"url: {self.url}: expected a path without '..'")
        if re.search(r"\s", self.url):
            raise ValueError(f"url: {self.url}: expected a bucket or path without blanks")
        if self.claim is None and not _REMOTE.match(self.url):
            raise ValueError(f"url: expected a bucket URL, or a folder with claim set, got {self.url}")
        scheme, separator, _ = self.url.partition("://")
        if separator and scheme not in STORES:
            raise ValueError(f"url: the image cannot write to {scheme}://{did_you_mean(scheme, STORES)}")
        if not separator and not PurePosixPath(self.url).is_relative_to(self.mount):
            raise ValueError(f"url: {self.url} is not below mount, {self.mount}")
        return self


class SecretReference(Section):
    """One key of a Kubernetes Secret as an environment variable. The spec never contains its value."""

    env: str = Field(description="Name of the environment variable.")
    secret: ObjectName = Field(description="Name of the Secret.")
    key: str = Field(description="Key in the Secret.")

    @model_validator(mode="after")
    def _check_names(self) -> "SecretReference":
        if not _ENV_NAME.fullmatch(self.env):
            raise ValueError("env: expected the name of an environment variable, for example HF_TOKEN")
        if not is_config_key(self.key):
            raise ValueError(
                f"key: '{self.key[:SHOWN]}' is not a valid Secret key; use letters, digits, '-', '_' and '.'"
            )
        return self


class VolumeSection(Section):
    """A further volume that all pods mount: a claim (a model cache, a data set, a bucket by a CSI driver), or files."""

    claim: ObjectName | None = Field(None, description="Existing PersistentVolumeClaim that many pods can mount.")
    secret: ObjectName | None = Field(
        None, description="Secret to mount instead of a claim, with one file for each key, for example credentials."
    )
    config_map: ObjectName | None = Field(
        None, description="ConfigMap to mount instead of a claim, with one file for each key, for example certificates."
    )
    mount: Folder = Field(description="Folder at which the volume is mounted.")
    read_only: bool = Field(False, description="Mount the claim read-only. A Secret and a ConfigMap always are.")

    @model_validator(mode="after")
    def _check_source(self) -> "VolumeSection":
        _check_mount(self.mount)
        sources = {"claim": self.claim, "secret": self.secret, "config_map": self.config_map}
        given = [name for name, source in sources.items() if source is not None]
        if len(given) != 1:
            raise ValueError(f"{given[1] if given else 'claim'}: set one of claim, secret and config_map")
        if self.claim is None and "read_only" in self.model_fields_set and not self.read_only:
            raise ValueError(f"read_only: pods cannot write to a volume of a {given[0]}; remove it")
        return self

    @property
    def is_writable(self) -> bool:
        """Whether pods may write to it."""
        return self.claim is not None and not self.read_only


class PodsSection(Section):
    """Settings of all pods of the cluster."""

    project: Folder = Field("/opt/pos2distill", description="Folder of run.py in the image.")
    user: int = Field(1000, ge=1, le=INT32, description="User and group id of the pods, never root.")
    service_account: ObjectName | None = Field(
        None,
        description="Existing ServiceAccount of the pods. Default: a new one with the name of the cluster.",
    )
    service_account_annotations: dict[str, str] = Field(
        {},
        description="Annotations of the new ServiceAccount, for example the cloud identity that has access to the "
        "storage.",
    )
    pull_secrets: tuple[ObjectName, ...] = Field(
        (), description="Names of Secrets with credentials of the image registry."
    )
    priority_class: ObjectName | None = Field(None, description="PriorityClass of the pods. Default: none.")
    runtime_class: ObjectName | None = Field(
        None, description="RuntimeClass of pods with GPUs, where the machines' default runtime is not NVIDIA's."
    )
    scheduler: DnsLabel | None = Field(
        None, description="Scheduler of the pods (schedulerName), for example a gang scheduler. See also job.labels."
    )
    labels: dict[str, str] = Field(
        {}, description="Labels of all pods, for example the team to which their cost belongs."
    )
    annotations: dict[str, str] = Field(
        {}, description="Annotations of all pods, for example for networks or CSI drivers."
    )
    volumes: tuple[VolumeSection, ...] = Field((), description="Additional volumes that the Ray pods mount.")
    model_cache: Folder | None = Field(
        None,
        description="Folder on one of the volumes in which models of the hub are kept for all pods and jobs. Default: "
        "every pod downloads them.",
    )
    env: dict[str, str] = Field(
        {}, description="Environment variables of the Ray containers. Use `secrets` for secrets."
    )
    secrets: tuple[SecretReference, ...] = Field(
        (), description="Environment variables of the Ray containers whose values are in Kubernetes Secrets."
    )

    @field_validator("project")
    @classmethod
    def _check_project(cls, project: str) -> str:
        for folder in _EMPTY_FOLDERS:
            if PurePosixPath(project).is_relative_to(folder):
                raise ValueError(f"{project} is in {folder}, which is an empty folder in the pods; choose another one")
        return project

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        check_labels(labels)
        return labels

    @field_validator("annotations", "service_account_annotations")
    @classmethod
    def _check_annotations(cls, annotations: dict[str, str]) -> dict[str, str]:
        check_annotations(annotations)
        return annotations

    # Before validation, because pydantic's own errors would repeat the value.
    @field_validator("env", mode="before")
    @classmethod
    def _check_env(cls, env: Any) -> Any:
        if not isinstance(env, dict):
            return env
        for name, value in env.items():
            if not isinstance(value, str):
                raise ValueError(f"{name}: expected a text; write the value in quotes (on the command line: '\"1\"')")
            if holds_secret(str(name), str(value)):
                raise ValueError(
                    f"'{name}' looks like a secret in clear text; put it into a Kubernetes Secret and name it in "
                    f"pods.secrets"
                )
            if not _ENV_NAME.fullmatch(str(name)):
                raise ValueError(f"'{name}' is not a valid name of an environment variable")
        return env

    @model_validator(mode="after")
    def _check_names(self) -> "PodsSection":
        names = list(self.env) + [secret.env for secret in self.secrets]
        for name in names:
            if name in _SET_BY_RENDER or name in SET_BY_KUBERAY:
                raise ValueError(f"env: {name} is set automatically; remove it")
            if name in _SET_BY_IMAGE:
                raise ValueError(f"env: {name} of the image must stay as it is; remove it")
            if name in ("HF_HOME", "HF_HUB_CACHE"):
                raise ValueError(f"env: {name}: set pods.model_cache to a folder of one of pods.volumes")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"secrets: the environment variable {name} is set twice")
        if self.service_account and self.service_account_annotations:
            raise ValueError("service_account_annotations: apply to a new account only; remove service_account")
        return self

    @model_validator(mode="after")
    def _check_volumes(self) -> "PodsSection":
        mounts = [volume.mount.rstrip("/") for volume in self.volumes]
        for mount in mounts:
            if mounts.count(mount) > 1:
                raise ValueError(f"volumes: two are mounted at {mount}; choose another folder for one of them")
        if self.model_cache is not None:
            writable = [volume.mount for volume in self.volumes if volume.is_writable]
            if not any(PurePosixPath(self.model_cache).is_relative_to(mount) for mount in writable):
                raise ValueError(f"model_cache: {self.model_cache} is not below the mount of a writable volume")
        return self


class HistorySection(Section):
    """KubeRay's History Server: a container in each Ray pod copies logs and events to the bucket."""

    image: str = Field(description="Image of KubeRay's collector, with the version of the operator.")
    folder: Key = Field("ray-history", description="Folder in the bucket of storage.url.")
    region: Region | None = Field(None, description="Region of the bucket, which s3:// requires.")

    @field_validator("image")
    @classmethod
    def _check_image(cls, image: str) -> str:
        check_pinned(image)
        return image


class JobSection(Section):
    """Limits of the RayJob."""

    deadline_s: int = Field(
        7 * 24 * 3600,
        ge=1,
        le=INT32,
        description="Seconds after which the job is stopped. They count for all attempts together if `cluster submit` "
        "applied it without a queue, else for each attempt by itself, without its time in the queue.",
    )
    start_deadline_s: int = Field(
        3600,
        ge=1,
        le=INT32,
        description="Seconds after which an attempt that has not started ends, and the next one begins.",
    )
    ttl_s: int = Field(
        60,
        ge=0,
        le=INT32,
        description="Seconds from the end of the job to the deletion of its cluster, whose machines stay until then.",
    )
    backoff_limit: int = Field(
        2,
        ge=0,
        le=INT32,
        description="Retries after a failure other than a user error, each on a new cluster, where the study resumes.",
    )
    queue: DnsLabel | None = Field(
        None,
        description="Kueue LocalQueue of the job, which requires groups of a fixed size unless elastic is true. "
        "Default: no Kueue.",
    )
    elastic: bool = Field(
        False,
        description="Scale groups of a job in a queue. Requires Kueue's feature gate ElasticJobsViaWorkloadSlices.",
    )
    labels: dict[str, str] = Field(
        {},
        description="Labels of the RayJob or RayCluster, for example the queue of a gang scheduler, "
        "kai.scheduler/queue.",
    )

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        check_labels(labels)
        return labels

    @model_validator(mode="after")
    def _check_job(self) -> "JobSection":
        if self.elastic and self.queue is None:
            raise ValueError("elastic: applies to jobs in a Kueue queue; set queue too, or remove it")
        if self.start_deadline_s >= self.deadline_s:
            raise ValueError(f"start_deadline_s: {self.start_deadline_s} is not before deadline_s, {self.deadline_s}")
        return self
