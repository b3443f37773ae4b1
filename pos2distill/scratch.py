"""Folders for temporary files on this machine, which no other user can read or prepare."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pos2distill.errors import UserError


def user_folder(name: str) -> Path:
    """A folder below the machine's temporary folder that belongs to this user alone. It stays until it is removed.

    Raises:
        UserError: if another user has made it, or may use it: its contents could be anyone's.
    """
    root = Path(tempfile.gettempdir()) / f"pos2distill-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()  # does not follow a link, which could point anywhere
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{root}: expected a folder that only you can use (mode 0700); remove it, or set TMPDIR")
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within this context, no other process of this machine is in a context of the same path.

    Args:
        path: path of the lock file, which is made and stays. The system releases the lock of a process that dies.
    """
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing the file is not enough: a process that was forked meanwhile would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
