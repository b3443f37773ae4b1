"""The storage of Ray Train: training states, and its list of them (`checkpoint_manager_snapshot.json`).

Ray Train 2.60 uploads a state, then writes the list, then removes older states. A run resumes from the list's last one.
"""

import json
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs

from pos2distill.errors import UserError, warn
from pos2distill.literal_paths import list_matching, remove
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import STATE_FOLDER
from pos2distill.store.files import sync_file, write_bytes
from pos2distill.urls import storage_errors

_LIST = "checkpoint_manager_snapshot.json"
_STATES = "checkpoint_"  # how the names of states begin


def arrow_filesystem(artifact: Artifact) -> pyarrow.fs.FileSystem:
    """The artifact's file system as Ray Train takes it, so that both reach the storage in the same way."""
    handler = _LocalFiles if artifact.is_local else _Files
    return pyarrow.fs.PyFileSystem(handler(artifact.fs))


def repair_states(checkpoint: Artifact) -> None:
    """Make the list and the states agree, as Ray Train 2.60 needs to start.

    States that are not listed, since their upload was cut off, are removed: they would fill the disk. Listed states
    that are missing are taken off the list, with a warning.

    Raises:
        UserError: if the list is corrupt, or all listed states are missing; with what to do.
    """
    folder = f"{checkpoint.path}/{STATE_FOLDER}"
    with storage_errors(checkpoint.url, "runtime.storage"):
        paths = list_matching(checkpoint.fs, folder, f"{_STATES}*", with_folders=True)
        listed = listed_states(checkpoint)
        states = {path.rstrip("/").rpartition("/")[2]: path for path in paths}
        missing = [name for name in listed if name not in states]
        if missing:
            _take_off_list(checkpoint, missing)
        for name, path in states.items():
            if name not in {_LIST, *listed}:
                remove(checkpoint.fs, path)


def _take_off_list(checkpoint: Artifact, missing: Sequence[str]) -> None:
    """Write the list without the missing states.

    Raises:
        UserError: if no state is left.
    """
    url, path = f"{checkpoint.url}/{STATE_FOLDER}", f"{checkpoint.path}/{STATE_FOLDER}/{_LIST}"
    content = json.loads(checkpoint.fs.cat_file(path))
    states = content["checkpoint_results"]
    left = [number for number, state in enumerate(states) if state["checkpoint_dir_name"] not in missing]
    if not left:
        raise UserError(f"{url}/{missing[0]}: missing, but listed in {_LIST}; {_remedy(checkpoint)}")
    for name in missing:
        warn(f"{url}/{name}: missing, but listed in {_LIST}; training continues from another state")
    # Two lists of the same length: the states, and when each was reported.
    for part in ("checkpoint_results", "checkpoint_report_indices"):
        content[part] = [content[part][number] for number in left]
    content["latest_checkpoint_result"] = states[left[-1]]
    write_bytes(checkpoint.fs, path, json.dumps(content).encode())


def listed_states(checkpoint: Artifact) -> dict[str, int]:
    """The states that a run can resume from, the oldest first: their names and steps.

    Raises:
        UserError: if the list is corrupt, with what to do.
    """
    try:
        text = checkpoint.fs.cat_file(f"{checkpoint.path}/{STATE_FOLDER}/{_LIST}")
    except FileNotFoundError:  # not `exists`, which says no of a file that it cannot look at
        return {}
    try:
        states = json.loads(text)["checkpoint_results"]
        return {str(state["checkpoint_dir_name"]): int(state["metrics"]["step"]) for state in states}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{checkpoint.url}/{STATE_FOLDER}/{_LIST}: corrupt; {_remedy(checkpoint)}") from None


def _remedy(checkpoint: Artifact) -> str:
    return f"remove {checkpoint.url}/{STATE_FOLDER} to train again from the samples"


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
        try:
            if not self.failed:
                # Else the name could be on the disk before the content, and the list be empty after a power failure.
                sync_file(self.file.fileno())
                os.replace(self.partial, self.path)
        finally:
            self.file.close()
            Path(self.partial).unlink(missing_ok=True)
