"""Files and folders by their names: fsspec 2026.9 takes `[`, `*` and `?` anywhere in a path for a pattern."""

import contextlib
import glob
import os
import re
from pathlib import Path, PurePosixPath

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem


def list_matching(fs: fsspec.AbstractFileSystem, folder: str, pattern: str, *, with_folders: bool = False) -> list[str]:
    """The files in a folder whose names match, sorted; those that other processes wrote too. Empty without it.

    Args:
        folder: the folder, read literally.
        pattern: pattern of paths in it, such as `part-*.parquet` or `*/manifest.json`; each name is one of `fnmatch`.
        with_folders: list folders that match too.
    Raises:
        OSError: if the folder cannot be listed. Of the folders in it, which a pattern with `/` needs, those that cannot
            be listed are left out: other processes may remove them meanwhile.
    """
    fs.invalidate_cache(folder)
    options = {}
    stem = re.split(r"[*?\[/]", pattern, maxsplit=1)[0]
    if stem and isinstance(fs, AsyncFileSystem):
        options["prefix"] = stem  # so that an object store lists no others; `glob` of fsspec passes it too
    depth = pattern.count("/") + 1
    start = len(folder.rstrip("/")) + 1
    matching = []
    if depth == 1 and not options:
        paths = _content(fs, folder, with_folders=with_folders)
    else:
        require_listable(fs, folder)
        paths = fs.find(folder, maxdepth=depth, withdirs=with_folders, **options)
    for path in paths:
        name = PurePosixPath(path[start:])
        if len(name.parts) == depth and name.match(pattern):
            matching.append(str(path))
    return sorted(matching)


def _content(fs: fsspec.AbstractFileSystem, folder: str, *, with_folders: bool) -> list[str]:
    """The paths in a folder. Not by `find`, which shows one that it cannot list as an empty one (fsspec 2026.9)."""
    try:
        entries = fs.ls(folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [entry["name"] for entry in entries if with_folders or entry["type"] != "directory"]


def require_listable(fs: fsspec.AbstractFileSystem, folder: str) -> None:
    """Reject a folder of this machine that cannot be listed: fsspec 2026.9 shows it as an empty one.

    Raises:
        OSError: for `urls.storage_errors`. None if there is no such folder.
    """
    if isinstance(fs, LocalFileSystem):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(folder)


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
