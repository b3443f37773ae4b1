"""The files that `data.path` names: one, or those that a pattern matches, their size and their digest."""

import difflib
import functools
import glob
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pos2distill.config.formats import stem
from pos2distill.errors import UserError, warn_once
from pos2distill.literal_paths import last_part, require_listable
from pos2distill.urls import open_url, storage_errors, why_not_found

_WEB_PROTOCOLS = ("http://", "https://")  # web servers, which list no files


def data_files(url: str) -> list[str]:
    """The file itself, or those that a pattern matches, such as `folder/*.parquet`. Only `*` matches others.

    As in a shell, hidden names are matched only by a pattern that has their dot, and links to files are followed, and
    to folders by `*`, but not by `**`.
    """
    if "*" not in url or url.startswith(_WEB_PROTOCOLS):
        return [url]
    with one_line_errors(url):
        fs, path = open_url(url, "data.path")
        pattern = re.sub(r"[\[?]", r"[\g<0>]", path)
        require_listable(fs, path.partition("*")[0].rpartition("/")[0] or "/")
        if not isinstance(fs, LocalFileSystem):
            found = [fs.unstrip_protocol(each) for each in _visible_files(fs, pattern)]
        elif os.path.exists(path):
            found = [url]
        elif "**" in pattern:
            # As in bash, `**` follows no links to folders, which may form circles. No function of fsspec 2026.9 does.
            found = _visible_files(fs, pattern)
        else:
            found = _files_behind_links(pattern)
            _warn_of_unreadable_folders(pattern)
    if not found:
        raise UserError(f"{url}: matches no file (data.path)")
    return found


def data_bytes(url: str) -> int:
    """The size of the file, or of all files that a pattern matches."""
    total = 0
    for file in data_files(url):
        with one_line_errors(file):
            fs, path = open_url(file, "data.path")
            total += fs.size(path)
    return total


def file_digest(url: str) -> str:
    """SHA-256 of the file's bytes as stored (compressed, if it is); of several files, of their digests in order.

    A process reads an unchanged file once.
    """
    digests = []
    for file in data_files(url):
        with one_line_errors(file):
            fs, path = open_url(file, "data.path")
            digests.append(_digest(file, fs.ukey(path)))
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def _digest(url: str, _version: str) -> str:
    """`_version`: the file's size, modification time or similar, so that a changed file is another cache entry."""
    with fsspec.open(url, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _visible_files(fs: fsspec.AbstractFileSystem, pattern: str) -> list[str]:
    """The paths of the files that a pattern matches, sorted."""
    found = fs.glob(pattern, detail=True)
    files = [path for path, info in found.items() if info["type"] == "file" or not fs.isdir(path)]
    # `*` of fsspec matches hidden names too, such as those of macOS (`._questions.jsonl`).
    return sorted(path for path in files if path.count("/.") == pattern.count("/."))


def _files_behind_links(pattern: str) -> list[str]:
    """The paths of the files of this machine that a pattern without `**` matches, sorted."""
    return sorted(path for path in glob.glob(pattern) if not os.path.isdir(path))


def _warn_of_unreadable_folders(pattern: str) -> None:
    """Name folders that a pattern without `**` matches, and whose files are left out because they may not be read."""
    parent = os.path.dirname(pattern)
    while "*" in parent:
        for folder in filter(os.path.isdir, glob.glob(parent)):
            if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
                warn_once(f"{folder}: may not be read, so its files are left out (data.path)")
        parent = os.path.dirname(parent)


@contextmanager
def one_line_errors(url: str) -> Iterator[None]:
    """Turns errors of opening and reading a file into one line. Those of decompression are left to the body."""
    with storage_errors(url, "data.path"):
        try:
            yield
        except FileNotFoundError as error:
            if why_not_found(error):
                raise
            if error.filename and os.path.islink(error.filename):
                target = os.path.realpath(error.filename)
                raise UserError(f"{url}: is a link to '{target}', which is missing (data.path)") from None
            raise UserError(f"{url}: no such file (data.path){_nearest_file(url)}") from None
        except (ValueError, ImportError) as error:  # fsspec: an unknown protocol, or one whose package is not installed
            raise UserError(f"{url}: cannot be opened ({error})") from None


def _nearest_file(url: str) -> str:
    """A hint with the file of records in the same folder whose name is most similar."""
    if url.startswith(_WEB_PROTOCOLS):
        return ""
    try:
        fs, path = fsspec.url_to_fs(url)
        entries = fs.ls(fs._parent(path), detail=True)
    except (OSError, ValueError):  # ValueError: for a text that is not a URL
        return ""
    names = sorted(last_part(entry["name"]) for entry in entries if entry["type"] != "directory")
    shown = [name for name in names if not name.startswith(".")]
    nearest = _most_similar(last_part(path), shown)
    return f"; did you mean '{nearest}'?" if nearest else ""


def _most_similar(wanted: str, names: Sequence[str]) -> str | None:
    """The other name of a file of records that is most similar, if one is.

    Names are compared without the endings of files of records, which are often equal (`nq.jsonl.gz`: `nq`); the whole
    names decide between files that differ in nothing else.
    """
    stems = {name: stem(name) for name in names if name != wanted and stem(name) != name.lower()}
    # The second: without everything behind the first dot, as the ending may be misspelled.
    for text in (stem(wanted), wanted.lower().partition(".")[0]):
        near = difflib.get_close_matches(text, stems.values(), n=1)
        if near:
            alike = [name for name, compared in stems.items() if compared == near[0]]
            return difflib.get_close_matches(wanted, alike, n=1, cutoff=0.0)[0]
    return None
