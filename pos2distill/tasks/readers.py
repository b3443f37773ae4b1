"""Lines of JSON from any fsspec URL, gzip or plain, with the line at fault in every message."""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from pos2distill.errors import UserError, did_you_mean

# JSON can escape half a character, which no encoder takes; looked for only in lines that escape a surrogate at all.
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF_PAIR_TEXT = re.compile("[\ud800-\udfff]")


def read_jsonl(url: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line that is not blank.

    Raises:
        UserError: a missing file, broken compression, bytes that are not UTF-8, a line that is not one JSON object.
    """
    number = 0
    try:
        with _reading(url), fsspec.open(url, "rb", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _object(line.rstrip(b"\r\n"), f"{url}, line {number}")
    except gzip.BadGzipFile as error:
        raise UserError(f"{url}: is no gzip file, whatever its name says ({error}); rename or fetch it again") from None
    except (EOFError, zlib.error) as error:
        raise UserError(f"{url}: broken gzip after line {number} ({error}); fetch the file again") from None


def file_digest(url: str) -> str:
    """SHA-256 of the file's bytes as stored (compressed, if it is)."""
    digest = hashlib.sha256()
    with _reading(url), fsspec.open(url, "rb") as data:
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


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); is the line cut off?"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(value).__name__}")
    if _HALF_PAIR.search(line) and _HALF_PAIR_TEXT.search(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{where}: holds half a surrogate pair (\\ud800 to \\udfff alone), which is no character")
    return value


def _nearest_file(url: str) -> str:
    try:
        fs, path = fsspec.url_to_fs(url)
        names = [str(entry).rsplit("/", 1)[-1] for entry in fs.ls(fs._parent(path), detail=False)]
    except OSError:
        return ""
    hint = did_you_mean(path.rsplit("/", 1)[-1], names)
    return hint if "did you mean" in hint else ""
