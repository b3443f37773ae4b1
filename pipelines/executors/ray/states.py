"""The storage of Ray Train: training states, and its list of them (`checkpoint_manager_snapshot.json`).

Ray Train 2.60 uploads a state, then writes the list, then removes older states. A run resumes from the list's last one.
"""

import json
import os
from collections.abc import Collection
from io import FileIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs

from pos2distill.literal_paths import make_folder, remove
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import STATE_FOLDER
from pos2distill.store.files import sync_file

from ..state_list import StateList

_LIST = "checkpoint_manager_snapshot.json"


def arrow_filesystem(artifact: Artifact) -> pyarrow.fs.FileSystem:
    """The artifact's file system as Ray Train takes it, so that both reach the storage in the same way."""
    handler = _LocalFiles if artifact.is_local else _Files
    return pyarrow.fs.PyFileSystem(handler(artifact.fs))


def _parse(content: bytes) -> dict[str, int]:
    state_list = json.loads(content)
    states = state_list["checkpoint_results"]
    if len(state_list["checkpoint_report_indices"]) != len(states):
        raise ValueError("expected an index of each state")
    return {str(state["checkpoint_dir_name"]): int(state["metrics"]["step"]) for state in states}


def _without(content: bytes, missing: Collection[str]) -> bytes:
    state_list = json.loads(content)
    states = state_list["checkpoint_results"]
    left = [number for number, state in enumerate(states) if state["checkpoint_dir_name"] not in missing]
    # Two lists of the same length: the states, and when each was reported.
    for part in ("checkpoint_results", "checkpoint_report_indices"):
        state_list[part] = [state_list[part][number] for number in left]
    state_list["latest_checkpoint_result"] = states[left[-1]]
    return json.dumps(state_list).encode()


RAY_STATES = StateList(STATE_FOLDER, _LIST, "checkpoint_*", _parse, _without)
"""Ray Train 2.60 does not start where a listed state is missing."""


class _Files(pyarrow.fs.FSSpecHandler):  # type: ignore[misc]  # untyped
    """Files of any storage."""

    def create_dir(self, path: str, _recursive: bool) -> None:
        """Called by pyarrow. See `make_folder`."""
        make_folder(self.fs, path)

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
    """A file that is written beside its path, and takes its place when it is closed with all of its content."""

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
        """Put the file into its place, unless a part of it could not be written, or nothing was."""
        if self.file.closed:
            return
        try:
            # Empty if Ray Train failed to make the content, which it does with the file open.
            is_whole = not self.failed and self.file.tell() > 0
            if is_whole:
                # Else the name could be on the disk before the content, and the list be empty after a power failure.
                sync_file(self.file.fileno())
            # Before the file takes its place: some mounts write only now, and may find that they cannot.
            self.file.close()
            if is_whole:
                os.replace(self.partial, self.path)
        finally:
            self.file.close()
            Path(self.partial).unlink(missing_ok=True)
