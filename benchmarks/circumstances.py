"""What every report records: the machine, the date, the commit and the versions with which it was measured."""

import subprocess
import time
from importlib.metadata import version
from typing import Any

from pos2distill.hardware import describe_hardware


def circumstances(*packages: str, device: str = "cpu") -> dict[str, Any]:
    """`machine`, `date`, `commit`, and the `versions` of these packages.

    Args:
        device: the device that was measured, cpu or cuda.
    """
    if device == "cuda":
        import torch

        machine = torch.cuda.get_device_name()
    else:
        machine = describe_hardware()
    # Without tags, so that it is always the commit.
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "machine": machine,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "versions": {name: version(name) for name in packages},
    }
