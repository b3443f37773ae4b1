"""Environment variables that are set for libraries, as the libraries read them."""

import subprocess
import sys

from tests.support.paths import PROJECT

PRINT_MESSAGES = """
from pos2distill.environment import skip_expected_ray_messages

skip_expected_ray_messages()
from ray._private.worker import print_to_stdstream

for line in ("WARNING: 8 PYTHON worker processes have been started on node: 30243d", "A worker died"):
    print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
"""


def test_skip_expected_ray_messages_hides_the_number_of_processes_alone() -> None:
    """The function that prints what Ray 2.60's core reports to a driver."""
    printed = subprocess.run(
        [sys.executable, "-c", PRINT_MESSAGES], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert "A worker died" in printed.stdout
    assert "processes" not in printed.stdout
