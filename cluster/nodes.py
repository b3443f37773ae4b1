"""Sections of the cluster spec that describe nodes: what one needs, and how many of them there are."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pos2distill.config import Section
from pos2distill.config.base import matches

from .names import GPU
from .syntax import KEY_MESSAGE, LABEL_MESSAGE, SHOWN, check_labels, is_label_value, is_qualified_name

# As many digits as the amounts of real machines have, so that sums of them are finite.
_QUANTITY = r"[0-9]{1,7}(\.[0-9]{1,3})?(Mi|Gi|Ti)"
Quantity = Annotated[str, matches(_QUANTITY, "an amount in Mi, Gi or Ti, for example 64Gi")]
INT32 = 2**31 - 1  # the largest value of most numbers in Kubernetes
_DEVICES = re.compile(r"[1-9][0-9]{0,5}")
_HUGE_PAGES = re.compile(r"hugepages-[1-9][0-9]{0,5}(Ki|Mi|Gi)")
# Resources that a field of their own requests.
_OF_FIELDS = {"cpu": "cpus", "memory": "memory", "ephemeral-storage": "scratch", GPU: "gpus"}
_BYTES = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

# Training differs from the other groups: a lost node stops all workers, and the grace period must fit a checkpoint.
TRAINING_DEFAULTS = {"spot": False, "idle_timeout_s": 600, "grace_s": 600}


def quantity_bytes(quantity: str) -> float:
    """The number of bytes of a memory quantity such as `64Gi`."""
    return float(quantity[:-2]) * _BYTES[quantity[-2:]]


class Toleration(Section):
    """A node taint that the pods of a group tolerate."""

    key: str = Field(description="Key of the taint.")
    operator: Literal["Exists", "Equal"] = Field(
        "Exists",
        description="How the taint's value is compared. `Exists`: every value is tolerated; `Equal`: only `value` is.",
    )
    value: str | None = Field(None, description="Value of the taint, for operator `Equal` only.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "NoSchedule", description="Effect of the taint."
    )

    @model_validator(mode="after")
    def _check_value(self) -> "Toleration":
        if self.operator == "Equal" and self.value is None:
            raise ValueError("value: operator 'Equal' requires a value")
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("value: operator 'Exists' takes no value; remove it")
        if not is_qualified_name(self.key):
            raise ValueError(f"key: '{self.key[:SHOWN]}' {KEY_MESSAGE}")
        if self.value is not None and not is_label_value(self.value):
            raise ValueError(f"value: '{self.value[:SHOWN]}' {LABEL_MESSAGE}")
        return self


class NodeSection(Section):
    """One Ray node, which is one pod, and the machine that it requires. Requests equal limits."""

    cpus: float = Field(ge=0.001, le=10_000, description="CPUs of the pod.")
    memory: Quantity = Field(description="Memory of the pod, for example 64Gi. It includes /dev/shm.")
    gpus: int = Field(
        0, ge=0, le=1000, description="GPUs of the pod. With 0 for both sampling and training, everything runs on CPUs."
    )
    shm: Quantity = Field(
        "8Gi", description="Size of /dev/shm, of which Ray's object store uses 0.9 and NCCL the rest."
    )
    scratch: Quantity = Field(
        "50Gi",
        description="Disk for caches, logs and objects that Ray spills. What models and checkpoints need is added to "
        "it.",
    )
    disk: Quantity | None = Field(
        None,
        description="Disk that pods can request on the machine (`kubectl describe node`: Allocatable, "
        "ephemeral-storage); a pod that needs more is rejected. Default: not checked, and `render` warns "
        "of it.",
    )
    instance_type: str | None = Field(
        None, description="The cloud's name of the machine type, for example p4d.24xlarge. Default: any machine."
    )
    resources: dict[str, str] = Field(
        {}, description="Additional resources of device plugins, for example {vpc.amazonaws.com/efa: '4'} for RDMA."
    )
    node_selector: dict[str, str] = Field({}, description="Additional node labels that the machine must have.")
    tolerations: tuple[Toleration, ...] = Field(
        (), description="Node taints that the pod tolerates, in addition to those that `render` sets."
    )

    @field_validator("instance_type")
    @classmethod
    def _check_instance_type(cls, name: str | None) -> str | None:
        if name is not None and not (name and is_label_value(name)):
            raise ValueError(f"'{name[:SHOWN]}' {LABEL_MESSAGE}")
        return name

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, resources: dict[str, str]) -> dict[str, str]:
        for name, amount in resources.items():
            if name in _OF_FIELDS:
                raise ValueError(f"{name}: set {_OF_FIELDS[name]} instead")
            if _HUGE_PAGES.fullmatch(name):
                if not re.fullmatch(_QUANTITY, amount):
                    raise ValueError(f"{name}: expected an amount of memory, for example 512Mi, got {amount[:SHOWN]!r}")
                continue
            if "/" not in name or not is_qualified_name(name):
                raise ValueError(f"'{name[:SHOWN]}' is not a device resource; expected for example rdma/hca")
            if not _DEVICES.fullmatch(amount):
                raise ValueError(f"{name}: expected a number of devices, for example '4', got {amount[:SHOWN]!r}")
        return resources

    @field_validator("node_selector")
    @classmethod
    def _check_node_selector(cls, labels: dict[str, str]) -> dict[str, str]:
        check_labels(labels)
        return labels

    @field_validator("scratch")
    @classmethod
    def _check_scratch(cls, scratch: str) -> str:
        if quantity_bytes(scratch) < 2**30:
            raise ValueError(f"{scratch} is too small for Ray's logs and the caches of libraries; set 1Gi or more")
        return scratch

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

    node: NodeSection = Field(description="One node of the group.")
    min: int = Field(
        0,
        ge=0,
        description="Minimum number of nodes, which stay even when idle. For a job that does not train, 0 nodes for "
        "training (in a queue only with job.elastic).",
    )
    max: int = Field(ge=1, le=100_000, description="Maximum number of nodes.")
    spot: bool = Field(True, description="Use spot machines, which the cloud may reclaim. Always false for training.")
    idle_timeout_s: int = Field(
        120, ge=1, le=INT32, description="Seconds until an idle node is removed. Default for training: 600."
    )
    grace_s: int = Field(
        30,
        ge=20,
        le=INT32,
        description="Seconds between the termination notice and the end of a pod. Default for training: 600, so that a "
        "checkpoint can be saved.",
    )

    @model_validator(mode="after")
    def _check_size(self) -> "NodeGroup":
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max, {self.max}")
        return self
