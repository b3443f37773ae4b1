"""Rows of JSON from any fsspec URL, gzip or plain, with the row at fault in every message.

A file is JSON Lines, or one JSON array (its first byte is `[`), which is streamed: memory holds one row, not the file.
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

# JSON can escape half a character, which no encoder takes; looked for only in lines that escape a surrogate at all.
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF_PAIR_TEXT = re.compile("[\ud800-\udfff]")
_HALF_PAIR_TOLD = "holds half a surrogate pair (\\ud800 to \\udfff alone), which is no character"
# A whole pair, or half of one (named), or any other escape.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F])|.)",
    re.DOTALL,
)
_MARK = b"\xef\xbb\xbf"  # of UTF-8; no content


def read_rows(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) for each row: `line 3` of JSON Lines, blank lines counted, or `row 3` of an array.

    Raises:
        UserError: a missing file, broken compression, bytes that are not UTF-8, a row that is not one JSON object.
    """
    place = ""
    try:
        with _reading(url):
            with fsspec.open(url, "rb", compression="infer") as file:
                rows = _array_rows if _first_byte(file) == b"[" else _line_rows
            with fsspec.open(url, "rb", compression="infer") as file:
                for place, row in rows(file, url):
                    yield place, row
    except gzip.BadGzipFile as error:
        raise UserError(f"{url}: is no gzip file, whatever its name says ({error}); rename or fetch it again") from None
    except (EOFError, zlib.error) as error:
        told = f"after {place}" if place else "before its first row"
        raise UserError(f"{url}: broken gzip {told} ({error}); fetch the file again") from None


def file_digest(url: str) -> str:
    """SHA-256 of the file's bytes as stored (compressed, if it is). A process reads an unchanged file once."""
    with _reading(url):
        fs, path = fsspec.url_to_fs(url)
        return _digest(url, fs.ukey(path))


@functools.lru_cache(maxsize=256)
def _digest(url: str, _version: str) -> str:
    """`_version`: what the file system says of the file (size, time of change, …)."""
    digest = hashlib.sha256()
    with fsspec.open(url, "rb") as data:
        while chunk := data.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Tells in one line why a file cannot be opened or read; broken compression is left to who decompresses."""
    try:
        yield
    except gzip.BadGzipFile:
        raise
    except FileNotFoundError:
        raise UserError(f"{url}: no such file (data.path){_nearest_file(url)}") from None
    except OSError as error:
        raise UserError(f"{url}: cannot be read ({error.strerror or error})") from None
    except (ValueError, ImportError) as error:  # fsspec: an unknown protocol, or one whose package is not installed
        raise UserError(f"{url}: cannot be opened ({error})") from None


def _first_byte(file: BinaryIO) -> bytes:
    """The first byte that is not blank, or nothing."""
    while chunk := file.read(64):
        if content := chunk.lstrip(_MARK + b" \t\r\n"):
            return content[:1]
    return b""


def _line_rows(file: BinaryIO, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(_MARK) if number == 1 else line
        if content.strip():
            place = f"line {number}"
            yield place, _parse_line(content.rstrip(b"\r\n"), f"{url}, {place}")


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); is the line cut off?"
        ) from None
    row = _object(value, where)
    if _HALF_PAIR.search(line) and _HALF_PAIR_TEXT.search(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{where}: {_HALF_PAIR_TOLD}")
    return row


def _array_rows(file: BinaryIO, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        values = ijson.items(_WholeCharacters(file), "item", use_float=True)
        for number, value in enumerate(values, start=1):
            yield f"row {number}", _object(value, f"{url}, row {number}")
    except _HalfPairError:
        raise UserError(f"{url}, row {number + 1}: {_HALF_PAIR_TOLD}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{url}, row {number + 1}: not UTF-8 ({error.reason})") from None
    except ijson.JSONError as error:
        # "parse error: premature EOF", then two lines that point at the place. Bytes that are no text come as b'…'.
        told = str(error).removeprefix("b'").replace("\\n", "\n").splitlines()[0].partition(": ")[2]
        if "UTF8" in told:
            raise UserError(f"{url}, row {number + 1}: not UTF-8 ({told.rstrip('.')})") from None
        raise UserError(f"{url}, row {number + 1}: not valid JSON ({told.rstrip('.')}); is the file cut off?") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


class _HalfPairError(Exception):
    """The file goes on with an escape that is half a character."""


class _WholeCharacters:
    """A stream of JSON that raises where half a surrogate pair begins; ijson would make a question mark of it.

    All that stands before is handed out first, so that the row at fault is the one after the last that was parsed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.rest = file.read(len(_MARK)).removeprefix(_MARK)
        self.at_half = False

    def read(self, size: int) -> bytes:
        """Some bytes, or none at the end of the file."""
        if not size:  # ijson asks for none to see that bytes would come
            return b""
        if self.at_half:
            raise _HalfPairError
        data, cut = self.rest, 0
        while not cut and (chunk := self.file.read(size)):
            data += chunk
            # No escape holds a blank or a comma, so none is cut in two.
            cut = max(data.rfind(b" "), data.rfind(b",")) + 1
        data, self.rest = data[: cut or None], data[cut:] if cut else b""
        half = _find_half_pair(data)
        if half is None:
            return data
        self.at_half = True
        return data[:half] or self.read(size)


def _find_half_pair(data: bytes) -> int | None:
    if not _HALF_PAIR.search(data):
        return None
    return next((escape.start() for escape in _ESCAPE.finditer(data) if escape["half"]), None)


def _nearest_file(url: str) -> str:
    try:
        fs, path = fsspec.url_to_fs(url)
        names = [str(entry).rsplit("/", 1)[-1] for entry in fs.ls(fs._parent(path), detail=False)]
    except OSError:
        return ""
    hint = did_you_mean(path.rsplit("/", 1)[-1], names)
    return hint if "did you mean" in hint else ""
