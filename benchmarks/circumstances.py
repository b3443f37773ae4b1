"""What every report says of itself: where, when, of what and with what it was measured."""

import os
import platform
import subprocess
import time
from importlib.metadata import version
from typing import Any


def circumstances(*packages: str, device: str = "cpu") -> dict[str, Any]:
    """`machine`, `date`, `commit` and the `versions` of these packages.

    Args:
        device: that was measured on, cpu or cuda.
    """
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, no GPU"
    if device == "cuda":
        import torch

        machine = torch.cuda.get_device_name()
    return {
        "machine": machine,
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "versions": {name: version(name) for name in packages},
    }
