import gzip
import io
import json
import threading
import tracemalloc
import uuid
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.errors import UserError
from pos2distill.tasks.readers import _most_similar, array_records, file_digest, read_records

RECORD = {"question": "Größe 😀?", "answers": ["42"], "score": 1.5, "count": 3}


def read(url: str) -> list[Any]:
    return list(read_records(url))


def as_lines(records: list[Any], **options: Any) -> bytes:
    return "\n".join(json.dumps(record, **options) for record in records).encode()


def as_array(records: list[Any], **options: Any) -> bytes:
    return json.dumps(records, **options).encode()


@pytest.mark.parametrize("storage", ["plain", "gzip", "memory", "memory gzip"])
@pytest.mark.parametrize("shape", [as_lines, as_array])
def test_read_records_of_any_url_plain_or_gzip(tmp_path: Path, shape: Callable[..., bytes], storage: str) -> None:
    root = f"memory://{uuid.uuid4().hex}" if "memory" in storage else str(tmp_path)
    url = f"{root}/data.json" + (".gz" if "gzip" in storage else "")
    records = [RECORD, {**RECORD, "count": 4}]
    for text in (shape(records), shape(records, ensure_ascii=False), b"\xef\xbb\xbf \n " + shape(records) + b"\n\n"):
        with fsspec.open(url, "wb", compression="infer") as file:
            file.write(text)
        assert [record for _, record in read(url)] == records


def test_read_records_of_a_zip_archive_with_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/", "")
        archive.writestr("data/questions.jsonl", as_lines([RECORD]))
        archive.writestr("data/._questions.jsonl", b"attributes that macOS keeps")
    assert read(str(path)) == [("line 1", RECORD)]


def test_read_records_counts_lines_and_records(tmp_path: Path) -> None:
    lines, array = tmp_path / "lines", tmp_path / "array"
    lines.write_text('\n{"a": 1}\n\n  \n{"a": 2}\n')
    array.write_text('\n[\n\n{"a": 1},\n{"a":\n2}\n]')
    assert read(str(lines)) == [("line 2", {"a": 1}), ("line 5", {"a": 2})]
    assert read(str(array)) == [("record 1", {"a": 1}), ("record 2", {"a": 2})]


@pytest.mark.parametrize("content", [b"", b" \n\n", b"[]", b"[ \n]"])
def test_read_records_of_an_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    assert read(str(path)) == []


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
    path.write_bytes(as_array([{"text": "x " * 2000}] * 2000))  # 8 MB
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_records(str(path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 2000
    assert peak < 1 << 20


def test_file_digest_is_of_the_bytes_as_stored(tmp_path: Path) -> None:
    path = tmp_path / "abc.jsonl.gz"
    path.write_bytes(b"abc")
    assert file_digest(str(path)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    path.write_bytes(b"abd")
    assert file_digest(str(path)) == "a52d159f262b2c6ddb724a61840befc36eb30c88877a4030b65cbe86298449c9"


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("data.trian.jsonl", "data.train.jsonl"),
        ("data.train.jsonl.gz", "data.train.jsonl"),
        ("data.evla.parquet", "data.eval.parquet"),
        ("DATA.eval.json", "data.eval.parquet"),
        ("v1.1-nq.jsonl", "v1.0-nq.jsonl"),
        ("dates.jsonl", None),
        ("questions.jsonl", None),
        (".jsonl", None),
        ("link.json1", "lnk.jsonl"),
        ("other.jsonl", None),
    ],
)
def test_read_records_suggests_a_file_of_records(tmp_path: Path, typed: str, nearest: str | None) -> None:
    names = ("data.train.jsonl", "data.train.py", "data.eval.parquet", "dates.png", "v1.0-nq.jsonl", ".gitignore")
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "questions").mkdir()
    (tmp_path / "lnk.jsonl").symlink_to(tmp_path / "data.train.jsonl")
    (tmp_path / "._other.jsonl").touch()
    hint = f"; did you mean '{nearest}'?" if nearest else ""
    with pytest.raises(UserError) as error:
        read(f"{tmp_path}/{typed}")
    assert str(error.value) == f"{tmp_path}/{typed}: no such file (data.path){hint}"


@pytest.mark.parametrize(
    ("wanted", "names", "nearest"),
    [
        ("nq.json", ["nq.jsonl", "nq.parquet"], "nq.jsonl"),
        ("nq.parquet.gz", ["nq.jsonl", "nq.parquet"], "nq.parquet"),
        ("nq.jsnl", ["mq.png", "nq.jsonl.gz"], "nq.jsonl.gz"),
        ("nq.jsonl", ["nq.jsonl"], None),
        ("nq.jsonl", ["nq.jsonl", "nq.jsonl.gz"], "nq.jsonl.gz"),
        ("nq.jsonl", ["questions.jsonl"], None),
        ("nq.jsonl", [], None),
    ],
)
def test_most_similar_compares_stems_and_never_finds_the_name_itself(
    wanted: str, names: list[str], nearest: str | None
) -> None:
    assert _most_similar(wanted, names) == nearest


# --- files that cannot be read


@pytest.mark.parametrize("use", [read, file_digest])
@pytest.mark.parametrize("path", ["broken.jsonl", "*.jsonl"])
def test_read_records_and_file_digest_name_the_missing_target_of_a_link(
    tmp_path: Path, use: Callable[[str], Any], path: str
) -> None:
    (tmp_path / "broken.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(UserError) as caught:
        use(f"{tmp_path}/{path}")
    line = f"{tmp_path}/broken.jsonl: is a link to '{tmp_path}/gone.jsonl', which is missing (data.path)"
    assert str(caught.value) == line


UNPAIRED = "contains an unpaired surrogate (\\ud800 to \\udfff alone), which is not a character"


@pytest.mark.parametrize("use", [read, file_digest])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dta.jsonl", r"dta.jsonl: no such file \(data.path\); did you mean 'data.jsonl'\?$"),
        ("DATA.parquet", r"DATA.parquet: no such file \(data.path\); did you mean 'data.jsonl'\?$"),
        ("data.jsonl.gz", r"data.jsonl.gz: no such file \(data.path\); did you mean 'data.jsonl'\?$"),
        ("code.jsonl", r"code.jsonl: no such file \(data.path\)$"),
        ("elsewhere/data.jsonl", r"data.jsonl: no such file \(data.path\)$"),
        ("", r": cannot be used \(Is a directory\) \(data.path\); expected a file, not a folder$"),
        ("data.jsonl/inside.jsonl", r"inside.jsonl: "),
        ("nosuch://bucket/data.jsonl", r"^nosuch://bucket/data.jsonl: cannot be opened \(Protocol not known: nosuch"),
    ],
)
def test_read_records_and_file_digest_refuse_unreadable_files(
    tmp_path: Path, use: Callable[[str], Any], name: str, message: str
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(RECORD))
    with pytest.raises(UserError, match=message):
        use(name if "://" in name else f"{tmp_path}/{name}")


class _Refusing(BaseHTTPRequestHandler):
    """Answers with the status that the path begins with; lists no folder."""

    def do_GET(self) -> None:  # the names are those of http.server
        first = self.path.split("/")[1]
        self.send_error(int(first) if first.isdigit() and not self.path.endswith("/") else 403)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("404/data.jsonl", "no such file (data.path)"),
        ("410/data.jsonl.gz", "no such file (data.path)"),
        ("403/data.jsonl", "cannot be used (403, message='Forbidden'"),
        ("500/data.jsonl", "cannot be used (500, message='Internal Server Error'"),
    ],
)
def test_file_digest_tells_a_missing_file_of_a_web_server_from_a_refused_one(path: str, reason: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{path}"
        with pytest.raises(UserError) as caught:
            file_digest(url)
        server.shutdown()
    assert str(caught.value).startswith(f"{url}: {reason}")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gzip.compress(b'{"a": 1}\n' * 4000, mtime=0)[:60],
            r"broken gzip after line \d+ \(.*\); fetch the file again$",
        ),
        (
            gzip.compress(b"[" + b'{"a": 1},' * 40000, mtime=0)[:400],
            r"broken gzip after record \d+ \(.*\); fetch the file again$",
        ),
        (
            gzip.compress(b'{"a": 1}', mtime=0)[:12],
            r"broken gzip before its first record \(.*\); fetch the file again$",
        ),
        (
            json.dumps(RECORD).encode(),
            r"is not a gzip file despite its name \(Not a gzipped file .*\); rename or fetch it again$",
        ),
    ],
)
def test_read_records_refuses_broken_gzip(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(str(path))


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
def test_read_records_refuses_a_line_that_is_no_object(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(RECORD).encode() + b"\n" + line)
    with pytest.raises(UserError) as caught:
        read(str(path))
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
def test_read_records_refuses_an_element_that_is_no_object(tmp_path: Path, rest: bytes, message: str) -> None:
    """The records before it are read, and the message names the one at fault."""
    path = tmp_path / "data.json"
    path.write_bytes(b"[" + json.dumps(RECORD).encode() + b', {"b": "\\\\ud83d"}' + rest)
    records = read_records(str(path))
    assert [next(records), next(records)] == [("record 1", RECORD), ("record 2", {"b": "\\ud83d"})]
    with pytest.raises(UserError) as caught:
        list(records)
    assert str(caught.value) == f"{path}, record 3: {message}"
