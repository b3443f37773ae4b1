"""What this machine's processor can do, how many CPUs and GPUs it has, and how much memory this process has taken."""

import gc
import itertools
import math
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

_CGROUP = Path("/sys/fs/cgroup")
"""Linux's limits of this process's container."""


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs this process may use: those with a device file, as far as CUDA_VISIBLE_DEVICES names them.

    No library is asked: that would take seconds, and memory on the GPU. A container has the files of its own GPUs only.
    In WSL2, where one file stands for all GPUs of Windows, torch counts those that it can use.
    """
    found = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    if not found and (devices / "dxg").exists():
        import torch

        return torch.cuda.device_count()
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


def release_gpu_memory() -> None:
    """Return the memory that torch's allocator keeps for later tensors, so that other processes can use the GPU.

    vLLM 0.32, whose engine is a process of its own, does not start with less free memory than it is set to use.
    """
    torch = sys.modules.get("torch")
    # A process that never used a GPU must not import torch or start CUDA for this.
    if torch is None or not torch.cuda.is_initialized():
        return
    gc.collect()  # models in reference cycles hold their tensors until then
    torch.cuda.empty_cache()


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """How many CPUs this process may use: those of its affinity, but no more than its container's quota, rounded up.

    Args:
        cgroup: Linux's limits of the container. Docker's `--cpus` and a limit of Kubernetes set the quota.
    """
    cpus = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    return cpus if quota is None else min(cpus, math.ceil(quota))


def _cpu_quota(cgroup: Path) -> float | None:
    """How many CPUs a container may use on average; None: no limit."""
    both = cgroup / "cpu.max"  # cgroup version 2
    quota_file, period_file = cgroup / "cpu" / "cpu.cfs_quota_us", cgroup / "cpu" / "cpu.cfs_period_us"  # version 1
    if both.exists():
        quota, period = both.read_text().split()
    elif quota_file.exists():
        quota, period = quota_file.read_text().strip(), period_file.read_text()
    else:
        return None
    # What versions 2 and 1 have without a limit.
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)


def local_cpus() -> int:
    """The logical CPUs that Ray is started with on this machine."""
    return max(_MIN_LOCAL_CPUS, available_cpus())


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
