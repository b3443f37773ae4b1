"""The file of the driver's lease: who holds it, and how it is created and removed.

Creation is exclusive: `open(..., "x")` on a disk, a conditional PUT on an object store. fsspec (2024.12 and later)
spells the latter `pipe_file(..., mode="create")`: s3fs sends `If-None-Match: *`
(docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html), gcsfs `ifGenerationMatch=0`, adlfs
`overwrite=False`. S3 answers 412, and s3fs raises FileExistsError, if the object exists.

Removal is not conditional on object stores: two drivers that find the same dead holder may remove each other's new
file. Therefore a driver that replaced a dead holder waits before it reads its file back, and a holder that was paused
in between finds the other's file at its next renewal. For that time two drivers may write; the sample store allows two
writers. On a disk, a lock on the dead holder's file rules this out.
"""

import contextlib
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pos2distill.store.files import read_if_any
from pos2distill.store.storage import DRIVER_FILE


@dataclass(frozen=True, slots=True)
class Holder:
    """Content of `driver.json`.

    Attributes:
        machine: on which `pid` is this process.
        beat: number of renewals.
        period: seconds between renewals.
        missed_periods: without a renewal, until this holder counts as dead.
    """

    owner: str
    host: str
    machine: str
    pid: int
    since: str
    period: float
    missed_periods: int
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def create(fs: fsspec.AbstractFileSystem, path: str, data: bytes) -> None:
    """Write the file, unless it exists."""
    if isinstance(fs, LocalFileSystem):
        _create_on_disk(path, data)
        return
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return
    except OSError:
        # s3fs 2026.9 tells an existing file only by the answer of AWS to a single writer; AWS has another one for
        # writers at the same moment (409), and other stores leave out what it looks for.
        if read_if_any(fs, path) is None:
            raise


def _create_on_disk(path: str, data: bytes) -> None:
    # The driver that was waited for removes the folder if it has written nothing.
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        # Not through fsspec, whose local file system checks for the file and then opens it: two steps.
        file = open(path, "xb")  # noqa: SIM115
    except FileExistsError:
        return
    try:
        with file:
            file.write(data)
    except BaseException:  # a full disk, for example: the empty file would be taken for another driver's
        with contextlib.suppress(OSError):
            os.remove(path)
        raise


def remove(fs: fsspec.AbstractFileSystem, path: str, data: bytes) -> None:
    """Remove a dead holder's file, if it is still there. On a disk, only if it still is the file that holds `data`."""
    with contextlib.suppress(FileNotFoundError):
        if not isinstance(fs, LocalFileSystem):
            fs.rm_file(path)
            return
        with _open_for_lock(path) as file:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            # While this process waited for the lock, another one may have removed or replaced the file.
            still_there = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            if still_there and file.read() == data:
                os.unlink(path)


def _open_for_lock(path: str) -> BinaryIO:
    """Open a file for writing too, if this user may: NFS refuses an exclusive lock of a file that is only read."""
    try:
        return open(path, "r+b")
    except PermissionError:  # another user's
        return open(path, "rb")


def to_bytes(holder: Holder) -> bytes:
    """The content of the file."""
    return (json.dumps(asdict(holder), indent=2) + "\n").encode()


def from_bytes(data: bytes) -> Holder | None:
    """The holder, or None if the file is corrupt or not yet fully written."""
    try:
        return Holder(**json.loads(data))
    except (ValueError, TypeError):
        return None


def named_holder(fs: fsspec.AbstractFileSystem, storage: str) -> str | None:
    """The process that a storage's lease names, in words; None if none does, or it is gone from this machine."""
    holder = from_bytes(read_if_any(fs, f"{storage}/{DRIVER_FILE}") or b"")
    return str(holder) if holder is not None and not _is_gone(holder) else None


def is_ours(data: bytes | None, me: Holder) -> bool:
    """Whether the file's content is of this holder, at whatever renewal."""
    holder = from_bytes(data or b"")
    return holder is not None and holder.owner == me.owner


def is_dead(holder: Holder, silent_for: float) -> bool:
    """Whether a holder's process is gone, or its file did not change for too long."""
    return silent_for > holder.missed_periods * holder.period or _is_gone(holder)


def machine_id() -> str:
    """This boot of this machine and this process namespace; where /proc does not exist, the host's name."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return boot_id + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _is_gone(holder: Holder) -> bool:
    """Whether the holder ran on this machine and its process no longer exists."""
    if holder.machine != machine_id():
        return False
    try:
        os.kill(holder.pid, 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's process
    return False
