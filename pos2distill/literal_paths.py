"""Files and folders by their names: fsspec 2026.9 takes `[`, `*` and `?` anywhere in a path for a pattern."""

import contextlib
import errno
import glob
import os
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

_WITHOUT_FOLDERS = frozenset({"s3", "gs", "abfs"})
"""Protocols of object stores, each one of those that its package names."""


def list_matching(fs: fsspec.AbstractFileSystem, folder: str, pattern: str, *, with_folders: bool = False) -> list[str]:
    """The files in a folder whose names match, sorted; those that other processes wrote too. Empty without it.

    Not by `find`, which shows a folder that it cannot list as an empty one (fsspec 2026.9).

    Args:
        folder: the folder, read literally.
        pattern: pattern of paths in it, such as `part-*.parquet` or `*/manifest.json`; each name is one of `fnmatch`.
        with_folders: list folders that match too.
    Raises:
        OSError: if the folder, or one in it that a pattern with `/` needs, cannot be listed. Those in it that this user
            may not read are left out, such as the `lost+found` of a volume.
    """
    *parents, last = pattern.split("/")
    folders = [folder]
    for name in parents:
        found = [entry for each in folders for entry in _entries(fs, each, name, is_root=each == folder)]
        # A link on a disk has another type than that of the folder it leads to.
        folders = [entry["name"] for entry in found if entry["type"] != "file"]
    matching = [entry for each in folders for entry in _entries(fs, each, last, is_root=each == folder)]
    return sorted(entry["name"] for entry in matching if with_folders or entry["type"] != "directory")


def _entries(fs: fsspec.AbstractFileSystem, folder: str, pattern: str, *, is_root: bool) -> list[dict[str, Any]]:
    """What is in a folder and has a name that matches. Empty for what is no folder, and none any more."""
    fs.invalidate_cache(folder)
    try:
        entries = fs.ls(folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        # What this user may not read, and a link that leads to itself.
        if is_root or error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP):
            raise
        return []
    # Of a file, `ls` shows the file itself.
    inside = [entry for entry in entries if entry["name"].rstrip("/").rpartition("/")[0] == folder.rstrip("/")]
    return [entry for entry in inside if fnmatchcase(PurePosixPath(entry["name"]).name, pattern)]


def last_part(path: str) -> str:
    """The name of a file or folder; of a folder also with a slash at its end."""
    return path.rstrip("/").rpartition("/")[2]


def require_listable(fs: fsspec.AbstractFileSystem, folder: str) -> None:
    """Reject a folder of this machine that cannot be listed: fsspec 2026.9 shows it as an empty one.

    Raises:
        OSError: for `urls.storage_errors`. None if there is no such folder.
    """
    if isinstance(fs, LocalFileSystem):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(folder)


def make_folder(fs: fsspec.AbstractFileSystem, path: str) -> None:
    """Make a folder and those that it is in, unless it exists. Object stores have no folders.

    There, s3fs 2026.9 takes any failed request for a missing bucket, and tries to create it: if the store is busy, the
    answer is then that this user may not.
    """
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    if not _WITHOUT_FOLDERS.intersection(protocols):
        fs.makedirs(path, exist_ok=True)


def upload(fs: fsspec.AbstractFileSystem, folder: Path, target: str) -> None:
    """Copy the files of a folder of this machine to a path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    copies = [f"{target}/{path.relative_to(folder).as_posix()}" for path in files]
    for parent in {copy.rpartition("/")[0] for copy in copies}:
        make_folder(fs, parent)
    fs.put([str(path) for path in files], copies)  # paths in lists are literal


def remove(fs: fsspec.AbstractFileSystem, path: str) -> None:
    """Remove a file, or a folder with its content.

    Raises:
        FileNotFoundError: if there is none.
    """
    escaped = glob.escape(path)
    if isinstance(fs, AsyncFileSystem) and path != escaped:
        # To match a pattern, an object store would be asked for all neighbors of the folder.
        for file in _files(fs, path):
            fs.rm_file(file)
        return
    fs.rm(path if isinstance(fs, LocalFileSystem) else escaped, recursive=True)


def move(fs: fsspec.AbstractFileSystem, source: str, target: str) -> None:
    """Move a file or a folder to a path where there is none.

    Raises:
        FileNotFoundError: if there is no source.
    """
    if isinstance(fs, LocalFileSystem):
        fs.mv(source, target)
        return
    files = _files(fs, source)
    fs.copy(files, [f"{target}{file[len(source) :]}" for file in files])  # paths in lists are literal
    remove(fs, source)


def download(fs: fsspec.AbstractFileSystem, folder: str, target: Path) -> None:
    """Copy a folder to this machine.

    Raises:
        FileNotFoundError: if there is none.
    """
    files = _files(fs, folder)
    copies = [Path(f"{target}{file[len(folder) :]}") for file in files]
    for copy in copies:
        copy.parent.mkdir(parents=True, exist_ok=True)
    fs.get(files, [str(copy) for copy in copies])


def _files(fs: fsspec.AbstractFileSystem, path: str) -> list[str]:
    """All files in a folder, or the file itself."""
    files = [str(file) for file in fs.find(path)]
    if not files:
        raise FileNotFoundError(path)
    return files
