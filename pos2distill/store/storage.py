"""Which recipe owns a storage, the folder of a run at any fsspec URL."""

import json
import os
import re
import uuid
from contextlib import suppress

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pos2distill.errors import UserError
from pos2distill.literal_paths import last_part, make_folder
from pos2distill.store.files import write_json
from pos2distill.urls import open_url, storage_errors

RUN_FILE = "run.json"  # names the recipe that owns the storage
DRIVER_FILE = "driver.json"  # names the running driver (see `lease`)

# Also while they are written (`write_bytes`), or if a run was killed then.
_MARK = rf"({re.escape(RUN_FILE)}|{re.escape(DRIVER_FILE)})(\.[0-9a-f]+\.partial)?"
# Left by a run that was killed then, or that may write and not delete.
_PROBE = "probe-[0-9a-f]{32}"
_NO_CONTENT = re.compile(f"{_MARK}|{_PROBE}")


def check_storage(storage: str, name: str) -> bool:
    """Whether a folder already belongs to this recipe. Nothing is written.

    Returns: False if the folder is empty or does not exist.
    Raises:
        UserError: if the folder belongs to another recipe, or holds files but no run; if the storage refuses access or
            cannot be reached.
    """
    with storage_errors(storage, "runtime.storage"):
        return _belongs_to(storage, name)


def _belongs_to(storage: str, name: str) -> bool:
    fs, path = open_url(storage, "runtime.storage")
    marker = f"{path}/{RUN_FILE}"
    if fs.exists(marker):
        try:
            owner = run_name(fs, path)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{storage}: corrupt {RUN_FILE} ({error}); choose another runtime.storage") from None
        if owner != name:
            raise UserError(
                f"{storage}: holds the run of recipe '{owner}', not '{name}'; choose another runtime.storage"
            )
        return True
    if fs.exists(path) and not fs.isdir(path):
        raise UserError(f"{storage}: is a file, expected a folder (runtime.storage)")
    if fs.exists(path) and _list_content(fs, path):
        raise UserError(f"{storage}: is not empty and holds no run (no {RUN_FILE}); choose another runtime.storage")
    return False


def run_name(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """The recipe that owns the storage at this path.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: if its file is corrupt.
    """
    return str(json.loads(fs.cat_file(f"{path}/{RUN_FILE}"))["name"])


def probe_storage(fs: fsspec.AbstractFileSystem, path: str) -> None:
    """Write a file to the remote storage at this path and delete it, to see whether it raises."""
    probe = f"{path}/probe-{uuid.uuid4().hex}"
    fs.pipe_file(probe, b"x")
    fs.rm_file(probe)


def claim_storage(storage: str, name: str) -> bool:
    """Create the folder if needed, and mark it as the storage of this recipe.

    Returns: whether the folder was created.
    Raises:
        UserError: see `check_storage`; also if the folder cannot be created.
    """
    if check_storage(storage, name):
        return False
    fs, path = open_url(storage, "runtime.storage")
    with storage_errors(storage, "runtime.storage"):
        is_new = not fs.exists(path)
        make_folder(fs, path)
        write_json(fs, f"{path}/{RUN_FILE}", {"name": name})
    return is_new


def release_storage(storage: str) -> None:
    """Undo `claim_storage` if no artifact was written. The caller must hold the lease."""
    fs, path = open_url(storage, "runtime.storage")
    if not _list_content(fs, path):
        fs.rm_file(f"{path}/{RUN_FILE}")


def remove_if_empty(storage: str) -> None:
    """Remove the folder of a storage that holds nothing. Object stores have no folders."""
    fs, path = open_url(storage, "runtime.storage")
    if isinstance(fs, LocalFileSystem):
        with suppress(OSError):
            os.rmdir(path)


def _list_content(fs: fsspec.AbstractFileSystem, path: str) -> set[str]:
    """Names of the entries of a folder, without the two files that mark its owner, and probes."""
    names = {last_part(str(entry)) for entry in fs.ls(path, detail=False)}
    return {name for name in names if not _NO_CONTENT.fullmatch(name)}
