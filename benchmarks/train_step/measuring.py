"""Time and memory of training steps, in a way that can be compared."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], float]
"""Makes a step and returns its loss."""

GIB = 2**30


def wall(step: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def make_in_turn(
    steps: Mapping[str, Step], device: torch.device, repetitions: int, tolerance: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and losses of all steps, made in turn after one of each that does not count.

    Raises:
        AssertionError: if a loss differs from the first step's by more than a share of it.
    """
    losses: dict[str, list[float]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    reference = losses[next(iter(steps))]
    for repetition in range(repetitions + 1):
        for name, step in steps.items():
            took = wall(lambda step=step, name=name: losses[name].append(step()), device)
            if repetition:
                seconds[name].append(took)
            own, expected = losses[name][-1], reference[repetition]
            print(f"{name}: step {repetition}, {took:.2f} s, loss {own:.6f}", flush=True)
            if abs(own - expected) > tolerance * abs(expected):
                raise AssertionError(f"{name}: another loss, {own} in place of {expected}")
    return seconds, losses


def free(steps: dict[str, Step]) -> None:
    """Let go of steps and of their memory: other processes will want it."""
    steps.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_peak(step: Step, device: torch.device) -> dict[str, float]:
    """GiB that a step takes at its peak beyond what stays between steps: weights, optimizer state and, where there is
    one, the teacher. On a CPU the high-water mark of the process's resident memory, set back before the step."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return {"kept_gib": before / GIB, "peak_gib": (torch.cuda.max_memory_allocated() - before) / GIB}
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    return {"kept_gib": before / GIB, "peak_gib": (_status("VmHWM") - before) / GIB}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def run_apart(module: str, *arguments: str) -> dict[str, float]:
    """What a module prints last, as JSON, from a process of its own; large blocks go back to the system when freed."""
    command, environment = [sys.executable, "-m", module, *arguments], {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    printed = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ).stdout
    found: dict[str, float] = json.loads(next(line for line in printed.splitlines()[::-1] if line.startswith("{")))
    return found
