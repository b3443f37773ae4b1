"""What actors tell the user. What they print is not shown, since Ray would mix it with its own lines."""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from pos2distill.errors import MachineError, warn

from .connection import driver_node
from .errors import actor_creation_failed, actor_died, find_fault, find_user_error

_POLL_SECONDS = 5.0
_RECENT_SECONDS = 120.0  # until Ray has noticed that an actor died for the last time
_REPEAT_SECONDS = 60.0  # in which all processes meet an outage
_TIMEOUT_SECONDS = 10.0  # timeout of one call, which takes milliseconds


class _Mailbox:
    """The actor that keeps the messages until the driver reads them."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.warned: dict[str, float] = {}  # when each line was kept for the last time
        self.deaths: list[tuple[float, str]] = []  # when, on this process's clock, and why

    def add_warning(self, line: str) -> None:
        """Keep a line, unless another process has just said the same: an outage meets all of them."""
        now = time.monotonic()
        if now - self.warned.get(line, -math.inf) > _REPEAT_SECONDS:
            self.warned[line] = now
            self.warnings.append(line)

    def add_death(self, reason: str) -> None:
        self.deaths.append((time.monotonic(), reason))

    def take_warnings(self) -> list[str]:
        taken, self.warnings = self.warnings, []
        return taken

    def recent_deaths(self, seconds: float) -> list[str]:
        """The reasons of all deaths, if the last one is at most so long ago; after older ones, work went on."""
        is_recent = bool(self.deaths) and time.monotonic() - self.deaths[-1][0] <= seconds
        return [reason for _, reason in self.deaths] if is_recent else []


@dataclass(frozen=True)
class DriverMailbox:
    """A handle of the mailbox that the driver reads. Can be pickled to any process of the cluster."""

    actor: ActorHandle

    @classmethod
    def start(cls) -> "DriverMailbox":
        """Start the mailbox on the driver's node: on a sampler's it would keep that node from ever being idle."""
        return cls(ray.remote(num_cpus=0, scheduling_strategy=driver_node())(_Mailbox).remote())

    def warn(self, line: str) -> None:
        """Have the driver print a warning."""
        self._send(self.actor.add_warning, line)

    def report_death(self, reason: str) -> None:
        """Report why this process ends."""
        self._send(self.actor.add_death, reason)

    @staticmethod
    def _send(method: Any, line: str) -> None:
        # Waits, since nothing is sent any more once this process has ended or the driver has read the last messages.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(method.remote(line), timeout=_TIMEOUT_SECONDS)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Print warnings while the body runs.

        Raises:
            MachineError: instead of Ray's own error of an actor that ended too often.
        """
        finished = threading.Event()
        thread = threading.Thread(target=self._print_warnings, args=(finished,), name="messages", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            if actor_died(error) and find_user_error(error) is None and find_fault(error) is None:
                self._raise_reason(error)
            raise
        finally:
            finished.set()
            thread.join()

    def _raise_reason(self, error: Exception) -> None:
        """Raise the reason why an actor ended more often than it may restart, as far as one was reported.

        Raises:
            MachineError: unless the actor raised an error while it was created, which may be a bug.
        """
        deaths: list[str] = []
        with contextlib.suppress(ray.exceptions.RayError):  # such as that of a cluster that is gone
            deaths = ray.get(self.actor.recent_deaths.remote(_RECENT_SECONDS), timeout=_TIMEOUT_SECONDS)
        if deaths:
            times = "once" if len(deaths) == 1 else f"{len(deaths)} times"
            raise MachineError(f"the engine of a sampler died {times}, the last time of this: {deaths[-1]}") from error
        if actor_creation_failed(error):
            return
        raise MachineError(
            "a process of runtime.samplers, teachers or trainers ended more often than its max_restarts allows, or the "
            "one that counts the run's progress ended: its machine was lost, or its memory did not suffice; run the "
            "same command again to continue"
        ) from error

    def _print_warnings(self, finished: threading.Event) -> None:
        is_last = False
        while not is_last:
            is_last = finished.wait(_POLL_SECONDS)
            # The run itself reports what is wrong with its cluster.
            with contextlib.suppress(ray.exceptions.RayError):
                for line in ray.get(self.actor.take_warnings.remote(), timeout=_TIMEOUT_SECONDS):
                    warn(line)
