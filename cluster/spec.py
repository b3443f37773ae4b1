"""The cluster spec: `ClusterSpec`, read from a YAML file with the same overrides and error messages as a recipe.

It describes where and how a study runs, never what it computes. No part of it enters a fingerprint.
"""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from pos2distill.config import Section
from pos2distill.config.overrides import apply_override
from pos2distill.config.read import find_yaml, read_sections, reject_secrets
from pos2distill.config.validation import to_user_error
from pos2distill.errors import UserError

from .egress import check_addresses, egress_problem
from .names import INSTANCE_LABEL, PART_OF_LABEL, PROJECT, QUEUE_LABEL, RAY_JOB_NAME_LENGTH, SET_ON_PODS
from .network import NetworkSection
from .nodes import TRAINING_DEFAULTS, NodeGroup, NodeSection
from .sections import DnsLabel, HistorySection, JobSection, Namespace, PodsSection, StorageSection
from .syntax import DNS_LABEL, SHOWN, check_pinned, is_label_value

RAY = (2, 60)  # version of Ray in the image; a test compares it with the lock file
# Seconds between the notice and the end of a spot machine, by platform:
# https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms,
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
_SPOT_NOTICE_SECONDS = {"gke": 30, "eks": 120, "karpenter": 120}
# Names of machines: a2-highgpu-8g at Google, p4d.24xlarge at AWS.
_AWS_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")
_INSTANCE_TYPE = {"gke": re.compile(r"[a-z0-9]+(-[a-z0-9]+)+"), "eks": _AWS_TYPE, "karpenter": _AWS_TYPE}

PRESETS = Path(__file__).parent / "presets"


class ClusterSpec(Section):
    """A cluster for studies: a head that runs no work, and nodes for sampling, training and (optional) data tasks."""

    name: DnsLabel = Field(
        max_length=RAY_JOB_NAME_LENGTH,
        description="Name of the RayJob or RayCluster, with which the names of its other objects begin.",
    )
    namespace: Namespace = Field("default", description="Kubernetes namespace of all objects.")
    image: str = Field(description="Container image in which this project and its requirements/gpu.txt are installed.")
    ray_version: str = Field("2.60.0", description="Version of Ray in the image.")
    platform: Literal["gke", "eks", "karpenter", "other"] = Field(
        "other", description="Platform, which decides how spot machines are requested. `other`: without spot machines."
    )
    model_billions: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="Billions of parameters of the model, from which disks are computed. Default: read from the "
        "model's folder, or known for the models of the recipes.",
    )
    storage: StorageSection = Field(description="Where results are stored.")
    head: NodeSection = Field(description="Node of the head, on which no work runs.")
    sampling: NodeGroup = Field(description="Nodes for sampling, any of which may be lost at any time.")
    sampling_fallbacks: dict[str, NodeGroup] = Field(
        {},
        description="Further groups for sampling by name, in this order. Each is used when those before it cannot "
        "provide nodes. Their cpus and gpus are those of sampling.",
    )
    training: NodeGroup = Field(description="Nodes for training, on demand, since the loss of one stops all workers.")
    data: NodeGroup | None = Field(
        None,
        description="Nodes without GPUs for reading and permuting data, so that this keeps no GPU node busy. Default: "
        "none.",
    )
    pods: PodsSection = Field(PodsSection(), description="Settings of all pods.")
    job: JobSection = Field(JobSection(), description="Limits of the job.")
    network: NetworkSection = Field(NetworkSection(), description="Allowed connections.")
    history: HistorySection | None = Field(
        None,
        description="Collector that copies Ray's logs and events to the bucket for KubeRay's History Server; requires "
        "a feature gate of KubeRay. Default: none.",
    )

    @property
    def groups(self) -> dict[str, NodeGroup]:
        """The node groups by name, in the order in which they are rendered."""
        groups = {**self.sampling_groups, "training": self.training}
        if self.data:
            groups["data"] = self.data
        return groups

    @property
    def sampling_groups(self) -> dict[str, NodeGroup]:
        """The groups on which samplers and teachers run, the preferred one first."""
        return {"sampling": self.sampling, **self.sampling_fallbacks}

    @property
    def mounts(self) -> tuple[str, ...]:
        """Folders at which the pods mount volumes."""
        storage = (self.storage.mount,) if self.storage.claim else ()
        return (*storage, *(volume.mount for volume in self.pods.volumes))

    @property
    def claim_mounts(self) -> tuple[str, ...]:
        """Those of `mounts` that hold data, and not single files of a Secret or a ConfigMap."""
        files = {volume.mount for volume in self.pods.volumes if volume.claim is None}
        return tuple(mount for mount in self.mounts if mount not in files)

    @property
    def writable_mounts(self) -> tuple[str, ...]:
        """Those of `mounts` that the pods may write to."""
        read_only = {volume.mount for volume in self.pods.volumes if not volume.is_writable}
        return tuple(mount for mount in self.mounts if mount not in read_only)

    @property
    def scales(self) -> bool:
        """Whether groups grow and shrink. Kueue admits a job as a whole and rejects clusters that do.

        Its elastic jobs, which are behind a feature gate, are the exception.
        """
        return self.job.queue is None or self.job.elastic

    @property
    def labels(self) -> dict[str, str]:
        """Kubernetes labels of every object and pod of this cluster.

        Selectors use them, because KubeRay generates the name of a job's cluster, so that name is not known here.
        """
        return {PART_OF_LABEL: PROJECT, INSTANCE_LABEL: self.name}

    @field_validator("ray_version")
    @classmethod
    def _check_ray_version(cls, version: str) -> str:
        match = re.fullmatch(r"([0-9]+)\.([0-9]+)\.([0-9]+)", version)
        if not match:
            raise ValueError(f"expected a full version, for example 2.60.0, got {version}")
        if (int(match[1]), int(match[2])) != RAY:
            raise ValueError(f"the image has Ray {RAY[0]}.{RAY[1]}, as requirements/gpu.txt, got {version}")
        return version

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        # Objects have this name or begin with it: the ServiceAccount would be the one of all pods of the namespace, and
        # the NetworkPolicy that of the head of another spec.
        if name == "default" or name.endswith("-head"):
            raise ValueError(f"{name} may be the name of objects of another owner; choose another one")
        return name

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, namespace: str) -> str:
        if namespace.startswith("kube-"):
            raise ValueError(f"{namespace} belongs to Kubernetes; choose another one")
        return namespace

    @field_validator("image")
    @classmethod
    def _check_image(cls, image: str) -> str:
        check_pinned(image)
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
        for name in self.sampling_fallbacks:
            is_reserved = name in ("sampling", "training", "data", "headgroup")
            # It becomes the value of a label.
            if not re.fullmatch(DNS_LABEL, name) or is_reserved or not is_label_value(name):
                raise ValueError(
                    f"sampling_fallbacks: '{name[:SHOWN]}' is not a valid group name; choose another DNS label of at "
                    f"most 63 characters"
                )
        training_gpus = self.training.node.gpus
        for sampling, group in self.sampling_groups.items():
            if bool(group.node.gpus) != bool(training_gpus):
                name, other = ("training", sampling) if group.node.gpus else (sampling, "training")
                raise ValueError(f"{name}.node.gpus: expected 1 or more, since {other} has GPUs; or set 0 for both")
        return self

    @model_validator(mode="after")
    def _check_fallbacks(self) -> "ClusterSpec":
        """Ray 2.60's autoscaler compares the priority of groups only where its nodes are of the same size to Ray."""
        for name, group in self.sampling_fallbacks.items():
            for field in ("gpus", "cpus"):
                given, expected = getattr(group.node, field), getattr(self.sampling.node, field)
                if self.scales and given != expected:
                    raise ValueError(
                        f"sampling_fallbacks.{name}.node.{field}: {given:g}, but sampling has {expected:g}; set the "
                        f"same for both, since Ray's autoscaler looks at the order of groups only where this is equal"
                    )
        return self

    @model_validator(mode="after")
    def _check_spot_and_size(self) -> "ClusterSpec":
        notice_s = _SPOT_NOTICE_SECONDS.get(self.platform)
        for name, group in self.groups.items():
            if group.spot and notice_s is None:
                raise ValueError(f"{name}.spot: spot machines are not supported on platform 'other'; set false")
            if group.spot and notice_s is not None and group.grace_s > notice_s:
                raise ValueError(
                    f"{name}.grace_s: {group.grace_s}, but a spot machine ends {notice_s} s after its notice; lower it"
                )
            if not self.scales and group.min != group.max:
                raise ValueError(f"{name}.min: Kueue requires groups of a fixed size; set it to max, {group.max}")
        return self

    @model_validator(mode="after")
    def _check_machines(self) -> "ClusterSpec":
        form = _INSTANCE_TYPE.get(self.platform)
        if form is None:
            return self
        for name, node in {"head": self.head, **{name: group.node for name, group in self.groups.items()}}.items():
            if node.instance_type is not None and not form.fullmatch(node.instance_type):
                field = "head" if name == "head" else f"{name}.node"
                raise ValueError(
                    f"{field}.instance_type: {node.instance_type} is not a machine type of platform {self.platform}"
                )
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> "ClusterSpec":
        given = {
            "job.labels": self.job.labels,
            "pods.labels": self.pods.labels,
            "network.pod_monitor": self.network.pod_monitor or {},
        }
        for field, labels in given.items():
            for key in (*self.labels, QUEUE_LABEL):
                if key in labels:
                    queue = " (the queue is job.queue)" if key == QUEUE_LABEL else ""
                    raise ValueError(f"{field}: {key} is set by `render`; remove it{queue}")
        for key in self.pods.labels:
            if key in SET_ON_PODS or key.startswith(("ray.io/", "kueue.x-k8s.io/")):
                raise ValueError(f"pods.labels: {key} is set by {'Kueue' if 'kueue' in key else 'KubeRay'}; remove it")
        return self

    @model_validator(mode="after")
    def _check_mounts(self) -> "ClusterSpec":
        project = PurePosixPath(self.pods.project)
        for mount in self.mounts:
            if project.is_relative_to(mount) or PurePosixPath(mount).is_relative_to(project):
                raise ValueError(f"pods.project: the volume at {mount} hides {project}; mount it elsewhere")
        if self.storage.claim and self.storage.mount.rstrip("/") in [
            volume.mount.rstrip("/") for volume in self.pods.volumes
        ]:
            raise ValueError(f"pods.volumes: {self.storage.mount} is the mount of the storage; choose another folder")
        return self

    @model_validator(mode="after")
    def _check_history(self) -> "ClusterSpec":
        if self.history is None:
            return self
        if "://" not in self.storage.url:
            raise ValueError("history: KubeRay's collector writes to a bucket; set storage.url to one, or remove it")
        if self.storage.url.startswith("s3://") and self.history.region is None:
            raise ValueError("history.region: missing; set the region of the bucket, for example eu-central-1")
        return self

    @model_validator(mode="after")
    def _check_egress(self) -> "ClusterSpec":
        check_addresses(self.network, self.pods)
        problem = egress_problem(self.network, self.pods, self.storage.url) if "://" in self.storage.url else None
        if problem:
            raise ValueError(f"network.egress: {self.storage.url}: {problem}")
        return self


def load_cluster(name_or_path: str, overrides: Sequence[str] = (), *, prefix: str = "") -> ClusterSpec:
    """Read a cluster spec and apply `section.field=value` overrides.

    Args:
        name_or_path: the name of a preset (gke, eks, onprem, kind), or the path of a YAML file.
        overrides: for example `["sampling.max=16"]`.
        prefix: the prefix of the overrides as they were typed, for errors.
    Raises:
        UserError: naming the file, the field and the closest valid name.
    """
    path = find_yaml(name_or_path, PRESETS, "cluster spec")
    raw = read_sections(path, "name, storage, sampling, …")
    overridden = [apply_override(raw, override, prefix=prefix) for override in overrides]
    if {"model", "data", "method"} <= raw.keys():
        raise UserError(f"{path}: is a recipe; expected a cluster spec, with the sections name, storage, sampling, …")
    remedy = "set the names of a Kubernetes Secret and its key in pods.secrets"
    reject_secrets(raw, path, overridden, remedy, prefix=prefix)
    try:
        return ClusterSpec.model_validate(raw)
    except ValidationError as error:
        raise to_user_error(error, ClusterSpec, path, overridden, prefix=prefix) from None
