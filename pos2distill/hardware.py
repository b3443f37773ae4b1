"""What this machine's processor can do, how many CPUs and GPUs it has, and how much memory this process has taken."""

import itertools
import os
import platform
import re
import resource
import sys
from importlib.metadata import version
from pathlib import Path

# Several small processes that mostly wait share a laptop's cores; with fewer logical CPUs the pipeline starves.
_MIN_LOCAL_CPUS = 6

_BFLOAT16_FLAGS = {"x86_64": "amx_bf16", "aarch64": "bf16"}
"""For each architecture, the flag of Linux 6 for instructions that multiply matrices in bfloat16."""

_VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""The flags of Linux for the instructions that decide how fast matrices are multiplied."""

_CPU_INFO = Path("/proc/cpuinfo")
"""Linux's description of the processors."""

_OWN_STATUS = Path("/proc/self/status")
"""Linux's description of this process."""


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


def torch_has_gpu() -> bool:
    """Whether torch can use a GPU of this machine: its build, and the driver, are for one."""
    if not visible_gpus():
        return False
    import torch  # only here, since it takes seconds

    return torch.cuda.device_count() > 0


def torch_is_for_cpus() -> bool:
    """Whether torch is the build for CPUs of PyTorch's index; its builds for GPUs have another ending or none."""
    return version("torch").endswith("+cpu")


def peak_memory_gib(device: str) -> float:
    """The most memory that this process has had so far, in GiB: for `cuda` that of its GPU which torch has taken."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_reserved(device) / 2**30
    status = _OWN_STATUS.read_text(encoding="utf-8") if _OWN_STATUS.exists() else ""
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    if found is not None:
        return int(found[1]) / 2**20
    # On Linux, here a process begins with the peak of the one that started it.
    bytes_of_unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_of_unit / 2**30


def local_cpus() -> int:
    """The logical CPUs that Ray is started with on this machine."""
    return max(_MIN_LOCAL_CPUS, os.cpu_count() or 1)


def describe_hardware(cpu_info: Path = _CPU_INFO) -> str:
    """Processor with its vector instructions, cores, memory and GPUs of this machine.

    Args:
        cpu_info: Linux's description of the processors; without it the processor is the kind of machine, such as arm64.
    """
    text = cpu_info.read_text(encoding="utf-8") if cpu_info.exists() else ""
    models = re.findall(r"^model name\s*: (.+)$", text, re.MULTILINE)
    processor = models[0] if models else platform.machine()
    flags = _cpu_flags(text)
    vectors = [flag for flag in _VECTOR_FLAGS if flag in flags]
    if vectors:
        processor += f" ({' '.join(vectors)})"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [f"{processor}, {len(os.sched_getaffinity(0))} cores", f"{memory:.0f} GiB"]
    # From NVIDIA's driver: a library would take memory on the GPU.
    for description in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        parts += re.findall(r"^Model:\s*(.+)$", description.read_text(), re.MULTILINE)
    return ", ".join(parts)


def cpu_is_faster_in_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether the processor multiplies matrices faster in bfloat16 than in float32.

    Args:
        cpu_info: Linux's description of the processors. False where there is none.
    """
    if not cpu_info.exists():
        return False
    text = cpu_info.read_text(encoding="utf-8")
    flags = _cpu_flags(text)
    # With avx512_bf16 and no AMX, torch 2.13's products were 2.1 to 2.3 times as fast in bfloat16 as in float32 on an
    # AMD Zen 4, and half as fast on an Intel Xeon (benchmarks/real/README.md).
    if "avx512_bf16" in flags and "AuthenticAMD" in text:
        return True
    return _BFLOAT16_FLAGS.get(platform.machine()) in flags


def _cpu_flags(cpu_info: str) -> set[str]:
    """The flags of the first processor that Linux's description of them lists."""
    # `flags` on x86, `Features` on Arm.
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpu_info, re.MULTILINE)
    return set(lines[0].split()) if lines else set()
