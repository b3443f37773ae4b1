"""Data in Parquet: the same examples as from JSON Lines."""

import json
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem

from pos2distill.config import DataSection
from pos2distill.errors import UserError
from pos2distill.tasks.data_files import data_bytes, file_digest
from pos2distill.tasks.datasets import load_split, read_examples
from pos2distill.tasks.readers import read_records
from tests.support.hub_server import hub_server, use_hub
from tests.support.tiny import write_examples


def section(path: object, **settings: object) -> DataSection:
    values = {"format": "jsonl", "path": str(path), "documents": 4, "train_examples": 8, "eval_examples": 4}
    return DataSection.model_validate({**values, **settings})


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """600 records, more than one batch of rows. Every second one has no id, and every third no titles."""
    path = write_examples(tmp_path / "data.jsonl", 600, 5)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for number, record in enumerate(records):
        if number % 2:
            del record["id"]
        if number % 3 == 0:
            for document in record["documents"]:
                del document["title"]
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def to_parquet(lines: Path, url: str) -> str:
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    with fsspec.open(url, "wb") as file:
        pq.write_table(pa.Table.from_pylist(records), file, compression="zstd")
    return url


@pytest.mark.parametrize("storage", ["disk", "memory"], indirect=True)
def test_read_records_of_parquet_equal_those_of_json_lines(lines: Path, storage: str) -> None:
    folder = storage.rpartition("/")[0]  # in a path of data, * is a pattern
    url = to_parquet(lines, f"{folder}/table")  # recognized by its first bytes, not by its name
    from_lines = [record for _, record in read_records(str(lines))]
    rows = list(read_records(url))
    assert [location for location, _ in rows] == [f"row {number}" for number in range(1, 601)]
    assert [record for _, record in rows] == from_lines
    assert len(file_digest(url)) == 64


def test_load_split_of_parquet_equals_that_of_json_lines(lines: Path, tmp_path: Path) -> None:
    parquet = to_parquet(lines, str(tmp_path / "data.parquet"))
    one = load_split(section(lines), documents=4, seed=0)
    other = load_split(section(parquet), documents=4, seed=0)
    assert (list(one.train), list(one.evaluation)) == (list(other.train), list(other.evaluation))
    assert one.counts == other.counts


def test_load_split_without_training_examples(lines: Path) -> None:
    split = load_split(section(lines, train_examples=0, eval_examples=600, eval_fraction=1), documents=4, seed=0)
    assert (len(split.train), len(split.evaluation)) == (0, 600)
    split = load_split(section(lines, train_examples=0), documents=4, seed=0)
    assert split.counts["train"] == 0
    assert split.counts["train_unused"] + split.counts["eval_unused"] + 4 == 600


def test_read_records_of_parquet_names_the_row_and_the_file(lines: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    to_parquet(lines, str(path))
    table = pq.read_table(path)
    wrong = table.slice(0, 3).set_column(table.column_names.index("question"), "question", pa.array(["a?", None, "c?"]))
    pq.write_table(wrong, path)
    with pytest.raises(UserError, match=rf"^{path}, row 2: field 'question' is missing; found fields: "):
        list(read_examples(section(path, answer_in_gold=False), 4))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=rf"^{path}: cannot be opened \(Parquet magic bytes not found in footer"):
        list(read_records(str(path)))
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(
        UserError, match=rf"^{path}: holds no examples; expected a record for each question \(docs/data.md\)$"
    ):
        list(read_examples(section(path), 4))


@pytest.mark.parametrize(
    ("kind", "number", "shown"),
    [
        (pa.date64(), 299_999_980_800_000, "11476-08-15"),
        (pa.timestamp("ms"), 299_999_980_800_000, 299_999_980_800_000),
        (pa.timestamp("ms", "Not/AZone"), 299_999_980_800_000, 299_999_980_800_000),
        (pa.duration("s"), 299_999_980_800, 299_999_980_800),
        (pa.time64("us"), 3_600_000_000, 3_600_000_000),
        (pa.time32("ms"), 3_600_000, 3_600_000),
    ],
)
def test_read_records_of_parquet_gives_dates_as_text_and_times_as_numbers(
    tmp_path: Path, kind: pa.DataType, number: int, shown: str | int
) -> None:
    """At any depth, and those that Python's types do not hold."""
    times = pa.array([number, None], pa.int32() if pa.types.is_time32(kind) else pa.int64()).view(kind)
    inner = pa.StructArray.from_arrays([times], names=["time"])
    lists, large = pa.ListArray.from_arrays([0, 1, 2], inner), pa.LargeListArray.from_arrays([0, 1, 2], inner)
    maps = pa.MapArray.from_arrays([0, 1, 2], ["k", "k"], times)
    fixed = pa.FixedSizeListArray.from_arrays(times, 1)
    table = pa.table({"text": ["a", "b"], "time": times, "lists": lists, "large": large, "maps": maps, "fixed": fixed})
    pq.write_table(table, tmp_path / "data")
    found = [{"time": shown}]
    first = {"text": "a", "time": shown, "lists": found, "large": found, "maps": [("k", shown)], "fixed": [shown]}
    second = {"text": "b", "lists": [{}], "large": [{}], "maps": [("k", None)], "fixed": [None]}
    assert list(read_records(str(tmp_path / "data"))) == [("row 1", first), ("row 2", second)]


def test_read_records_of_parquet_names_the_text_that_is_not_utf_8(tmp_path: Path) -> None:
    offsets = pa.py_buffer(np.array([0, 1, 3], "int32"))
    names = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"aa\xff")])
    pq.write_table(pa.table({"number": [1, 2], "name": names}), tmp_path / "data")
    with pytest.raises(UserError) as caught:
        list(read_records(str(tmp_path / "data")))
    assert str(caught.value) == f"{tmp_path}/data, row 2, name: not UTF-8 (invalid start byte at byte 1)"


def test_read_records_of_parquet_rejects_two_columns_of_one_name(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "data")
    with pytest.raises(UserError, match=rf"^{tmp_path}/data, column a: given twice$"):
        list(read_records(str(tmp_path / "data")))


def test_read_records_of_the_hub_without_a_network() -> None:
    """fsspec finds the hub's file system, which the tests' HF_HUB_OFFLINE forbids to connect."""
    with pytest.raises(
        UserError, match=r"^hf://datasets/owner/name/data\.parquet: cannot be used \(.*(offline|HF_HUB)"
    ):
        list(read_records("hf://datasets/owner/name/data.parquet"))


@pytest.fixture
def shards(lines: Path, tmp_path: Path) -> list[Path]:
    """The records in three files."""
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"part-{number}.parquet")
        pq.write_table(pa.Table.from_pylist(records[number * 200 : number * 200 + 200]), paths[-1])
    return paths


@pytest.mark.parametrize("storage", ["disk", "memory"], indirect=True)
def test_read_records_of_several_files_are_those_of_one(lines: Path, shards: list[Path], storage: str) -> None:
    folder = storage.rpartition("/")[0]  # in a path of data, * is a pattern
    for path in shards:
        with fsspec.open(f"{folder}/parts/{path.name}", "wb", auto_mkdir=True) as file:
            file.write(path.read_bytes())
    url = f"{folder}/parts/*.parquet"
    found = list(read_records(url))
    assert [record for _, record in found] == [record for _, record in read_records(str(lines))]
    assert (found[0][0], found[-1][0]) == ("part-0.parquet, row 1", "part-2.parquet, row 200")
    assert data_bytes(url) == sum(path.stat().st_size for path in shards)
    digest = file_digest(url)
    with fsspec.open(f"{folder}/parts/part-1.parquet", "wb") as file:
        file.write(shards[0].read_bytes())
    assert file_digest(url) != digest


def test_load_split_names_the_file_of_an_example(shards: list[Path], lines: Path, tmp_path: Path) -> None:
    several = load_split(section(tmp_path / "part-*.parquet"), documents=4, seed=0)
    one = load_split(section(lines), documents=4, seed=0)
    assert (list(several.train), list(several.evaluation)) == (list(one.train), list(one.evaluation))
    assert all(location.startswith("part-*.parquet, part-") for location in several.locations.values())


def test_read_records_of_a_pattern_that_matches_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{tmp_path}/\*\.parquet: matches no file \(data\.path\)$"):
        list(read_records(f"{tmp_path}/*.parquet"))
    (tmp_path / "a*.jsonl").write_text('{"a": 1}')
    (tmp_path / "ab.jsonl").write_text('{"a": 2}')
    assert list(read_records(f"{tmp_path}/a*.jsonl")) == [("line 1", {"a": 1})]  # a file of that very name


def test_read_records_of_a_pattern_in_a_folder_with_other_special_characters(tmp_path: Path) -> None:
    folder = tmp_path / "data [v1]?"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"a": name}))
    assert [record["a"] for _, record in read_records(f"{folder}/*.jsonl")] == ["a", "b"]


def test_read_records_names_the_folders_of_files_with_one_name(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        (tmp_path / folder / "deep" / "data.jsonl").write_text("{}")
    locations = [location for location, _ in read_records(f"{tmp_path}/*/deep/data.jsonl")]
    assert locations == ["x/deep/data.jsonl, line 1", "y/deep/data.jsonl, line 1"]
    (tmp_path / "y" / "deep" / "data.jsonl").write_text("[]\n{")
    with pytest.raises(UserError, match=rf"^{tmp_path}/y/deep/data\.jsonl, record 1: "):
        list(read_records(f"{tmp_path}/*/deep/data.jsonl"))


def test_read_records_of_the_hub(
    lines: Path, shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        HfFileSystem.clear_instance_cache()
        hub.files["me/questions"] = {f"data/{path.name}": path.read_bytes() for path in shards}
        url = "hf://datasets/me/questions/data"
        rows = list(read_records(f"{url}/part-1.parquet"))
        assert [location for location, _ in rows] == [f"row {number}" for number in range(1, 201)]
        found = list(read_records(f"{url}/*.parquet"))
        assert [record for _, record in found] == [record for _, record in read_records(str(lines))]
        assert found[200] == ("part-1.parquet, row 1", rows[0][1])
        assert len(file_digest(f"{url}/*.parquet")) == 64
    HfFileSystem.clear_instance_cache()
