"""How long does a command take to end when it is told to? SmolLM2-135M-Instruct, R1 on generated questions, on CPUs.

Starts `run.py distill facts_smollm2`, sends it SIGTERM at a random moment of a training step, as the kubelet of a spot
node does, and measures the seconds until the process has ended. Then the same command continues, until it has been
interrupted `--times` times. Every step that it had shown must have been stored: a command that continues may not show
an earlier one. Progress is printed every ten seconds, so that the time of a step is known to these.

  python -m examples.smollm2.make_model
  python -m examples.smollm2.facts runs/facts.jsonl.gz
  python run.py sample facts_smollm2 runtime.storage=runs/interrupt
  python -m benchmarks.real.interrupt runs/interrupt
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.circumstances import circumstances

STEP = re.compile(r"\bstep (\d+)\b")


def interrupt(storage: str, settings: list[str], steps: int, delay_s: float) -> dict[str, Any]:
    """Start the command, let it make some steps, wait a while longer, and tell it to end."""
    command = [sys.executable, "run.py", "distill", "facts_smollm2", f"runtime.storage={storage}", *settings]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        first, last, seconds_per_step = _wait_for_steps(process, steps)
        time.sleep(delay_s)
        signalled = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=1200)
        seconds = time.monotonic() - signalled
    finally:
        process.kill()
    return {
        "first_step_shown": first,
        "last_step_shown": max([last, *_steps(said)]),
        "seconds_per_step": seconds_per_step,
        "delay_s": delay_s,
        "seconds_to_end": seconds,
        "exit_code": process.returncode,
        "last_line": said.splitlines()[-1],
    }


def _wait_for_steps(process: "subprocess.Popen[str]", steps: int) -> tuple[int, int, float]:
    """Until so many steps were made: the first and the last one that were shown, and the seconds of one."""
    assert process.stderr is not None
    shown: dict[int, float] = {}
    for line in process.stderr:
        print(line, end="", flush=True)
        for step in _steps(line):
            shown.setdefault(step, time.monotonic())
        if shown and max(shown) - min(shown) >= steps:
            first, last = min(shown), max(shown)
            return first, last, (shown[last] - shown[first]) / (last - first)
    raise SystemExit(f"the command ended with {process.wait()} before it made {steps} steps")


def _steps(text: str) -> list[int]:
    return [int(step) for step in STEP.findall(text)]


def main() -> None:
    """Interrupt several times, check that nothing was lost, and write interrupt_cpu.json to this folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storage", help="a storage that has the samples")
    parser.add_argument("settings", nargs="*", metavar="section.field=value", help="settings of the recipe to change")
    parser.add_argument("--times", type=int, default=4, help="interruptions (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps before each (default: %(default)s)")
    parser.add_argument("--longest-delay", type=float, default=25.0, help="seconds of a step (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="where the report is written")
    options = parser.parse_args()
    moments = random.Random(0)
    runs: list[dict[str, Any]] = []
    for _ in range(options.times):
        delay_s = moments.uniform(0, options.longest_delay)
        runs.append(interrupt(options.storage, options.settings, options.steps, delay_s))
        print(runs[-1], flush=True)
        if len(runs) > 1 and runs[-1]["first_step_shown"] < runs[-2]["last_step_shown"]:
            raise AssertionError("a step that had been shown was made again")
    seconds = [run["seconds_to_end"] for run in runs]
    report = circumstances("torch", "transformers", "ray") | {
        "settings": options.settings,
        "median_seconds": float(np.median(seconds)),
        "largest_seconds": max(seconds),
        "runs": runs,
    }
    (options.output / "interrupt_cpu.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
