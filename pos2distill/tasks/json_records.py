"""Records of a JSON file: JSON Lines, or one JSON array. Both are streamed: memory holds one record."""

import functools
import json
import re
from collections.abc import Iterator
from typing import IO, Any

import ijson

from pos2distill.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # UTF-8

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
_CHUNK_BYTES = 64 << 10  # how much of an array is read at a time
_MAX_NESTED = 5_000  # brackets that a chunk opens and does not close; ijson's time is quadratic in the depth
_MAX_DEPTH = 500  # of a record; messages repeat parts of it, which takes a call of a function for each level


class _UnpairedSurrogateError(Exception):
    """The next bytes of the file are an escaped unpaired surrogate."""


class _NestedTooDeeplyError(Exception):
    """The next bytes of the file open more brackets than any record has."""


class _JsonObject(dict[str, Any]):
    """An object of a JSON array, which knows a name that it was given twice; ijson keeps the last value.

    No error is raised at once: in ijson 3.6 it would end as a SystemError.
    """

    repeated: str | None = None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self:
            self.repeated = name
        super().__setitem__(name, value)


def line_records(file: IO[bytes], url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of JSON Lines, each with its location in the file; blank lines are counted and left out."""
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if content.strip():
            location = f"line {number}"
            yield location, _parse_line(content.rstrip(b"\r\n"), f"{url}, {location}")


def array_records(file: IO[bytes], url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON array, each with its location in the file, read one after another."""
    number = 0
    try:
        # ijson asks for its own number of bytes; `from_iter` answers with the next chunk.
        values = ijson.items(ijson.from_iter(_checked_chunks(file)), "item", map_type=_JsonObject, use_float=True)
        for number, value in enumerate(values, start=1):
            location = f"{url}, record {number}"
            _check_array_record(value, location)
            yield f"record {number}", _object(value, location)
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


def _parse_line(line: bytes, location: str) -> dict[str, Any]:
    try:
        # Decoded here, since json.loads would accept raw surrogates in bytes, and other encodings (Python 3.11).
        value = json.loads(line.decode(), object_pairs_hook=functools.partial(_object_of_pairs, location))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{location}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        if error.doc[error.pos : error.pos + 1] == BYTE_ORDER_MARK.decode():
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


def _object_of_pairs(location: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a name that occurs twice, `json` would silently keep the last value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{location}, {twice}: given twice")
    return value


def _object(value: Any, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{location}: expected a JSON object, got {type(value).__name__}")
    return value


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


def _check_array_record(value: Any, location: str) -> None:
    """Reject a name that occurs twice in an object, at any depth, as `_object_of_pairs` does for a line; and nesting.

    Level by level, since Python's own functions do not go as deep as ijson.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for part in level:
            if isinstance(part, _JsonObject):
                if part.repeated is not None:
                    raise UserError(f"{location}, {part.repeated}: given twice")
                below += part.values()
            elif isinstance(part, list):
                below += part
        if not below:
            return
        level = below
    raise UserError(f"{location}: nested too deeply")


def _ijson_reason(error: ijson.JSONError) -> str:
    """The reason in an error of ijson 3.6, whose text is "parse error: premature EOF" and a picture of the position.

    Bytes that are not UTF-8 make it the repr of a bytes object.
    """
    text = str(error).removeprefix("b'").replace("\\n", "\n")
    return text.splitlines()[0].partition(": ")[2].rstrip(".")


def _checked_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """The file in chunks. ijson 3.6 reads an unpaired surrogate as a question mark, so the text is searched before.

    Raises:
        _UnpairedSurrogateError: after all bytes before the surrogate, so that ijson has parsed the records before it.
        _NestedTooDeeplyError: for a chunk that opens thousands of brackets.
    """
    unread = file.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK)
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
