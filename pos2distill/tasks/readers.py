"""Records from any fsspec URL: JSON, gzip or plain, and Parquet, with the record at fault in every message.

A JSON file is JSON Lines, or one JSON array (its first byte is `[`); a Parquet file begins with `PAR1`. All are
streamed: memory holds one record, or a batch of rows.
"""

import difflib
import functools
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import fsspec
import ijson
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from pos2distill.config.formats import stem
from pos2distill.errors import UserError, warn_once
from pos2distill.tasks.compressed import DECOMPRESSION_ERRORS, explain_error, open_decompressed
from pos2distill.tasks.parquet_records import parquet_records
from pos2distill.urls import open_url, require_listable, storage_errors, why_not_found

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8
_BLANKS = _BYTE_ORDER_MARK + b" \t\r\n"

# JSON can escape an unpaired surrogate (\ud83d alone), which is not a character and cannot be encoded as UTF-8 later.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNPAIRED_MESSAGE = "contains an unpaired surrogate (\\ud800 to \\udfff alone), which is not a character"
# One escape: a surrogate pair, an unpaired surrogate (the group), or any other. An escaped backslash is matched as a
# whole, so the letters after it are not read as an escape.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<unpaired>u[dD][89a-fA-F])|.)",
    re.DOTALL,
)
_WEB = ("http://", "https://")  # how URLs of web servers begin, which list no files
_PARQUET_MAGIC = b"PAR1"
_JSON_STARTS = (b"{", b"[", b" ", b"\t", b"\r", b"\n")  # what a file of records can begin with
_CHUNK_BYTES = 64 << 10  # of an array, read at a time
_MAX_NESTED = 5_000  # brackets that a chunk opens and does not close; ijson's time is quadratic in the depth

# What files of other kinds begin with, and what to do about it.
_OTHER_KINDS = {
    b"\x1f\x8b": "is gzip data, but its name does not end in .gz; rename it",
    b"BZh": "is bzip2 data, but its name does not end in .bz2; rename it",
    b"\xfd7zXZ\x00": "is xz data, but its name does not end in .xz; rename it",
    b"\x28\xb5\x2f\xfd": "is Zstandard data; decompress it (`zstd -d`)",
    b"PK\x03\x04": "is a zip archive; extract the file with the records",
    b"ARROW1": "is an Arrow file; write its records as JSON Lines or Parquet",
    b"\xff\xfe\0\0": "is UTF-32; save it as UTF-8",
    b"\0\0\xfe\xff": "is UTF-32; save it as UTF-8",
    b"\xff\xfe": "is UTF-16; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
    b"version https://git-lfs": "is a git-lfs pointer, not the data; run `git lfs pull` in its folder",
    b"<!DOCTYPE": "is a web page; download the file itself",
    b"<!doctype": "is a web page; download the file itself",
    b"<html": "is a web page; download the file itself",
    b"%PDF": "is a PDF file; expected JSON Lines",
}


def read_records(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) for each record: `line 3` of JSON Lines, blank lines counted, `record 3` of an array,
    `row 3` of Parquet, where a null field counts as missing; for several files `a.parquet, row 3`, without the folders
    that they have in common.

    Args:
        url: URL of a file, or with `*` the pattern of several, which are read in the order of their names.
    Raises:
        UserError: a missing file, broken compression, bytes that are not UTF-8, a record that is not one JSON object.
    """
    files = data_files(url)
    common = _common_folders(files)
    for file in files:
        name = "" if file == url else f"{'/'.join(file.split('/')[common:])}, "
        for location, record in _file_records(file):
            yield f"{name}{location}", record


def _common_folders(files: Sequence[str]) -> int:
    """The number of leading folders that all paths have in common."""
    first, *others = [file.split("/")[:-1] for file in files]
    for index, folder in enumerate(first):
        for folders in others:
            if index == len(folders) or folders[index] != folder:
                return index
    return len(first)


def _file_records(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    location = ""
    with _one_line_errors(url):
        try:
            with open_decompressed(url) as file:
                start = file.read(64)
                _check_kind(start, url)
                # Not by going back to the start, which streams over HTTP cannot.
                first = start.lstrip(_BLANKS)[:1] or _first_byte(file)
                is_array = first == b"["
            if start.startswith(_PARQUET_MAGIC):
                if infer_compression(url):
                    raise UserError(f"{url}: is a Parquet file in a compressed one; decompress it (data.path)")
                yield from parquet_records(url)
                return
            with open_decompressed(url) as file:
                records = array_records(file, url) if is_array else _line_records(file, url)
                for location, record in records:
                    yield location, record
        except DECOMPRESSION_ERRORS as error:
            message = explain_error(error, url, location)
            if message is None:
                raise
            raise UserError(message) from None


def file_digest(url: str) -> str:
    """SHA-256 of the file's bytes as stored (compressed, if it is); of several files, of their digests in order.

    A process reads an unchanged file once.
    """
    digests = []
    for file in data_files(url):
        with _one_line_errors(file):
            fs, path = open_url(file, "data.path")
            digests.append(_digest(file, fs.ukey(path)))
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def data_bytes(url: str) -> int:
    """The size of the file, or of all files that a pattern matches."""
    total = 0
    for file in data_files(url):
        with _one_line_errors(file):
            fs, path = open_url(file, "data.path")
            total += fs.size(path)
    return total


def data_files(url: str) -> list[str]:
    """The file itself, or those that a pattern matches, such as `folder/*.parquet`. Only `*` matches others.

    As in a shell, hidden names are matched only by a pattern that has their dot, and links to files are followed, and
    to folders by `*`, but not by `**`.
    """
    if "*" not in url or url.startswith(_WEB):
        return [url]
    with _one_line_errors(url):
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


def _warn_of_unreadable_folders(pattern: str) -> None:
    """Name folders that a pattern without `**` matches, and whose files are left out because they may not be read."""
    parent = os.path.dirname(pattern)
    while "*" in parent:
        for folder in filter(os.path.isdir, glob.glob(parent)):
            if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
                warn_once(f"{folder}: may not be read, so its files are left out (data.path)")
        parent = os.path.dirname(parent)


def _files_behind_links(pattern: str) -> list[str]:
    """The paths of the files of this machine that a pattern without `**` matches, sorted."""
    return sorted(path for path in glob.glob(pattern) if not os.path.isdir(path))


def _visible_files(fs: fsspec.AbstractFileSystem, pattern: str) -> list[str]:
    """The paths of the files that a pattern matches, sorted."""
    found = fs.glob(pattern, detail=True)
    files = [path for path, info in found.items() if info["type"] == "file" or not fs.isdir(path)]
    # `*` of fsspec matches hidden names too, such as those of macOS (`._questions.jsonl`).
    return sorted(path for path in files if path.count("/.") == pattern.count("/."))


@functools.lru_cache(maxsize=256)
def _digest(url: str, _version: str) -> str:
    """`_version`: the file's size, modification time or similar, so that a changed file is another cache entry."""
    with fsspec.open(url, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _one_line_errors(url: str) -> Iterator[None]:
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
    if url.startswith(_WEB):
        return ""
    try:
        fs, path = fsspec.url_to_fs(url)
        entries = fs.ls(fs._parent(path), detail=True)
    except (OSError, ValueError):  # ValueError: for a text that is not a URL
        return ""
    names = sorted(entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] != "directory")
    shown = [name for name in names if not name.startswith(".")]
    nearest = _most_similar(path.rsplit("/", 1)[-1], shown)
    return f"; did you mean '{nearest}'?" if nearest else ""


def _most_similar(wanted: str, names: Sequence[str]) -> str | None:
    """The other name of a file of records that is most similar, if one is.

    Names are compared without the endings of files of records, which are often equal (`nq.jsonl.gz`: `nq`); the whole
    names decide between files that differ in nothing else.
    """
    stems = {name: stem(name) for name in names if name != wanted and stem(name) != name.lower()}
    # The second: without everything behind the first dot, as the ending may be misspelt.
    for text in (stem(wanted), wanted.lower().partition(".")[0]):
        near = difflib.get_close_matches(text, stems.values(), n=1)
        if near:
            alike = [name for name, compared in stems.items() if compared == near[0]]
            return difflib.get_close_matches(wanted, alike, n=1, cutoff=0.0)[0]
    return None


def _check_kind(start: bytes, url: str) -> None:
    if url.lower().endswith((".xlsx", ".ods")):  # zip archives themselves
        raise UserError(f"{url}: is a spreadsheet; write its records as JSON Lines or Parquet (data.path)")
    for magic, meaning in _OTHER_KINDS.items():
        if start.startswith(magic):
            raise UserError(f"{url}: {meaning} (data.path)")
    # Without a byte-order mark: JSON begins with a character of ASCII, and so does what follows it.
    encoding = {2: "UTF-16", 3: "UTF-32"}.get(start[:4].count(0))
    if encoding and start.lstrip(b"\0").startswith(_JSON_STARTS):
        raise UserError(f"{url}: is {encoding}; save it as UTF-8 (data.path)")


def _first_byte(file: IO[bytes]) -> bytes:
    """The first byte that is not blank, or nothing."""
    byte = file.read(1)
    while byte and byte in _BLANKS:
        byte = file.read(1)
    return byte


def _line_records(file: IO[bytes], url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if content.strip():
            location = f"line {number}"
            yield location, _parse_line(content.rstrip(b"\r\n"), f"{url}, {location}")


def _parse_line(line: bytes, location: str) -> dict[str, Any]:
    try:
        # Decoded here, since json.loads would accept raw surrogates in bytes, and other encodings (Python 3.11).
        value = json.loads(line.decode(), object_pairs_hook=functools.partial(_object_of_pairs, location))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{location}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        if error.doc[error.pos : error.pos + 1] == _BYTE_ORDER_MARK.decode():
            raise UserError(f"{location}: a byte-order mark at column {error.colno}; remove it") from None
        hint = _how_to_correct(error)
        raise UserError(f"{location}: not valid JSON ({error.msg} at column {error.colno}){hint}") from None
    except RecursionError:
        raise UserError(f"{location}: nested too deeply") from None
    except ValueError:  # Python reads no number of more than 4,300 digits
        raise UserError(f"{location}: holds a number with too many digits") from None
    record = _object(value, location)
    # The second search, in the parsed text, takes long, so it follows only if the line escapes a surrogate at all.
    if _SURROGATE_ESCAPE.search(line) and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{location}: {_UNPAIRED_MESSAGE}")
    return record


def _how_to_correct(error: json.JSONDecodeError) -> str:
    """A hint, to append to the error of a line, by where the error is."""
    text = error.doc.strip()
    if not text.startswith("{"):
        is_table = text[:1] not in tuple("[#<") and ("," in text or "\t" in text)
        kind = "; if it is a CSV file, write its records as JSON Lines" if is_table else ""
        return f"; expected one JSON object in each line{kind}"
    if text == "{":
        return "; write each record on one line"
    if error.doc[error.pos : error.pos + 1] == "'":
        return "; JSON has double quotes, not single ones (in Python, write records with json.dumps)"
    if error.doc[: error.pos].rstrip().endswith(",") and error.doc[error.pos : error.pos + 1] in ("}", "]"):
        return "; remove the comma before the closing bracket"
    if error.msg == "Extra data":
        is_comma = error.doc[error.pos :].strip() == ","
        return "; remove the comma after the record" if is_comma else "; expected one JSON object in each line"
    is_cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    return "; is the line cut off?" if is_cut else ""


def _object_of_pairs(location: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a name that occurs twice, `json` would silently keep the last value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{location}, {twice}: given twice")
    return value


def array_records(file: IO[bytes], url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON array, each with its location in the file, read one after another."""
    number = 0
    try:
        # ijson asks for its own number of bytes; `from_iter` answers with the next chunk.
        values = ijson.items(ijson.from_iter(_checked_chunks(file)), "item", use_float=True)
        for number, value in enumerate(values, start=1):
            yield f"record {number}", _object(value, f"{url}, record {number}")
    except _UnpairedSurrogateError:
        raise UserError(f"{url}, record {number + 1}: {_UNPAIRED_MESSAGE}") from None
    except _NestedTooDeeplyError:
        raise UserError(f"{url}, record {number + 1}: nested too deeply") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{url}, record {number + 1}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except ijson.JSONError as error:
        reason = _ijson_reason(error)
        if "UTF8" in reason:
            raise UserError(f"{url}, record {number + 1}: not UTF-8 ({reason}); save the file as UTF-8") from None
        hint = "; is the file cut off?" if reason == "premature EOF" else ""
        raise UserError(f"{url}, record {number + 1}: not valid JSON ({reason}){hint}") from None


def _ijson_reason(error: ijson.JSONError) -> str:
    """The reason in an error of ijson 3.6, whose text is "parse error: premature EOF" and a picture of the position.

    Bytes that are not UTF-8 make it the repr of a bytes object.
    """
    text = str(error).removeprefix("b'").replace("\\n", "\n")
    return text.splitlines()[0].partition(": ")[2].rstrip(".")


def _object(value: Any, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{location}: expected a JSON object, got {type(value).__name__}")
    return value


class _UnpairedSurrogateError(Exception):
    """The next bytes of the file are an escaped unpaired surrogate."""


class _NestedTooDeeplyError(Exception):
    """The next bytes of the file open more brackets than any record has."""


def _checked_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """The file in chunks. ijson 3.6 reads an unpaired surrogate as a question mark, so the text is searched before.

    Raises:
        _UnpairedSurrogateError: after all bytes before the surrogate, so that ijson has parsed the records before it.
        _NestedTooDeeplyError: for a chunk that opens thousands of brackets.
    """
    unread = file.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK)
    at_end = False
    while not at_end:
        chunk = file.read(_CHUNK_BYTES)
        at_end = not chunk
        if chunk.count(b"[") - chunk.count(b"]") > _MAX_NESTED or chunk.count(b"{") - chunk.count(b"}") > _MAX_NESTED:
            raise _NestedTooDeeplyError
        unread += chunk
        # No escape contains a blank or a comma, so a cut behind one divides no escape.
        end = len(unread) if at_end else max(unread.rfind(b" "), unread.rfind(b",")) + 1
        unpaired = _find_unpaired_surrogate(unread[:end])
        complete = unread[:end] if unpaired is None else unread[:unpaired]
        # To ijson, an empty chunk is the end of the file.
        if complete:
            yield complete
        if unpaired is not None:
            raise _UnpairedSurrogateError
        unread = unread[end:]


def _find_unpaired_surrogate(data: bytes) -> int | None:
    """Where the first unpaired surrogate is escaped."""
    if not _SURROGATE_ESCAPE.search(data):
        return None
    for escape in _ESCAPE.finditer(data):
        if escape["unpaired"]:
            return escape.start()
    return None
