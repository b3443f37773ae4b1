import gzip
import json
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pos2distill.errors import UserError
from pos2distill.tasks.readers import read_records

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
def test_read_records_rejects_broken_gzip(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(str(path))
