"""The driver's lease: of two drivers started on one storage, one works and the other waits.

The holder's `driver.json` lies in the storage; the holder renews it, and takes it away when it ends. A holder is dead
if its process is gone from this machine, or if the file did not change for so many periods, as seen by the clock of
whoever waits: clocks of different machines are never compared.

The file is made in one exclusive step (on object stores a conditional PUT). On a disk, a dead holder's file is removed
under a lock on it, and no other. On an object store, two drivers that take over at the same moment may remove each
other's files; each reads back after a while what it wrote, and whoever was paused in between learns it at its next
renewal. The sample store bears two writers for so long.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pos2distill.store.artifacts import DRIVER_FILE, write_bytes
from pos2distill.urls import open_url

_PERIOD = 10.0  # seconds between renewals
_MISSED = 6  # periods without a renewal until a holder counts as dead
_LOOKS = 5  # times a period that whoever waits looks


@dataclass(frozen=True, slots=True)
class _Holder:
    """What stands in the file. machine: where `pid` means this process; beat: counts the renewals."""

    owner: str
    host: str
    machine: str
    pid: int
    since: str
    period: float
    beat: int = 0


def exit_immediately(line: str) -> None:
    """End this process without tidying up: what lies in the storage may be another driver's by now.

    What it started ends with it, as after a crash.
    """
    print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(2)


@contextlib.contextmanager
def hold_lease(
    storage: str, *, period: float = _PERIOD, leave: Callable[[str], None] = exit_immediately
) -> Iterator[None]:
    """Wait until no other driver works on this storage, and keep others waiting.

    Args:
        storage: a folder that is there.
        period: seconds between renewals.
        leave: called from a thread, with the reason, if the lease is lost inside: another driver took over, or the
            storage could not be reached for so long that one may have.
    """
    fs, path = open_url(f"{storage.rstrip('/')}/{DRIVER_FILE}", "runtime.storage")
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    me = _Holder(uuid.uuid4().hex, socket.gethostname(), _machine(), os.getpid(), since, period)
    _acquire(fs, path, me, storage)
    stop = threading.Event()
    renewal = threading.Thread(target=_renew, args=(fs, path, me, storage, stop, leave), daemon=True)
    renewal.start()
    try:
        yield
    finally:
        stop.set()
        renewal.join()
        holder = _from_bytes(_read(fs, path) or b"")
        if holder and holder.owner == me.owner:
            fs.rm_file(path)


def _acquire(fs: fsspec.AbstractFileSystem, path: str, me: _Holder, storage: str) -> None:
    seen: bytes | None = None
    seen_at, told = 0.0, ""
    while True:
        if (data := _read(fs, path)) is None:
            _create(fs, path, _to_bytes(me))
            # If two took over at once, this is when the other's file replaces ours.
            time.sleep(0 if seen is None else me.period / _LOOKS)
            continue
        holder = _from_bytes(data)
        if holder and holder.owner == me.owner:
            return
        if data != seen:
            seen, seen_at = data, time.monotonic()
        silent = time.monotonic() - seen_at
        if silent > _MISSED * (holder.period if holder else me.period) or (holder and _is_gone(holder)):
            _remove(fs, path, data)
            continue
        who = f"process {holder.pid} on {holder.host} since {holder.since}" if holder else "an unknown process"
        if who != told:
            print(f"{storage}: in use by {who}; waiting for its end (Ctrl-C to leave)", file=sys.stderr, flush=True)
            told = who
        time.sleep(me.period / _LOOKS)


def _renew(
    fs: fsspec.AbstractFileSystem,
    path: str,
    me: _Holder,
    storage: str,
    stop: threading.Event,
    leave: Callable[[str], None],
) -> None:
    """Until told to stop, or the lease is lost."""
    renewed, lost = time.monotonic(), ""
    while not lost and not stop.wait(me.period):
        try:
            holder = _from_bytes(_read(fs, path) or b"")
            if holder is None or holder.owner != me.owner:
                lost = "another run took over while this one gave no sign of life"
                break
            me = replace(me, beat=me.beat + 1)
            write_bytes(fs, path, _to_bytes(me))
            renewed = time.monotonic()
        except Exception as error:  # file systems raise what they like; each is a renewal that failed
            if time.monotonic() - renewed > _MISSED * me.period:
                lost = f"cannot be reached ({error}) and another run may take over"
    if lost:
        leave(f"{storage}: {lost}, so this run stops")


def _read(fs: fsspec.AbstractFileSystem, path: str) -> bytes | None:
    try:
        data: bytes = fs.cat_file(path)
    except FileNotFoundError:
        return None
    return data


def _create(fs: fsspec.AbstractFileSystem, path: str, data: bytes) -> None:
    """Write the file unless there is one."""
    with contextlib.suppress(FileExistsError):
        if isinstance(fs, LocalFileSystem):
            with open(path, "xb") as file:
                file.write(data)
        else:
            fs.pipe_file(path, data, mode="create")


def _remove(fs: fsspec.AbstractFileSystem, path: str, data: bytes) -> None:
    """Take a dead holder's file away; on a disk, only as long as it is the one that holds this data."""
    with contextlib.suppress(FileNotFoundError):
        if not isinstance(fs, LocalFileSystem):
            fs.rm_file(path)
            return
        with open(path, "rb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever waited for the lock may find that the file it opened is no longer there, or another is.
            if file.read() == data and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                os.unlink(path)


def _to_bytes(holder: _Holder) -> bytes:
    return (json.dumps(asdict(holder), indent=2) + "\n").encode()


def _from_bytes(data: bytes) -> _Holder | None:
    """The holder, or None for a file that is damaged or being written."""
    try:
        return _Holder(**json.loads(data))
    except (ValueError, TypeError):
        return None


def _machine() -> str:
    """This boot and process namespace of this machine, where that can be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _is_gone(holder: _Holder) -> bool:
    if holder.machine != _machine():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's process
    return False
