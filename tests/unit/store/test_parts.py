"""The parts of a table, here of the answers of an evaluation that is not finished."""

import errno
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from botocore.exceptions import EndpointConnectionError

from pos2distill.errors import TransientError, UserError
from pos2distill.records import PREDICTION_SCHEMA
from pos2distill.store.artifacts import Artifact
from pos2distill.store.parts import TableParts

KEY = ("documents", "example_id", "placement", "order")


def answers(*prompts: tuple[str, int], **values: Any) -> pa.Table:
    """A prediction for each (example id, placement), with 5 documents. Every other column is null or as given."""
    rows = []
    for example_id, placement in prompts:
        empty = dict.fromkeys(PREDICTION_SCHEMA.names)
        rows.append(empty | {"documents": 5, "order": 0, **values, "example_id": example_id, "placement": placement})
    return pa.Table.from_pylist(rows, schema=PREDICTION_SCHEMA)


def open_parts(storage: str) -> TableParts:
    return TableParts(Artifact(storage, "base-scores", "f00d"), PREDICTION_SCHEMA, KEY)


def keys(predictions: pa.Table) -> list[tuple[str, int]]:
    return list(zip(predictions["example_id"].to_pylist(), predictions["placement"].to_pylist(), strict=True))


def test_read_sorts_and_keeps_the_first_answer_to_each_prompt(storage: str) -> None:
    parts = open_parts(storage)
    assert len(parts.read()) == 0
    parts.append(answers(("b", 1), ("a", 0), text="first"))
    parts.append(answers(("b", 2), documents=3, text="other length"))
    again = open_parts(storage)  # as a second run, whose parts come after those of the first
    again.append(answers(("b", 0), ("b", 1), text="second"))
    read = open_parts(storage).read()
    assert keys(read) == [("b", 2), ("a", 0), ("b", 0), ("b", 1)]
    assert read["text"].to_pylist() == ["other length", "first", "second", "first"]
    assert read.schema.equals(PREDICTION_SCHEMA)


def test_read_sorts_many_answers(storage: str) -> None:
    prompts = [(f"fox-{number:04d}", placement) for number in range(40) for placement in range(4)]
    parts = open_parts(storage)
    for number in range(10):
        some = random.Random(number).sample(prompts, 150)
        parts.append(answers(*some, documents=4))
        parts.append(answers(*some[::-1], documents=4))
        assert keys(parts.read()) == sorted(set(keys(parts.read())))
    assert keys(parts.read()) == prompts


def test_read_leaves_out_a_corrupt_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = open_parts(str(tmp_path))
    parts.append(answers(("a", 0)))
    parts.append(answers(("b", 0)))
    path = Path(parts.folder) / "part-000000.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    assert keys(parts.read()) == [("b", 0)]
    assert f"{path}: corrupt (" in caplog.text
    assert "its rows will be computed again" in caplog.text
    open_parts(str(tmp_path)).append(answers(("c", 0)))
    assert keys(parts.read()) == [("b", 0), ("c", 0)]


@pytest.mark.parametrize(
    "other",
    [
        pa.table({"example_id": ["x"]}),
        answers(("x", 0)).append_column("more", [["y"]]),
        answers(("x", 0)).cast(
            PREDICTION_SCHEMA.set(PREDICTION_SCHEMA.get_field_index("documents"), pa.field("documents", pa.int64()))
        ),
    ],
)
def test_read_leaves_out_a_part_with_other_columns(
    other: pa.Table, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = open_parts(str(tmp_path))
    parts.append(other)
    parts.append(answers(("b", 0)))
    assert keys(parts.read()) == [("b", 0)]
    assert "part-000000.parquet: corrupt (its columns are not those of the table)" in caplog.text


@pytest.mark.parametrize("name", ["part-abc.parquet", "part-.parquet", "part-1-copy.parquet", "part-٣.parquet"])
def test_read_leaves_out_files_that_are_no_parts(name: str, tmp_path: Path) -> None:
    parts = open_parts(str(tmp_path))
    parts.append(answers(("a", 0)))
    (Path(parts.folder) / name).write_bytes(b"garbage")
    open_parts(str(tmp_path)).append(answers(("b", 0)))
    assert keys(open_parts(str(tmp_path)).read()) == [("a", 0), ("b", 0)]
    assert (Path(parts.folder) / "part-000001.parquet").exists()


def test_append_counts_beyond_six_digits(tmp_path: Path) -> None:
    parts = open_parts(str(tmp_path))
    parts.append(answers(("a", 0)))
    (Path(parts.folder) / "part-000000.parquet").rename(Path(parts.folder) / "part-999999.parquet")
    for name in ("b", "c"):
        open_parts(str(tmp_path)).append(answers((name, 0)))
    assert keys(open_parts(str(tmp_path)).read()) == [("a", 0), ("b", 0), ("c", 0)]


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.EREMOTEIO, "the storage does not answer"),
        ConnectionError("the storage does not answer"),
        EndpointConnectionError(endpoint_url="http://storage"),
    ],
)
def test_read_raises_when_the_storage_cannot_be_read(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows are not lost, so they must not be computed again."""
    parts = open_parts(str(tmp_path))
    parts.append(answers(("a", 0)))

    def refuse(*_args: Any, **_settings: Any) -> None:
        raise fault

    monkeypatch.setattr(type(parts.artifact.fs), "_open", refuse)
    with pytest.raises(TransientError, match=r"part-000000\.parquet: cannot be used \(.*\(runtime\.storage\)"):
        parts.read()
    assert "corrupt" not in caplog.text


def test_read_raises_when_google_cloud_forbids_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs 2026.10 raises the class that Arrow raises for damaged pages."""
    parts = open_parts(str(tmp_path))
    parts.append(answers(("a", 0)))

    def refuse(*_args: Any, **_settings: Any) -> None:
        raise OSError("Forbidden: https://storage/b/o\nme@x does not have storage.objects.get access")

    monkeypatch.setattr(type(parts.artifact.fs), "_open", refuse)
    with pytest.raises(UserError, match=r"\.parquet: cannot be used \(Forbidden: .* access\).*; check the credentials"):
        parts.read()


def test_append_overwrites_no_part_after_one_was_removed(tmp_path: Path) -> None:
    parts = open_parts(str(tmp_path))
    for name in ("a", "b", "c"):
        parts.append(answers((name, 0)))
    (Path(parts.folder) / "part-000000.parquet").unlink()
    again = open_parts(str(tmp_path))
    again.append(answers(("a", 0)))
    assert keys(again.read()) == [("a", 0), ("b", 0), ("c", 0)]


def test_remove_leaves_the_rest_of_the_artifact(storage: str) -> None:
    parts = open_parts(storage)
    parts.append(answers(("a", 0)))
    parts.artifact.publish(counts={}, seconds={})
    parts.remove()
    assert len(parts.read()) == 0
    assert parts.artifact.manifest() is not None
