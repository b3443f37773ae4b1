"""The driver's lease: of two drivers started on one storage, one runs and the other waits.

The holder writes `driver.json` into the storage, rewrites it every period (a renewal), and removes it when it ends.

               file absent: create it exclusively
     ┌─────────┐ ───────────────────────────────▶ ┌─────────┐   body ends: remove the file
     │ WAITING │                                  │ HOLDING │ ─────────────────────────────▶ done
     └─────────┘ ◀─────────────────────────────── └─────────┘
       │     ▲    another process was faster        │     ▲
       └─────┘                                      └─────┘
     another holder, alive: look again         a period passes: renew
     another holder, dead: remove its file          │
                                                    │ the file is another holder's, or no renewal that succeeded
                                                    ▼ began in the last `missed_periods - 1` periods
                                                  LOST: `on_lost` is called; by default, `Lease.check` raises

A holder is dead if its process no longer exists on this machine, or if its file did not change for `missed_periods` of
its periods: five minutes by default, so that a storage that does not answer for a while ends no run. The waiting
process measures this with its own clock; clocks of different machines are never compared. A holder notices a period
earlier, and in a thread that waits for no storage: a request to a server that accepts it and says nothing can take
minutes (404 s with s3fs 2026.9). A process that was paused looks at the file first.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime

import fsspec

from pos2distill.errors import ExitCode, TransientError
from pos2distill.faults import error_text, fix_hint, is_transient
from pos2distill.store.files import read_if_any, write_bytes
from pos2distill.store.lease_file import Holder, create, from_bytes, is_dead, is_ours, machine_id, remove, to_bytes
from pos2distill.store.storage import DRIVER_FILE
from pos2distill.urls import open_url

_PERIOD_SECONDS = 10.0  # between renewals
_MISSED_PERIODS = 30  # without a renewal, until a holder counts as dead
_POLLS_PER_PERIOD = 5  # how often a waiting driver reads the lease


def exit_immediately(line: str) -> None:
    """End this process without cleanup, since another driver may own the files in the storage by now.

    Its child processes end as after a crash.
    """
    print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(ExitCode.USER_ERROR)


class Lease:
    """The right of one driver to write to a storage, from `hold_lease`. `check` raises once it is lost."""

    def __init__(self) -> None:
        self._lost_reason = ""
        self._listeners: list[Callable[[TransientError], None]] = []
        self._changing = threading.Lock()
        self._work = threading.Lock()

    def mark_lost(self, reason: str) -> None:
        """Record that the lease is lost and tell the listeners. Called from a thread of the renewal."""
        with self._changing:
            self._lost_reason = reason
            listeners = list(self._listeners)
        for listener in listeners:
            with contextlib.suppress(Exception):  # such as a Ray cluster that is gone too
                listener(TransientError(reason))

    def check(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            TransientError: if the lease is lost, with the reason.
        """
        if self._lost_reason:
            raise TransientError(self._lost_reason)

    @contextlib.contextmanager
    def notify_on_loss(self, listener: Callable[[TransientError], None]) -> Iterator[None]:
        """Inside, the listener is called if the lease is lost, from a thread of the renewal."""
        with self._changing:
            self._listeners.append(listener)
        try:
            self.check()
            yield
        finally:
            with self._changing:
                self._listeners.remove(listener)

    @contextlib.contextmanager
    def hold_during(self) -> Iterator[None]:
        """Hold the lease until the body ends, which may run in a thread that the driver leaves behind."""
        with self._work:
            yield

    def run_when_idle(self, function: Callable[[], None]) -> None:
        """Call the function now, or from a thread once the body of `hold_during` that is still running ends."""

        def wait_and_call() -> None:
            with self._work:
                function()

        if self._work.locked():
            threading.Thread(target=wait_and_call, name="lease", daemon=True).start()
        else:
            function()


@contextlib.contextmanager
def hold_lease(
    storage: str,
    *,
    period: float = _PERIOD_SECONDS,
    missed_periods: int = _MISSED_PERIODS,
    on_lost: Callable[[str], None] | None = None,
) -> Iterator[Lease]:
    """Wait until no other driver uses this storage, and keep others waiting.

    Args:
        storage: an existing folder.
        period: seconds between renewals.
        missed_periods: without a renewal, until another driver may take over.
        on_lost: called from a thread, with the reason, if the lease is lost inside the body: another driver took over,
            or the storage could not be reached for so long that one may have. Default: `Lease.mark_lost`.
    """
    fs, path = open_url(f"{storage.rstrip('/')}/{DRIVER_FILE}", "runtime.storage")
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    me = Holder(uuid.uuid4().hex, socket.gethostname(), machine_id(), os.getpid(), since, period, missed_periods)
    _acquire(fs, path, me, storage)
    lease = Lease()
    renewal = _Renewal(fs, path, me, storage, on_lost or lease.mark_lost)

    def release() -> None:
        # Whatever the storage does, the body's own outcome counts; a file that stays names a process that has ended.
        if renewal.end():
            with contextlib.suppress(Exception):
                if is_ours(read_if_any(fs, path), me):
                    fs.rm_file(path)

    try:
        yield lease
    finally:
        lease.run_when_idle(release)


def _acquire(fs: fsspec.AbstractFileSystem, path: str, me: Holder, storage: str) -> None:
    """Return once the file is ours."""
    waiting = _Waiting(fs, path, me, storage)
    while True:
        try:
            if waiting.try_once():
                return
            waiting.last_answer = time.monotonic()
        except Exception as error:  # fsspec's file systems share no base class for failed requests
            if not (is_transient(error) and waiting.may_outlast_failure()):
                raise
            time.sleep(me.period / _POLLS_PER_PERIOD)


class _Waiting:
    """Looks at the file until it is ours."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str, me: Holder, storage: str) -> None:
        self.fs = fs
        self.path = path
        self.me = me
        self.storage = storage
        self.last_data: bytes | None = None  # what another holder has written
        self.last_change = time.monotonic()
        self.last_answer = time.monotonic()  # the last try of which no request failed
        self.last_printed = ""

    def may_outlast_failure(self) -> bool:
        """Whether a failed request is no reason to stop: after others, as long as a holder would bear it."""
        return (
            self.last_data is not None
            and time.monotonic() - self.last_answer <= self.me.missed_periods * self.me.period
        )

    def try_once(self) -> bool:
        """Whether the file is ours. Otherwise create it if it is absent, remove that of a dead holder, or wait."""
        data = read_if_any(self.fs, self.path)
        if data is None:
            create(self.fs, self.path, to_bytes(self.me))
            if self.last_data is not None:
                # Another driver may have seen the same dead holder and may still replace our file: wait, then check.
                time.sleep(self.me.period / _POLLS_PER_PERIOD)
            return False
        if is_ours(data, self.me):
            return True
        holder = from_bytes(data)
        if data != self.last_data:
            self.last_data = data
            self.last_change = time.monotonic()
        if is_dead(holder or self.me, silent_for=time.monotonic() - self.last_change):
            remove(self.fs, self.path, data)
            return False
        self._print_once(holder)
        time.sleep(self.me.period / _POLLS_PER_PERIOD)
        return False

    def _print_once(self, holder: Holder | None) -> None:
        """Say who holds the lease, whenever it is another one."""
        who = str(holder or "an unknown process")
        if who == self.last_printed:
            return
        seconds = (holder or self.me).missed_periods * (holder or self.me).period
        until = f"waiting until it ends, or does not renew its lease for {seconds:g} s (Ctrl-C to cancel)"
        print(f"{self.storage}: in use by {who}; {until}", file=sys.stderr, flush=True)
        self.last_printed = who


class _Renewal:
    """Rewrites the file every period, from its creation until `end` or the loss of the lease.

    Args:
        on_lost: called once, from a thread.
    """

    def __init__(
        self,
        fs: fsspec.AbstractFileSystem,
        path: str,
        me: Holder,
        storage: str,
        on_lost: Callable[[str], None],
    ) -> None:
        self.fs = fs
        self.path = path
        self.me = me
        self.storage = storage
        self.on_lost = on_lost
        self.stop = threading.Event()
        self.last_began = time.monotonic()  # the last renewal that succeeded
        self.failure: Exception | None = None  # error of the latest renewal, if it failed
        self.ending = threading.Lock()
        self.threads = [threading.Thread(target=each, daemon=True) for each in (self._renew, self._watch)]
        for thread in self.threads:
            thread.start()

    def end(self) -> bool:
        """Stop renewing. Returns whether no request is under way: one that hangs is not waited for."""
        with self.ending:
            self.stop.set()
        for thread in self.threads:
            thread.join(self.me.period)
        return not any(thread.is_alive() for thread in self.threads)

    def _renew(self) -> None:
        while not self.stop.wait(self.me.period):
            began = time.monotonic()
            try:
                if not self._is_still_ours():
                    self._report_loss("another run took over because this one did not renew its lease")
                    return
                self.me = replace(self.me, beat=self.me.beat + 1)
                write_bytes(self.fs, self.path, to_bytes(self.me))
                self.last_began, self.failure = began, None
            except Exception as error:  # fsspec's file systems share no base class for failed requests
                self.failure = error

    def _is_still_ours(self) -> bool:
        """Reads once more if reading took long: this process may have been paused meanwhile, and replaced."""
        began = time.monotonic()
        ours = is_ours(read_if_any(self.fs, self.path), self.me)
        if ours and time.monotonic() - began > self.me.period:
            return is_ours(read_if_any(self.fs, self.path), self.me)
        return ours

    def _watch(self) -> None:
        last_look = grace = time.monotonic()
        while not self.stop.wait(self.me.period / _POLLS_PER_PERIOD):
            now = time.monotonic()
            # This process was paused. The next renewal reads whether another one has taken over.
            if now - last_look > self.me.period:
                grace = now + 2 * self.me.period
            last_look = now
            if now < grace or now - self.last_began <= (self.me.missed_periods - 1) * self.me.period:
                continue
            error = self.failure
            why, remedy = ("no answer", "") if error is None else (error_text(error), fix_hint(error, self.storage))
            self._report_loss(f"the lease cannot be renewed ({why}), so another run may take over{remedy}")

    def _report_loss(self, why: str) -> None:
        with self.ending:
            if self.stop.is_set():
                return
            self.stop.set()
        self.on_lost(f"{self.storage}: {why}; this run stops; run the same command again to continue")
