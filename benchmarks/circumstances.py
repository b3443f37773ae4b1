"""What every report says of itself: where, when and with what it was measured."""

import os
import platform
import time
from importlib.metadata import version
from typing import Any


def circumstances(*packages: str, device: str = "cpu") -> dict[str, Any]:
    """`machine`, `date` and the `versions` of these packages.

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
        "versions": {name: version(name) for name in packages},
    }
