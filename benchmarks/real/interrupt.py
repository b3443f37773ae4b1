"""How long does a command that trains take to end after SIGTERM or Ctrl-C?

Starts a study in its own process, waits until it has made some steps, sends the signal in the middle of the next step,
and measures until the process has saved its last checkpoint and ended. The next signal interrupts the run that resumes
from that checkpoint. Writes interrupt.json to this folder.

Example (from the project's top folder; minutes after the samples are made):
  python -m benchmarks.real.interrupt facts_smollm2 runtime.storage=runs/interrupt
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STEPS = 3  # a run makes these before it is interrupted
_STEP = re.compile(r"distill: .*\bstep (\d+),")


def interrupt(command: list[str], number: signal.Signals, delay: float) -> dict[str, Any]:
    """Run the command, send it the signal once it has made steps, and wait for its end.

    Args:
        delay: seconds from the line that shows the last of these steps to the signal.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    first: int | None = None
    sent: float | None = None
    for line in process.stdout:
        print(line, end="", flush=True)
        shown = _STEP.search(line)
        if shown is None or sent is not None:
            continue
        first = first or int(shown[1])
        if int(shown[1]) >= first + STEPS - 1:
            time.sleep(delay)
            process.send_signal(number)
            sent = time.monotonic()
    exit_code = process.wait()
    if sent is None:
        raise RuntimeError(f"the command ended before it was interrupted, with exit code {exit_code}")
    return {"signal": number.name, "seconds": time.monotonic() - sent, "exit_code": exit_code}


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name or path")
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE")
    parser.add_argument("--delay", type=float, default=5.0, help="from the step to the signal, in seconds")
    arguments = parser.parse_args()
    command = [sys.executable, "run.py", "study", arguments.recipe, *arguments.overrides]
    measured = [interrupt(command, number, arguments.delay) for number in SIGNALS]
    settings = [each for each in arguments.overrides if not each.startswith("runtime.storage=")]
    report = {
        "recipe": arguments.recipe,
        "settings": settings,
        "interrupted": measured,
        **circumstances("ray", "torch", "transformers"),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
