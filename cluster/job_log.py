"""The log of a job that runs, printed as it is written."""

import contextlib
import subprocess
import time

from .kubectl import start_log

_END_SECONDS = 15.0  # how long the last lines of a log may take after the job has ended
# kubectl's client notices after 45 s that a connection is dead (HTTP/2's ping after 30 s, its timeout 15 s).
_UNNOTICED_SECONDS = 60
_STABLE_SECONDS = 120.0  # a reopened connection that lasts so long has printed what was missing


class LogFollower:
    """Prints the logs of a job's attempts, one after the other. A lost connection is opened again.

    One process at a time runs `kubectl logs --follow`:

        no process --an attempt runs--> process --it exits--> no process, `_lost_at` set

    From there, a new attempt of the job is followed from its beginning, and the same attempt from `_lost_at`. The times
    are those of the clock on the wall, which, unlike a monotonic one, continues while a laptop sleeps.
    """

    def __init__(self, job: str, namespace: str) -> None:
        self._job = job
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None
        self._attempt = -1  # number of the attempt whose log is printed
        self._started_at = 0.0  # time at which the process was started
        self._lost_at: float | None = None  # time from which on lines may be missing
        self._retry_at = 0.0

    def update(self, attempt: int | None) -> None:
        """Make sure that the log of the running attempt is followed; None if none runs. To be called at every poll."""
        self._notice_end()
        if self._process or attempt is None:
            return
        if attempt != self._attempt or self._lost_at is None:
            self._attempt = attempt
            self._lost_at = None
            self._start()
        elif time.time() >= self._retry_at:
            self._start(self._lost_at)

    def finish(self, *, has_run: bool) -> None:
        """Wait for the last lines; where the connection was lost before, print what came since.

        Args:
            has_run: whether any attempt has run. If none was seen running, the log of the last one is printed whole.
        """
        self._notice_end()
        if self._process is None and self._attempt < 0 and has_run:
            self._start()
        elif self._process is None and self._lost_at is not None and not self._retry_at:
            self._start(self._lost_at)
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)

    def stop(self) -> None:
        """End the process that follows the log."""
        if self._process:
            self._process.terminate()

    def _notice_end(self) -> None:
        """Remember from when on the log is missing, if the process has exited."""
        exit_code = self._process.poll() if self._process else None
        if exit_code is None:
            return
        self._process = None
        now = time.time()
        # One that ended soon may have printed nothing, as while a machine cannot be reached.
        if self._lost_at is None or exit_code == 0 or now - self._started_at >= _STABLE_SECONDS:
            self._lost_at = now
        # A log that ends without an error usually belongs to an attempt that has just ended, which the status does not
        # show yet. It may also be a lost connection, so it is tried again, but only after a while.
        self._retry_at = now + _END_SECONDS if exit_code == 0 else 0.0

    def _start(self, lost_at: float | None = None) -> None:
        """Follow the log from its beginning, or from a loss on: repeated lines are better than missing ones."""
        self._started_at = time.time()
        since_s = None if lost_at is None else int(self._started_at - lost_at) + _UNNOTICED_SECONDS
        self._process = start_log(self._job, self._namespace, since_s=since_s)
