"""Data in Parquet: the same examples as from JSON Lines."""

import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pos2distill.config import DataSection
from pos2distill.errors import UserError
from pos2distill.tasks.datasets import load_split, read_examples
from pos2distill.tasks.readers import file_digest, read_records
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
    url = to_parquet(lines, f"{storage}-data")  # recognised by its first bytes, not by its name
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
    with pytest.raises(UserError, match=rf"^{path}: holds no examples$"):
        list(read_examples(section(path), 4))


def test_read_records_of_the_hub_without_a_network() -> None:
    """fsspec finds the hub's file system, which the tests' HF_HUB_OFFLINE forbids to connect."""
    with pytest.raises(
        UserError, match=r"^hf://datasets/owner/name/data\.parquet: cannot be used \(.*(offline|HF_HUB)"
    ):
        list(read_records("hf://datasets/owner/name/data.parquet"))
