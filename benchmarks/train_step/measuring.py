"""Time and memory of training steps, measured so that variants can be compared."""

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
"""Makes one training step and returns its loss."""

GIB = 2**30


def wall(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, including the work that it starts on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def run_in_turn(
    steps: Mapping[str, Step], device: torch.device, repetitions: int, tolerance: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run all steps in turn, so that drift of the machine's speed affects all alike. The first round is a warm-up.

    Args:
        tolerance: relative tolerance of losses.
    Returns: the seconds of every counted step by name, and the losses of all steps by name.
    Raises:
        AssertionError: a loss differs by more than the tolerance from that of the first step of the round.
    """
    losses: dict[str, list[float]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repetitions + 1):
        expected = None
        for name, step in steps.items():
            loss, took = _timed(step, device)
            losses[name].append(loss)
            if repetition > 0:
                seconds[name].append(took)
            print(f"{name}: step {repetition}, {took:.2f} s, loss {loss:.6f}", flush=True)
            if expected is None:
                expected = loss
            if abs(loss - expected) > tolerance * abs(expected):
                raise AssertionError(f"{name}: expected a loss of {expected}, got {loss}")
    return seconds, losses


def _timed(step: Step, device: torch.device) -> tuple[float, float]:
    losses: list[float] = []
    took = wall(lambda: losses.append(step()), device)
    return losses[0], took


def free(steps: dict[str, Step]) -> None:
    """Drop steps and release their memory for other processes."""
    steps.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_peak(step: Step, device: torch.device) -> dict[str, float]:
    """Measure the memory of a step, in GiB.

    On a CPU, it is the resident memory of the process. Its maximum is reset before the step.

    Returns: `kept_gib`, allocated between steps: weights, optimizer state and, where there is one, the teacher;
    `peak_gib`, the most that the step allocates in addition.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return {"kept_gib": before / GIB, "peak_gib": (torch.cuda.max_memory_allocated() - before) / GIB}
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    before = _memory("VmRSS")
    step()
    return {"kept_gib": before / GIB, "peak_gib": (_memory("VmHWM") - before) / GIB}


def _memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def run_in_own_process(module: str, *arguments: str, returns_memory: bool = True) -> dict[str, Any]:
    """Run a module in its own process and return the last JSON object that it prints.

    Args:
        returns_memory: let glibc return blocks of 1 MiB and more to the system when they are freed, so that peaks are
            comparable. A step on a CPU then takes longer, by a quarter or more.
    """
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"} if returns_memory else None
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    objects = [line for line in completed.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(objects[-1])
    return result
