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

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8

# JSON can escape half of a surrogate pair (\ud83d), which is no character and cannot be encoded as UTF-8 later.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HALF_PAIR_MESSAGE = "holds half a surrogate pair (\\ud800 to \\udfff alone), which is no character"
# One escape: a whole pair, half of one (the group), or any other, so that an escaped backslash starts no new escape.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F])|.)",
    re.DOTALL,
)


def read_records(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (position, object) for each record: `line 3` of JSON Lines, blank lines counted, `record 3` of an array.

    Raises:
        UserError: a missing file, broken compression, bytes that are not UTF-8, a record that is not one JSON object.
    """
    position = ""
    try:
        with _one_line_errors(url):
            with fsspec.open(url, "rb", compression="infer") as file:
                is_array = _first_byte(file) == b"["
            with fsspec.open(url, "rb", compression="infer") as file:
                records = _array_records(file, url) if is_array else _line_records(file, url)
                for position, record in records:
                    yield position, record
    except gzip.BadGzipFile as error:
        raise UserError(f"{url}: is no gzip file, whatever its name says ({error}); rename or fetch it again") from None
    except (EOFError, zlib.error) as error:
        where = f"after {position}" if position else "before its first record"
        raise UserError(f"{url}: broken gzip {where} ({error}); fetch the file again") from None


def file_digest(url: str) -> str:
    """SHA-256 of the file's bytes as stored (compressed, if it is). A process reads an unchanged file once."""
    with _one_line_errors(url):
        fs, path = fsspec.url_to_fs(url)
        return _digest(url, fs.ukey(path))


@functools.lru_cache(maxsize=256)
def _digest(url: str, _version: str) -> str:
    """`_version`: the file's size, modification time or similar, so that a changed file is another cache entry."""
    digest = hashlib.sha256()
    with fsspec.open(url, "rb") as data:
        while chunk := data.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _one_line_errors(url: str) -> Iterator[None]:
    """Turns errors of opening and reading a file into one line. Those of decompression are left to the caller."""
    try:
        yield
    except gzip.BadGzipFile:  # an OSError too
        raise
    except FileNotFoundError:
        raise UserError(f"{url}: no such file (data.path){_nearest_file(url)}") from None
    except OSError as error:
        raise UserError(f"{url}: cannot be read ({error.strerror or error})") from None
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
    while chunk := file.read(64):
        content = chunk.lstrip(_BYTE_ORDER_MARK + b" \t\r\n")
        if content:
            return content[:1]
    return b""


def _line_records(file: BinaryIO, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if content.strip():
            position = f"line {number}"
            yield position, _parse_line(content.rstrip(b"\r\n"), f"{url}, {position}")


def _parse_line(line: bytes, location: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{location}: not valid JSON ({error.msg} at column {error.colno}); is the line cut off?"
        ) from None
    record = _object(value, location)
    # The second search, in the parsed text, takes long, so it follows only if the line escapes a surrogate at all.
    if _SURROGATE_ESCAPE.search(line) and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{location}: {_HALF_PAIR_MESSAGE}")
    return record


def _array_records(file: BinaryIO, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        values = ijson.items(_SurrogateCheck(file), "item", use_float=True)
        for number, value in enumerate(values, start=1):
            yield f"record {number}", _object(value, f"{url}, record {number}")
    except _HalfPairError:
        raise UserError(f"{url}, record {number + 1}: {_HALF_PAIR_MESSAGE}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{url}, record {number + 1}: not UTF-8 ({error.reason})") from None
    except ijson.JSONError as error:
        reason = _ijson_reason(error)
        if "UTF8" in reason:
            raise UserError(f"{url}, record {number + 1}: not UTF-8 ({reason})") from None
        raise UserError(f"{url}, record {number + 1}: not valid JSON ({reason}); is the file cut off?") from None


def _ijson_reason(error: ijson.JSONError) -> str:
    """The reason in an error of ijson 3.4, whose text is "parse error: premature EOF" and a picture of the position.

    Bytes that are not UTF-8 make it the repr of a bytes object.
    """
    text = str(error).removeprefix("b'").replace("\\n", "\n")
    return text.splitlines()[0].partition(": ")[2].rstrip(".")


def _object(value: Any, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{location}: expected a JSON object, got {type(value).__name__}")
    return value


class _HalfPairError(Exception):
    """The file continues with an escape that is half a surrogate pair."""


class _SurrogateCheck:
    """A stream of JSON that raises at half a surrogate pair; ijson 3.4 would read it as a question mark.

    Everything before it is returned first, so the record at fault is the one after the last that ijson parsed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.unread = file.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK)
        self.half_pair_follows = False

    def read(self, size: int) -> bytes:
        """Some bytes, or none at the end of the file. Named and called as a file's method, by ijson."""
        if size == 0:  # ijson checks the type of what it will get
            return b""
        if self.half_pair_follows:
            raise _HalfPairError
        data = self._read_whole_escapes(size)
        half = _find_half_pair(data)
        if half is None:
            return data
        self.half_pair_follows = True
        if half == 0:  # an empty result would mean the end of the file
            raise _HalfPairError
        return data[:half]

    def _read_whole_escapes(self, size: int) -> bytes:
        """About `size` bytes, up to a blank or a comma. No escape contains one, so no escape is cut in two."""
        data = self.unread
        while chunk := self.file.read(size):
            data += chunk
            # A chunk without either is kept, and the next one is added to it.
            end = max(data.rfind(b" "), data.rfind(b",")) + 1
            if end:
                self.unread = data[end:]
                return data[:end]
        self.unread = b""
        return data


def _find_half_pair(data: bytes) -> int | None:
    """Where the first half of a surrogate pair is escaped without the other one."""
    if not _SURROGATE_ESCAPE.search(data):
        return None
    for escape in _ESCAPE.finditer(data):
        if escape["half"]:
            return escape.start()
    return None
