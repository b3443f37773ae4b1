"""The log of a job that runs, printed as it is written."""

import contextlib
import subprocess
import time

from .kubectl import start_log

_END_SECONDS = 15.0  # how long the last lines of a log may take after the job has ended
_LONG_SECONDS = 300.0  # how long a whole log, or what was missed of it, may take to print
# kubectl's client notices after 45 s that a connection is dead (HTTP/2's ping after 30 s, its timeout 15 s). A process
# that lives longer has an open connection, and has printed what was missing. Less than a minute, after which many
# proxies close a connection without output.
_OPEN_SECONDS = 50
_UNNOTICED_SECONDS = 60  # how long before its end a connection may have been dead


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
        self._alive_at = 0.0  # time at which the process was last seen running
        self._lost_at: float | None = None  # time from which on lines may be missing
        self._retry_at = 0.0

    def update(self, attempt: int | None) -> None:
        """Make sure that the log of the running attempt is followed; None if none runs. To be called at every poll."""
        self._notice_end()
        if self._process or attempt is None:
            return
        if attempt != self._attempt or self._lost_at is None:
            self._start_attempt(attempt)
        elif time.time() >= self._retry_at:
            self._start(self._lost_at)

    def finish(self, last_attempt: int | None) -> None:
        """Wait for the last lines, and print first what is missing.

        Args:
            last_attempt: the number of the job's last attempt; None if none has run. Its log is printed whole if it was
                never seen running.
        """
        self._notice_end()
        seconds = _END_SECONDS
        if self._process is None and last_attempt is not None and last_attempt > self._attempt:
            self._start_attempt(last_attempt)
            seconds = _LONG_SECONDS
        elif self._process is None and self._lost_at is not None and time.time() >= self._retry_at:
            self._start(self._lost_at)
            seconds = _LONG_SECONDS
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def stop(self) -> None:
        """End the process that follows the log."""
        if self._process:
            self._process.terminate()

    def _notice_end(self) -> None:
        """Remember from when on the log is missing, if the process has exited."""
        if self._process is None:
            return
        exit_code = self._process.poll()
        if exit_code is None:
            self._alive_at = time.time()
            return
        self._process = None
        # One that ended soon may have printed nothing, as while a machine cannot be reached.
        if self._lost_at is None or exit_code == 0 or self._alive_at - self._started_at > _OPEN_SECONDS:
            # Not the time at which the end is noticed: no poll may have come in between, in an outage or in sleep.
            self._lost_at = self._alive_at
        # A log that ends without an error usually belongs to an attempt that has just ended, which the status does not
        # show yet. It may also be a lost connection, so it is tried again, but only after a while.
        self._retry_at = time.time() + _END_SECONDS if exit_code == 0 else 0.0

    def _start_attempt(self, attempt: int) -> None:
        self._attempt = attempt
        self._lost_at = None
        self._start()

    def _start(self, lost_at: float | None = None) -> None:
        """Follow the log from its beginning, or from a loss on: repeated lines are better than missing ones."""
        self._started_at = self._alive_at = time.time()
        since_s = None if lost_at is None else int(self._started_at - lost_at) + _UNNOTICED_SECONDS
        self._process = start_log(self._job, self._namespace, since_s=since_s)
