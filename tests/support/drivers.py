"""`run.py` in a process of its own, to be stopped and killed."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tests.support.paths import PROJECT

LIMIT_SECONDS = 500.0  # far more than any of this takes, also on a busy machine


class Driver:
    """`run.py distill`, or another command, in a process of its own, with all that it starts.

    Attributes:
        started: those of this test. Those that a failed test leaves running are ended after it.
    """

    started: ClassVar[list["Driver"]] = []

    def __init__(
        self, recipe: Path, storage: Path | str, environment: dict[str, str] | None = None, command: str = "distill"
    ) -> None:
        self.log = recipe.parent / f"{Path(storage).name}-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "run.py", command, str(recipe), f"runtime.storage={storage}"],
                cwd=PROJECT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.started.append(self)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Until the condition holds, which it must before the driver has ended."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def end(self, number: int | None = None) -> int:
        """Send a signal if one is named, wait for the end, and see that nothing it started is left. The exit code."""
        started = [
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if "Agent" not in process.name()  # Ray's own; of a killed driver they go by themselves, minutes later
        ]
        if number:
            self.process.send_signal(number)
        code = self.process.wait(LIMIT_SECONDS)
        self.ended = time.monotonic()
        _, left = psutil.wait_procs(started, timeout=60)
        assert not left, [process.cmdline() for process in left]
        return code
