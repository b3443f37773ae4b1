"""Environment variables that are set for libraries, as the libraries read them."""

import os
import subprocess
import sys

import pytest

from pos2distill.environment import set_vllm_variables
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


@pytest.mark.parametrize(
    ("device", "before", "after"), [("cuda", None, "0"), ("cuda", "1", "1"), ("cpu", None, None), ("cpu", "1", "1")]
)
def test_set_vllm_variables_turns_flashinfer_off_on_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, before: str | None, after: str | None
) -> None:
    """Its kernels need nvcc, which the image lacks; a user who has it may turn it on."""
    variables = {} if before is None else {"VLLM_USE_FLASHINFER_SAMPLER": before}
    monkeypatch.setattr(os, "environ", variables)
    set_vllm_variables(device=device, threads=1, cpu_kv_cache_gib=1)
    assert variables.get("VLLM_USE_FLASHINFER_SAMPLER") == after
