"""Single files at any fsspec URL: written whole or not at all, and read with their checksums verified."""

import contextlib
import errno
import json
import os
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from pos2distill.faults import is_fault, is_forbidden_by_gcs
from pos2distill.parquet import open_parquet

ROW_GROUP_SIZE = 256
"""Rows of a Parquet row group, the least that a reader must read to get one row."""


# Of mounted file systems that sync no folders, or nothing.
_NOT_SYNCED = (errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def allow_usual_access(folder: Path) -> None:
    """Give all files of a local folder the rights that the process's umask leaves.

    safetensors 0.8 makes files that their owner alone can read, so that no server of another user could load a model.
    """
    probe = folder / f"rights-{uuid.uuid4().hex}"
    probe.touch()
    rights = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != rights:
            # Some mounted volumes do not allow it, and give all files the same rights.
            with contextlib.suppress(OSError):
                path.chmod(rights)


def sync_folder(folder: Path) -> None:
    """Flush a local folder with its content to the disk, see `sync`."""
    sync((*folder.rglob("*"), folder))


def sync(paths: Iterable[Path]) -> None:
    """Flush local files and folders to the disk: after a power failure, names may otherwise belong to empty files.

    Call it before the manifest or list that names them is written, and before what they replace is removed.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync_file(descriptor)
        finally:
            os.close(descriptor)


def sync_file(descriptor: int) -> None:
    """Flush one open file to the disk, where its file system can do that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise


def write_table(fs: fsspec.AbstractFileSystem, path: str, table: pa.Table) -> None:
    """Write a Parquet file atomically, with checksums."""
    # In memory first: the file must be written in one piece, and parts are small.
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True, row_group_size=ROW_GROUP_SIZE)
    write_bytes(fs, path, sink.getvalue().to_pybytes())


def read_table(fs: fsspec.AbstractFileSystem, path: str, columns: list[str] | None = None) -> pa.Table:
    """Read a Parquet file, or some of its columns, and verify its checksums.

    Raises:
        pyarrow.ArrowException: if it is not a Parquet file, is corrupt, or lacks a column.
    """
    with fs.open(path) as source:
        file = open_parquet(source)
        missing = [name for name in columns or () if name not in file.schema_arrow.names]
        if missing:
            raise pa.ArrowInvalid(f"no column {missing[0]}")
        return file.read(columns, use_threads=False)


def read_if_any(fs: fsspec.AbstractFileSystem, path: str) -> bytes | None:
    """The content of a file; None if there is none.

    fsspec's `exists` also says no of a local file that cannot be looked at for now (a stale mount): what is finished
    would be made again.
    """
    try:
        content: bytes = fs.cat_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return content


def write_json(fs: fsspec.AbstractFileSystem, path: str, value: Any) -> None:
    """Write indented JSON atomically."""
    write_bytes(fs, path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_bytes(fs: fsspec.AbstractFileSystem, path: str, data: bytes) -> None:
    """Write a file atomically: on disk through a rename, on an object store in one PUT."""
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(path, data)
        return
    # A unique name, since two processes may write the same file at the same time.
    partial = f"{path}.{uuid.uuid4().hex}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(data)
            # On the disk before the rename: after a power failure the name may otherwise belong to an empty file.
            file.flush()
            sync_file(file.fileno())
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def is_corrupt(error: BaseException) -> bool:
    """Whether a Parquet file could not be read because of its content. Else its storage could not be read."""
    # Arrow 23 raises a plain OSError for damaged pages; those of storages have a number or another class, except one.
    is_of_arrow = type(error) is OSError and error.errno is None and not is_forbidden_by_gcs(error)
    return is_of_arrow or not is_fault(error)
