"""Machines of the clouds with GPUs: how many each has, and their memory.

Source: https://cloud.google.com/compute/docs/gpus, https://aws.amazon.com/ec2/instance-types
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Family:
    """Machines with one kind of GPU. gpu_memory_gb: of one GPU. gpus: their number, by the end of a machine's name."""

    gpu_memory_gb: int
    gpus: Mapping[str, int]


_A_SIZES = {"1g": 1, "2g": 2, "4g": 4, "8g": 8}
_A_LARGEST = {"8g": 8}
_G2_SIZES = {"4": 1, "8": 1, "12": 1, "16": 1, "32": 1, "24": 2, "48": 4, "96": 8}
_G_SIZES = {
    "xlarge": 1,
    "2xlarge": 1,
    "4xlarge": 1,
    "8xlarge": 1,
    "16xlarge": 1,
    "12xlarge": 4,
    "24xlarge": 4,
    "48xlarge": 8,
}
_P4_SIZES = {"24xlarge": 8}
_P5_SIZES = {"48xlarge": 8}

# By the beginning of a machine's name.
_FAMILIES = {
    "a2-highgpu-": _Family(40, _A_SIZES),
    "a2-ultragpu-": _Family(80, _A_SIZES),
    "a3-highgpu-": _Family(80, _A_SIZES),
    "a3-megagpu-": _Family(80, _A_LARGEST),
    "a3-ultragpu-": _Family(141, _A_LARGEST),
    "g2-standard-": _Family(24, _G2_SIZES),
    "g5.": _Family(24, _G_SIZES),
    "g6.": _Family(24, _G_SIZES),
    "g6e.": _Family(48, _G_SIZES),
    "p4d.": _Family(40, _P4_SIZES),
    "p4de.": _Family(80, _P4_SIZES),
    "p5.": _Family(80, _P5_SIZES),
    "p5e.": _Family(141, _P5_SIZES),
    "p5en.": _Family(141, _P5_SIZES),
}


def gpu_count(instance_type: str) -> int | None:
    """The GPUs of a machine, for example 8 of a2-highgpu-8g; None for one that is not known here."""
    for prefix, family in _FAMILIES.items():
        if instance_type.startswith(prefix):
            return family.gpus.get(instance_type.removeprefix(prefix))
    return None


def gpu_memory_gb(instance_type: str) -> int | None:
    """The memory of one GPU of a machine in GB, for any size of a known family; None for another family."""
    for prefix, family in _FAMILIES.items():
        if instance_type.startswith(prefix):
            return family.gpu_memory_gb
    return None
