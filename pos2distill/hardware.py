"""What this machine's processor can do."""

import platform
import re
from pathlib import Path

_BFLOAT16_FLAGS = {"x86_64": ("avx512_bf16", "amx_bf16"), "aarch64": ("bf16",)}
"""By machine, the flags of Linux 6 for instructions that multiply bfloat16 numbers."""


def cpu_multiplies_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has instructions for bfloat16 products; without them float32 is the faster one.

    Args:
        cpu_info: Linux's description of the processors. False where there is none.
    """
    if not cpu_info.exists():
        return False
    # `flags` on x86, `Features` on Arm.
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpu_info.read_text(), re.MULTILINE)
    flags = set(lines[0].split()) if lines else set()
    return not flags.isdisjoint(_BFLOAT16_FLAGS.get(platform.machine(), ()))
