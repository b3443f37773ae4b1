"""JSON records from any fsspec URL, gzip or plain, with the record at fault in every message.

A file is JSON Lines, or one JSON array (its first byte is `[`). Both are streamed: memory holds one record.
"""

import functools
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import fsspec
import ijson

from pos2distill.errors import UserError, did_you_mean
from pos2distill.urls import storage_errors

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8

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
_CHUNK_BYTES = 64 << 10  # of an array, read at a time


def read_records(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) for each record: `line 3` of JSON Lines, blank lines counted, `record 3` of an array.

    Raises:
        UserError: a missing file, broken compression, bytes that are not UTF-8, a record that is not one JSON object.
    """
    location = ""
    with _one_line_errors(url):
        try:
            with fsspec.open(url, "rb", compression="infer") as file:
                is_array = _first_byte(file) == b"["
            with fsspec.open(url, "rb", compression="infer") as file:
                records = _array_records(file, url) if is_array else _line_records(file, url)
                for location, record in records:
                    yield location, record
        except gzip.BadGzipFile as error:
            raise UserError(f"{url}: is not a gzip file despite its name ({error}); rename or fetch it again") from None
        except (EOFError, zlib.error) as error:
            where = f"after {location}" if location else "before its first record"
            raise UserError(f"{url}: broken gzip {where} ({error}); fetch the file again") from None


def file_digest(url: str) -> str:
    """SHA-256 of the file's bytes as stored (compressed, if it is). A process reads an unchanged file once."""
    with _one_line_errors(url):
        fs, path = fsspec.url_to_fs(url)
        return _digest(url, fs.ukey(path))


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
        except FileNotFoundError:
            raise UserError(f"{url}: no such file (data.path){_nearest_file(url)}") from None
        except (ValueError, ImportError) as error:  # fsspec: an unknown protocol, or one whose package is not installed
            raise UserError(f"{url}: cannot be opened ({error})") from None


def _nearest_file(url: str) -> str:
    """A hint with the file in the same folder whose name is most similar."""
    try:
        fs, path = fsspec.url_to_fs(url)
        names = [str(entry).rsplit("/", 1)[-1] for entry in fs.ls(fs._parent(path), detail=False)]
    except OSError:
        return ""
    hint = did_you_mean(path.rsplit("/", 1)[-1], names)
    return hint if "did you mean" in hint else ""


def _first_byte(file: BinaryIO) -> bytes:
    """The first byte that is not blank, or nothing."""
    blanks = _BYTE_ORDER_MARK + b" \t\r\n"
    byte = file.read(1)
    while byte and byte in blanks:
        byte = file.read(1)
    return byte


def _line_records(file: BinaryIO, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if content.strip():
            location = f"line {number}"
            yield location, _parse_line(content.rstrip(b"\r\n"), f"{url}, {location}")


def _parse_line(line: bytes, location: str) -> dict[str, Any]:
    try:
        # Decoded here, since json.loads would accept raw surrogates in bytes, and other encodings (Python 3.11).
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{location}: not valid JSON ({error.msg} at column {error.colno}); is the line cut off?"
        ) from None
    record = _object(value, location)
    # The second search, in the parsed text, takes long, so it follows only if the line escapes a surrogate at all.
    if _SURROGATE_ESCAPE.search(line) and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{location}: {_UNPAIRED_MESSAGE}")
    return record


def _array_records(file: BinaryIO, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        # ijson asks for its own number of bytes; `from_iter` answers with the next chunk.
        values = ijson.items(ijson.from_iter(_checked_chunks(file)), "item", use_float=True)
        for number, value in enumerate(values, start=1):
            yield f"record {number}", _object(value, f"{url}, record {number}")
    except _UnpairedSurrogateError:
        raise UserError(f"{url}, record {number + 1}: {_UNPAIRED_MESSAGE}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{url}, record {number + 1}: not UTF-8 ({error.reason})") from None
    except ijson.JSONError as error:
        reason = _ijson_reason(error)
        if "UTF8" in reason:
            raise UserError(f"{url}, record {number + 1}: not UTF-8 ({reason})") from None
        raise UserError(f"{url}, record {number + 1}: not valid JSON ({reason}); is the file cut off?") from None


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


def _checked_chunks(file: BinaryIO) -> Iterator[bytes]:
    """The file in chunks. ijson 3.6 reads an unpaired surrogate as a question mark, so the text is searched before.

    Raises:
        _UnpairedSurrogateError: after all bytes before the surrogate, so that ijson has parsed the records before it.
    """
    unread = file.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK)
    at_end = False
    while not at_end:
        chunk = file.read(_CHUNK_BYTES)
        at_end = not chunk
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
