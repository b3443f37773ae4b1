"""The storage of Ray Train: training states, and its list of them (`checkpoint_manager_snapshot.json`).

Ray Train 2.60 uploads a state, then writes the list, then removes older states. A run resumes from the list's last one.
"""

import json
import os
from io import FileIO
from typing import Any

import pyarrow as pa
import pyarrow.fs

from pos2distill.errors import UserError
from pos2distill.literal_paths import list_matching, remove
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import STATE_FOLDER
from pos2distill.urls import storage_errors

_LIST = "checkpoint_manager_snapshot.json"
_STATES = "checkpoint_"  # how the names of states begin


def arrow_filesystem(artifact: Artifact) -> pyarrow.fs.FileSystem:
    """The artifact's file system as Ray Train takes it, so that both reach the storage in the same way."""
    handler = _LocalFiles if artifact.is_local else _Files
    return pyarrow.fs.PyFileSystem(handler(artifact.fs))


def remove_unlisted_states(checkpoint: Artifact) -> None:
    """Remove states whose upload was cut off: they would fill the disk, and nothing reads them.

    Raises:
        UserError: if the list is corrupt, or names a state that is missing, without which Ray Train 2.60 does not
            start; with what to do.
    """
    folder = f"{checkpoint.path}/{STATE_FOLDER}"
    with storage_errors(checkpoint.url, "runtime.storage"):
        states = list_matching(checkpoint.fs, folder, f"{_STATES}*", with_folders=True)
        listed = listed_states(checkpoint)
        names = {path.rstrip("/").rpartition("/")[2]: path for path in states}
        missing = sorted(listed - names.keys())
        if missing:
            raise UserError(
                f"{checkpoint.url}/{STATE_FOLDER}/{missing[0]}: missing, but listed in {_LIST}; remove "
                f"{checkpoint.url}/{STATE_FOLDER} to train again from the samples"
            )
        for name, path in names.items():
            if name not in {_LIST, *listed}:
                remove(checkpoint.fs, path)


def listed_states(checkpoint: Artifact) -> set[str]:
    """Names of the states that a run can resume from.

    Raises:
        UserError: if the list is corrupt, with what to do.
    """
    try:
        text = checkpoint.fs.cat_file(f"{checkpoint.path}/{STATE_FOLDER}/{_LIST}")
    except FileNotFoundError:  # not `exists`, which says no of a file that it cannot look at
        return set()
    try:
        content = json.loads(text)
        return {str(state["checkpoint_dir_name"]) for state in content["checkpoint_results"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{checkpoint.url}/{STATE_FOLDER}/{_LIST}: corrupt; remove {checkpoint.url}/{STATE_FOLDER} to train again "
            f"from the samples"
        ) from None


class _Files(pyarrow.fs.FSSpecHandler):  # type: ignore[misc]  # untyped
    """Files of any storage."""

    def delete_dir(self, path: str) -> None:
        """Called by pyarrow. Its own file system takes `[`, `*` and `?` in the path for a pattern."""
        remove(self.fs, path)


class _LocalFiles(_Files):
    """Local files, of which the list appears whole or not at all.

    Ray Train 2.60 writes it in place: on a full disk, or if it is killed, an empty list would be left, with which no
    run could continue.
    """

    def open_output_stream(self, path: str, _metadata: object) -> pa.NativeFile:
        """Called by pyarrow. States are large, and pass through Python several times more slowly."""
        if path.endswith(_LIST):
            return pa.PythonFile(_WholeFile(path), mode="w")
        return pyarrow.fs.LocalFileSystem().open_output_stream(path)


class _WholeFile:
    """A file that is written beside its path, and takes its place when it is closed without an error."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.partial = f"{path}.partial"
        # Without a buffer, so that a disk is full while something is written, not when the file is closed.
        self.file = FileIO(self.partial, "wb")
        self.failed = False

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self.file.closed

    def write(self, data: Any) -> int:
        """Write all of it."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError:
            self.failed = True
            raise
        return size

    def tell(self) -> int:
        """The number of bytes so far."""
        return self.file.tell()

    def flush(self) -> None:
        """Nothing waits in a buffer."""

    def close(self) -> None:
        """Put the file into its place, unless a part of it could not be written."""
        if self.file.closed:
            return
        if not self.failed:
            # Else the name could be on the disk before the content, and the list be empty after a power failure.
            os.fsync(self.file.fileno())
        self.file.close()
        if self.failed:
            os.unlink(self.partial)
        else:
            os.replace(self.partial, self.path)
