import logging
import os
import re
import shutil
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.errors import CorruptPart, UserError
from pos2distill.records import SAMPLE_SCHEMA, SCHEMA_VERSION
from pos2distill.store.samples import SampleStore
from tests.support.stores import make_samples, open_store
from tests.support.tables import missing_in

IDS = [f"fox-{number}" for number in range(12)]


def indices(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


def texts(store: SampleStore, ids: list[str]) -> dict[str, str]:
    """The stored text of each stored id."""
    index = store.index(ids)
    table = store.load(index, np.flatnonzero(index.stored), ["sample_id", "text"])
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


# --- index and load


def test_load_returns_samples_in_the_requested_order(storage: str) -> None:
    store = open_store(storage)
    names = sorted([store.append(make_samples("c", "a")), store.append(make_samples("b"))])
    ids = ["a", "b", "x", "c"]
    index = store.index(ids)
    assert index.parts == tuple(names)
    assert index.part_of[2] == -1
    for sample in (0, 1, 3):
        assert ids[sample] in read_ids(store, names[index.part_of[sample]])
    assert index.part_of.dtype == np.int32
    assert (index.stored.tolist(), missing_in(index)) == ([True, True, False, True], [2])
    assert store.load(index, indices(3, 0, 1, 0)).equals(make_samples("c", "a", "b", "a"))
    assert store.load(index, indices(1), ["outcome", "sample_id"]).to_pylist() == [
        {"outcome": "kept", "sample_id": "b"}
    ]
    assert store.load(index, indices()).equals(make_samples())


def read_ids(store: SampleStore, name: str) -> list[str]:
    return pq.read_table(f"{store.folder}/{name}", filesystem=store.artifact.fs)["sample_id"].to_pylist()


def test_index_of_an_empty_store(storage: str) -> None:
    index = open_store(storage).index(["a", "b"])
    assert (index.parts, missing_in(index)) == ((), [0, 1])
    assert missing_in(SampleStore(open_store(f"{storage}/other").artifact).index([])) == []


def test_load_rejects_an_index_without_a_sample(storage: str) -> None:
    store = open_store(storage)
    store.append(make_samples("a"))
    index = store.index(["a", "b", "c"])
    with pytest.raises(ValueError, match=rf"^{re.escape(store.artifact.url)}: no sample at indices \[2, 1\]$"):
        store.load(index, indices(2, 0, 1))


def test_load_reads_only_the_parts_it_needs(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(storage)
    for start in range(0, 12, 3):
        store.append(make_samples(*IDS[start : start + 3]))
    index = store.index(IDS)
    read: list[str] = []
    whole = SampleStore._read

    def spy(self: SampleStore, name: str, columns: list[str]) -> pa.Table:
        read.append(name)
        return whole(self, name, columns)

    monkeypatch.setattr(SampleStore, "_read", spy)
    store.load(index, indices(4, 0, 5, 1, 4))
    assert sorted(read) == sorted({index.parts[index.part_of[sample]] for sample in (0, 4)})


def test_append_of_the_same_samples_gives_one_part(storage: str) -> None:
    store = open_store(storage)
    names = {store.append(make_samples("a", "b")), store.append(make_samples("b", "a"))}
    assert store.part_names() == list(names)
    assert store.append(make_samples("a", "c")) not in names


def test_load_and_tally_use_one_part_of_a_sample(storage: str) -> None:
    """Two writers raced with overlapping batches; every reader takes the same one of the two rows."""
    store = open_store(storage)
    named = {store.append(make_samples("a", "b", text=text)): text for text in ["one"]}
    named[store.append(make_samples("b", "c", text="two"))] = "two"
    assert texts(store, ["a", "b", "c"]) == {"a": "one", "b": named[min(named)], "c": "two"}
    assert store.tally(store.index(["a", "b", "c"])).outcomes == {"kept": 3}


batches = st.lists(st.lists(st.sampled_from(IDS), min_size=1, max_size=5), max_size=8)


@given(batches, batches, st.sets(st.integers(0, 15)), st.permutations(IDS))
def test_store_reads_each_sample_once_after_races_and_corruption(
    before: list[list[str]], after: list[list[str]], broken: set[int], order: list[str]
) -> None:
    """Racing writers leave overlapping parts, and the same part twice; some are corrupt."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    ids = order[:10]  # parts also hold samples that are not in the list
    held: dict[str, dict[str, str]] = {}

    def append(groups: list[list[str]]) -> None:
        for group in groups:
            name = store.append(make_samples(*group, text="|".join(sorted(group))))
            held[name] = dict.fromkeys(group, "|".join(sorted(group)))

    append(before)
    append(after)
    for number in sorted(broken & set(range(len(held)))):
        name = sorted(held)[number]
        store.artifact.fs.pipe_file(f"{store.folder}/{name}", b"PAR1")
    corrupt = {sorted(held)[number] for number in broken if number < len(held)}
    fresh = store.index(ids)
    assert set(fresh.parts) == set(held) - corrupt

    expected: dict[str, str] = {}
    for name in sorted(set(held) - corrupt, reverse=True):
        expected |= held[name]
    expected = {sample_id: text for sample_id, text in expected.items() if sample_id in ids}
    assert texts(store, ids) == expected
    tally = store.tally(fresh)
    assert tally.outcomes.total() == len(expected)
    assert tally.sampled_N.tolist() == [sample_id in expected for sample_id in ids]
    assert tally.kept_N.tolist() == store.kept(fresh).tolist()


def test_tally_counts_outcomes_and_finish_reasons(storage: str) -> None:
    store = open_store(storage)
    store.append(make_samples("a", "b", finish_reason="length"))
    store.append(make_samples("c", "x", outcome="wrong", finish_reason="stop"))
    ids = ["a", "b", "c", "d"]
    tally = store.tally(store.index(ids))
    assert tally.sampled_N.tolist() == [True, True, True, False]
    assert tally.kept_N.tolist() == [True, True, False, False]
    assert tally.outcomes == Counter(kept=2, wrong=1)
    assert tally.finish_reasons == Counter(length=2, stop=1)
    assert tally.thoughts == {}
    store.append(make_samples("d", text="<think>It is"))
    assert store.tally(store.index(ids)).thoughts == Counter(thoughts=1, unfinished_thoughts=1)
    empty = open_store(f"{storage}/empty")
    assert empty.tally(empty.index(ids)).outcomes == {}


def test_open_keeps_parts_of_an_interrupted_run(storage: str) -> None:
    open_store(storage).append(make_samples("a"))
    assert open_store(storage).index(["a"]).stored.all()


# --- corrupt parts


def written(samples: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(samples, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def flipped(data: bytes, byte: int) -> bytes:
    return data[:byte] + bytes([data[byte] ^ 4]) + data[byte + 1 :]


def page_of(data: bytes, column: str) -> int:
    """Offset of the last bytes of a column's data."""
    group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
    chunk = next(group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema == column)
    return (
        chunk.data_page_offset
        + chunk.total_compressed_size
        - 3
        - (chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset))
    )


def other_version(data: bytes) -> bytes:
    return written(pq.read_table(pa.BufferReader(data)).replace_schema_metadata({"schema_version": "2"}))


def without_column(data: bytes) -> bytes:
    return written(pq.read_table(pa.BufferReader(data)).drop_columns(["hidden"]))


# Ways to corrupt a part so that reading its ids finds it, and the reason in the message.
CORRUPTIONS = {
    "empty": (lambda data: b"", "Parquet file size is 0 bytes"),
    "truncated": (lambda data: data[: len(data) // 2], "Parquet magic bytes not found in footer"),
    "not Parquet": (lambda data: b"<html>" * 999, "Parquet magic bytes not found in footer"),
    "flipped footer": (lambda data: flipped(data, len(data) - 6), "footer"),
    "flipped ids": (lambda data: flipped(data, page_of(data, "sample_id")), "CRC checksum verification failed"),
    "other version": (other_version, f"schema version 2, expected {SCHEMA_VERSION}"),
    "no version": (
        lambda data: written(make_samples("a").replace_schema_metadata()),
        f"schema version none, expected {SCHEMA_VERSION}",
    ),
    "missing column": (without_column, "its columns are not those of SAMPLE_SCHEMA"),
    "another part": (
        lambda data: written(make_samples("x")),
        "its samples are not those that it is named after",
    ),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_index_quarantines_a_corrupt_part(storage: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    corrupt, reason = CORRUPTIONS[kind]
    store = open_store(storage)
    good, bad = store.append(make_samples("a")), store.append(make_samples("b", "c"))
    fs, path = store.artifact.fs, f"{store.folder}/{bad}"
    data = corrupt(fs.cat_file(path))
    fs.pipe_file(path, data)
    index = store.index(["a", "b", "c"])
    assert (index.parts, missing_in(index)) == ((good,), [1, 2])
    assert store.part_names() == [good]
    assert fs.cat_file(f"{store.quarantine}/{bad}") == data
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "\n" not in record.message
    assert record.message.startswith(f"{path}: corrupt (")
    assert record.message.endswith(f"); moved to {store.quarantine}, its samples will be made again")
    assert reason in record.message

    store.append(make_samples("b", "c"))
    assert store.index(["a", "b", "c"]).stored.all()


def test_load_quarantines_a_part_with_corrupt_data(storage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(storage)
    store.append(make_samples("a"))
    bad = store.append(make_samples("b", hidden=os.urandom(99)))
    fs, path = store.artifact.fs, f"{store.folder}/{bad}"
    data = fs.cat_file(path)
    fs.pipe_file(path, flipped(data, page_of(data, "hidden")))
    index = store.index(["a", "b"])
    assert index.stored.all()  # the ids can be read
    assert store.load(index, indices(0)).num_rows == 1
    failed = r"corrupt \(.*CRC checksum verification failed.*\)"
    with pytest.raises(CorruptPart, match=rf"^{re.escape(path)}: {failed}; moved to "):
        store.load(index, indices(0, 1))
    assert [str(record.message).startswith(f"{path}: corrupt") for record in caplog.records] == [True]
    # A later call with the same index fails too; a new index does not.
    with pytest.raises(CorruptPart, match=rf"^{re.escape(path)}: not found; its samples will be made again$"):
        store.tally(index)
    assert missing_in(store.index(["a", "b"])) == [1]


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_read_only_store_rejects_a_corrupt_part_and_leaves_it(storage: str, kind: str) -> None:
    corrupt, reason = CORRUPTIONS[kind]
    store = open_store(storage)
    name = store.append(make_samples("a"))
    fs, path = store.artifact.fs, f"{store.folder}/{name}"
    data = corrupt(fs.cat_file(path))
    fs.pipe_file(path, data)
    with pytest.raises(UserError) as caught:
        SampleStore(store.artifact, read_only=True).index(["a"])
    assert str(caught.value).startswith(f"{path}: corrupt (")
    assert str(caught.value).endswith("); a run that trains on its samples makes them again")
    assert reason in str(caught.value)
    assert fs.cat_file(path) == data


def test_a_read_only_store_rejects_a_part_that_was_removed(storage: str) -> None:
    store = open_store(storage)
    name = store.append(make_samples("a"))
    reader = SampleStore(store.artifact, read_only=True)
    index = reader.index(["a"])
    store.artifact.fs.rm_file(f"{store.folder}/{name}")
    message = rf"^{re.escape(f'{store.folder}/{name}')}: not found any more; run the same command again$"
    with pytest.raises(UserError, match=message):
        reader.load(index, indices(0))


def test_append_makes_the_folder_of_parts(tmp_path: Path) -> None:
    """Also again: the folder of a finished artifact may have been deleted since it was read."""
    store = open_store(str(tmp_path))
    for _ in range(2):
        assert not store.index(["a"]).stored.any()
        store.append(make_samples("a"))
        assert store.index(["a"]).stored.all()
        shutil.rmtree(store.folder)


def test_read_never_returns_a_sample_with_a_flipped_bit(tmp_path: Path) -> None:
    """The flip is found, or it is in bytes that are not read (statistics, padding)."""
    values = {"prompt_ids": [5, 6, 7], "f1": 0.5, "seed": 7, "hidden": os.urandom(64), "answers": ["x", "y"]}
    samples = make_samples("a", "b", **values)
    store = open_store(str(tmp_path))
    name = store.append(samples)
    path = Path(store.folder) / name
    data = path.read_bytes()
    generator = np.random.default_rng(0)
    found = 0
    logging.disable()
    try:
        for bit in generator.choice(8 * len(data), 400, replace=False):
            path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
            try:
                assert store._read(name, SAMPLE_SCHEMA.names).equals(samples)
            except CorruptPart:
                found += 1
    finally:
        logging.disable(logging.NOTSET)
    assert found > 100


def test_read_does_not_quarantine_after_a_connection_error(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(storage)
    store.append(make_samples("a"))

    # Of the class: undone on the instance, which fsspec keeps, the patch would hide later ones of the class.
    kind: Any = type(store.artifact.fs)
    read = kind.open

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ConnectionError("the network is down")

    def fail_at_parts(*arguments: Any, **options: Any) -> Any:
        return (fail if "cache_type" in options else read)(*arguments, **options)

    monkeypatch.setattr(kind, "open", fail_at_parts)
    assert store.index(["a"]).stored.all()  # downloaded whole and parsed again
    monkeypatch.setattr(kind, "cat_file", fail)
    with pytest.raises(ConnectionError, match="network is down"):
        store.index(["a"])
    assert len(store.part_names()) == 1


def test_quarantine_of_a_part_that_another_process_moved(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(storage)
    name = store.append(make_samples("a"))
    path = f"{store.folder}/{name}"
    store.artifact.fs.pipe_file(path, b"")
    parse = pa.BufferReader

    def other_first(data: bytes) -> pa.BufferReader:
        if store.artifact.fs.exists(path):
            store.artifact.fs.rm_file(path)
        return parse(data)

    monkeypatch.setattr(pa, "BufferReader", other_first)
    assert missing_in(store.index(["a"])) == [0]
