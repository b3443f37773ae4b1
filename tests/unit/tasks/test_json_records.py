import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.errors import UserError
from pos2distill.tasks.json_records import array_records
from pos2distill.tasks.readers import read_records

RECORD = {"question": "Größe 😀?", "answers": ["42"], "score": 1.5, "count": 3}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False)
    # Characters beyond 16 bits are escaped as pairs; backslashes and commas are what chunks are cut by.
    | st.text(st.sampled_from('\\"u,d8 é😀\n'), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


class Dribble(io.BytesIO):
    """Gives at most three bytes at a time."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(3 if size is None or size < 0 or size > 3 else size)


@given(st.lists(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), values, max_size=3)), st.booleans())
def test_array_records_equal_json_however_the_file_is_cut_into_chunks(records: list[Any], ascii_only: bool) -> None:
    text = json.dumps(records, ensure_ascii=ascii_only).encode()
    found = list(array_records(Dribble(text), "file"))
    assert found == [(f"record {number}", record) for number, record in enumerate(records, start=1)]
    assert [json.dumps(record) for _, record in found] == [json.dumps(record) for record in records]  # 1 is not 1.0


def test_read_records_of_an_array_needs_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(json.dumps([{"text": "x " * 2000}] * 2000).encode())  # 8 MB
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_records(str(path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 2000
    assert peak < 1 << 20


UNPAIRED = "contains an unpaired surrogate (\\ud800 to \\udfff alone), which is not a character"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "wh', "not valid JSON (Unterminated string starting at at column 14); is the line cut off?"),
        (
            b"{'question': 'who'}",
            "not valid JSON (Expecting property name enclosed in double quotes at column 2); JSON has double quotes, "
            "not single ones (in Python, write records with json.dumps)",
        ),
        (
            b'{"question": "who",}',
            "not valid JSON (Expecting property name enclosed in double quotes at column 20); remove the comma before "
            "the closing bracket",
        ),
        (b'{"a": {"b": 1}', "not valid JSON (Expecting ',' delimiter at column 15); is the line cut off?"),
        (
            b"{",
            "not valid JSON (Expecting property name enclosed in double quotes at column 2); write each record on "
            "one line",
        ),
        (b'{"a": 1},', "not valid JSON (Extra data at column 9); remove the comma after the record"),
        (b'{"a": 1} // b', "not valid JSON (Extra data at column 10); expected one JSON object in each line"),
        (b"# a, b", "not valid JSON (Expecting value at column 1); expected one JSON object in each line"),
        (b'{"question": who}', "not valid JSON (Expecting value at column 14)"),
        (b"who", "not valid JSON (Expecting value at column 1); expected one JSON object in each line"),
        (
            b"who,me",
            "not valid JSON (Expecting value at column 1); expected one JSON object in each line; if it is a CSV file, "
            "write its records as JSON Lines",
        ),
        (
            b'"question","answer"',
            "not valid JSON (Extra data at column 11); expected one JSON object in each line; if it is a CSV file, "
            "write its records as JSON Lines",
        ),
        (b'"a, b"', "expected a JSON object, got str"),
        (b'{"question": "\xff"}', "not UTF-8 (invalid start byte at byte 14); save the file as UTF-8"),
        (  # a raw surrogate
            b'{"question": "\xed\xa0\x80"}',
            "not UTF-8 (invalid continuation byte at byte 14); save the file as UTF-8",
        ),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
        (
            b'{"a": "\\ud83d!"}',
            UNPAIRED,
        ),
    ],
)
def test_read_records_rejects_a_line_that_is_no_object(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(RECORD).encode() + b"\n" + line)
    with pytest.raises(UserError) as caught:
        list(read_records(str(path)))
    assert str(caught.value) == f"{path}, line 2: {message}"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (b', {"a": "wh', "not valid JSON (premature EOF); is the file cut off?"),
        (b"", "not valid JSON (premature EOF); is the file cut off?"),
        (b', {"a": nope}]', "not valid JSON (invalid string in json text)"),
        (b', {"a": NaN}]', "not valid JSON (invalid char in json text)"),
        (b', {"a": "x\ny"}]', "not valid JSON (invalid character inside string)"),
        (b' {"a": 1}]', "not valid JSON (after array element, I expect ',' or ']')"),
        (b'] {"a": 1}', "not valid JSON (trailing garbage)"),
        (b', {"a": "\xff"}]', "not UTF-8 (invalid bytes in UTF8 string); save the file as UTF-8"),
        (
            b', {"a": "\xed\xa0\xbd"}]',
            "not UTF-8 (invalid continuation byte); save the file as UTF-8",
        ),  # an unpaired surrogate, encoded nevertheless
        (b", [1, 2]]", "expected a JSON object, got list"),
        (b", null]", "expected a JSON object, got NoneType"),
        (b', "text"]', "expected a JSON object, got str"),
        (b', {"a": "\\ud83d!"}]', UNPAIRED),
        (b', {"a": "\\ud83d\\u0041"}]', UNPAIRED),
        (b', {"a": "\\uDE00"}]', UNPAIRED),
        (b', {"a": "\\ud83d\\ude00\\ude00"}]', UNPAIRED),
        (b', {"\\\\\\ud83d": 1}]', UNPAIRED),
    ],
)
def test_read_records_rejects_an_element_that_is_no_object(tmp_path: Path, rest: bytes, message: str) -> None:
    """The records before it are read, and the message names the one at fault."""
    path = tmp_path / "data.json"
    path.write_bytes(b"[" + json.dumps(RECORD).encode() + b', {"b": "\\\\ud83d"}' + rest)
    records = read_records(str(path))
    assert [next(records), next(records)] == [("record 1", RECORD), ("record 2", {"b": "\\ud83d"})]
    with pytest.raises(UserError) as caught:
        list(records)
    assert str(caught.value) == f"{path}, record 3: {message}"


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ('{"question": "a", "question": "b"}', "question"),
        ('{"documents": [{"title": "t"}, {"text": "x", "text": "x"}]}', "text"),
    ],
)
def test_read_records_rejects_a_name_that_is_given_twice(tmp_path: Path, record: str, name: str) -> None:
    """Of which JSON readers keep the last value. In a line and in an array, at any depth."""
    for content, location in ((f'{{"a": 1}}\n{record}', "line 2"), (f'[{{"a": 1}}, {record}]', "record 2")):
        path = tmp_path / "data.json"
        path.write_text(content)
        records = read_records(str(path))
        assert next(records)[1] == {"a": 1}
        with pytest.raises(UserError) as caught:
            next(records)
        assert str(caught.value) == f"{path}, {location}, {name}: given twice"


@pytest.mark.parametrize("depth", [600, 1_100, 4_000])
def test_read_records_rejects_deeply_nested_records_of_an_array(tmp_path: Path, depth: int) -> None:
    """Deeper than Python lets a function call itself, as messages would that repeat a value."""
    path = tmp_path / "data.json"
    nested = "[" * depth + "]" * depth
    path.write_text(f'[{{"question": {"[" * 400 + "]" * 400}}}, {{"question": {nested}}}]')
    records = read_records(str(path))
    assert next(records)[0] == "record 1"
    with pytest.raises(UserError, match=r"record 2: nested too deeply$"):
        next(records)


def test_read_records_names_one_of_several_names_that_are_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"question": {"a": 1, "a": 2}, "zz": {"b": 1, "b": 2}}]')
    with pytest.raises(UserError, match=r"record 1, a: given twice$"):
        next(read_records(str(path)))
