"""What this machine's processor can do, and how many CPUs and GPUs it has."""

import itertools
import os
import platform
import re
from pathlib import Path

# Several small processes that mostly wait share a laptop's cores; with fewer logical CPUs the pipeline starves.
_MIN_LOCAL_CPUS = 6

_BFLOAT16_FLAGS = {"x86_64": "amx_bf16", "aarch64": "bf16"}
"""By machine, the flag of Linux 6 for instructions that multiply matrices in bfloat16."""


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs this process may use: those with a device file, as far as CUDA_VISIBLE_DEVICES names them.

    No library is asked: that would take seconds, and memory on the GPU. A container has the files of its own GPUs only.
    """
    found = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    # CUDA ignores what follows an invalid entry.
    named = list(itertools.takewhile(lambda entry: entry.strip() not in ("", "-1"), chosen.split(",")))
    return min(found, len(named))


def local_cpus() -> int:
    """The logical CPUs that Ray is started with on this machine."""
    return max(_MIN_LOCAL_CPUS, os.cpu_count() or 1)


def cpu_is_faster_in_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies matrices faster in bfloat16 than in float32.

    Args:
        cpu_info: Linux's description of the processors. False where there is none.
    """
    if not cpu_info.exists():
        return False
    text = cpu_info.read_text()
    # `flags` on x86, `Features` on Arm.
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(lines[0].split()) if lines else set()
    # With avx512_bf16 and no AMX, torch 2.13's products were 2.5 times as fast in bfloat16 as in float32 on an AMD Zen
    # 4, and 0.67 times as fast on a machine whose maker was not recorded (benchmarks/real/README.md).
    if "avx512_bf16" in flags and "AuthenticAMD" in text:
        return True
    return _BFLOAT16_FLAGS.get(platform.machine()) in flags
