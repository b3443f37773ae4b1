"""The log of a job that runs, printed as it is written."""

import contextlib
import subprocess
import time

from .kubectl import start_log

_END_SECONDS = 15.0  # how long the last lines of a log may take after the job has ended


class LogFollower:
    """Prints the logs of a job's attempts, one after the other. A lost connection is opened again.

    One process at a time runs `kubectl logs --follow`:

        no process --an attempt runs--> process --it exits--> no process, `_lost_at` set

    From there, a new attempt of the job is followed from its beginning, and the same attempt from `_lost_at`.

    Args:
        poll_s: seconds between calls of `update`.
    """

    def __init__(self, job: str, namespace: str, *, poll_s: float) -> None:
        self._job = job
        self._namespace = namespace
        self._poll_s = poll_s
        self._process: subprocess.Popen[bytes] | None = None
        self._attempt = -1  # number of the attempt whose log is printed
        self._lost_at: float | None = None  # time at which the last process exited
        self._retry_after_s = 0.0  # seconds from `_lost_at` to the next try

    def update(self, attempt: int | None) -> None:
        """Make sure that the log of the running attempt is followed; None if none runs. To be called at every poll."""
        self._notice_end()
        if self._process or attempt is None:
            return
        if attempt != self._attempt or self._lost_at is None:
            self._attempt = attempt
            self._process = start_log(self._job, self._namespace)
        elif time.monotonic() - self._lost_at >= self._retry_after_s:
            self._process = self._start_again(self._lost_at)

    def finish(self) -> None:
        """Wait for the last lines; where the connection was lost before, print what came since."""
        self._notice_end()
        if self._process is None and self._lost_at is not None and not self._retry_after_s:
            self._process = self._start_again(self._lost_at)
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)

    def stop(self) -> None:
        """End the process that follows the log."""
        if self._process:
            self._process.terminate()

    def _notice_end(self) -> None:
        """Remember when the process exited, if it has."""
        exit_code = self._process.poll() if self._process else None
        if exit_code is None:
            return
        self._process, self._lost_at = None, time.monotonic()
        # A log that ends without an error usually belongs to an attempt that has just ended, which the status does not
        # show yet. It may also be a lost connection, so it is tried again, but only after a while.
        self._retry_after_s = _END_SECONDS if exit_code == 0 else 0.0

    def _start_again(self, lost_at: float) -> "subprocess.Popen[bytes]":
        """Follow the log from the loss on. Longer than the gap: repeated lines are better than missing ones."""
        since_s = int(time.monotonic() - lost_at + 2 * self._poll_s) + 1
        return start_log(self._job, self._namespace, since_s=since_s)
