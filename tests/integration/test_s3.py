"""Storage on an S3-compatible store that fails 5 % of the requests, before, during or after it works on them.

No test retries: the client library does.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest

from pipelines.executors.ray.states import arrow_filesystem
from pos2distill.errors import CorruptPart
from pos2distill.store.artifacts import Artifact, other_fingerprints
from pos2distill.store.lease import hold_lease
from pos2distill.store.storage import claim_storage
from tests.support.paths import ODD_NAME
from tests.support.s3_server import FAULTS, Faulty
from tests.support.stores import make_samples, open_store
from tests.support.tables import missing_in

IDS = [f"fox-{number:03d}" for number in range(240)]


@pytest.fixture
def storage(bucket: str) -> str:
    claim_storage(f"{bucket}/run", "mine")
    return f"{bucket}/run"


def test_sample_store_with_racing_writers_loses_nothing_and_shows_whole_parts(
    storage: str, faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    """Two drivers write the same blocks, cut differently, while a reader indexes and loads what is there."""
    store = open_store(storage)
    blocks = [IDS[start : start + 8] for start in range(0, 240, 8)] + [
        IDS[start : start + 12] for start in range(0, 240, 12)
    ]
    seen: list[int] = []
    with ThreadPoolExecutor(6) as pool:
        writing = [
            pool.submit(store.append, make_samples(*block, hidden=os.urandom(3000))) for block in [*blocks, *blocks[:9]]
        ]
        index = store.index(IDS)
        while not all(write.done() for write in writing):
            loaded = store.load(index, np.flatnonzero(index.stored), ["sample_id"])
            assert loaded["sample_id"].to_pylist() == [IDS[position] for position in np.flatnonzero(index.stored)]
            seen.append(len(loaded))
            index = store.index(IDS)
        parts = {write.result() for write in writing}
    index = store.index(IDS)
    assert seen == sorted(seen)
    assert set(index.parts) == parts
    assert len(parts) == len(blocks)
    assert store.load(index, np.arange(240), ["sample_id"])["sample_id"].to_pylist() == IDS
    assert store.tally(index).outcomes == {"kept": 240}
    assert not store.artifact.fs.exists(store.quarantine)
    assert not [record for record in caplog.records if "corrupt" in record.message]
    assert all(faulty.requests[fault] for fault in FAULTS), faulty.requests


def test_sample_store_quarantines_corrupt_parts(storage: str) -> None:
    store = open_store(storage)
    good = store.append(make_samples(*IDS[:8]))
    scanned = store.append(make_samples(*IDS[8:16]))
    hidden = os.urandom(9999)
    loaded = store.append(make_samples(*IDS[16:24], hidden=hidden))
    fs = store.artifact.fs
    fs.pipe_file(f"{store.folder}/{scanned}", fs.cat_file(f"{store.folder}/{scanned}")[:-99])
    data = bytearray(fs.cat_file(f"{store.folder}/{loaded}"))
    data[data.index(hidden[:99])] ^= 1  # random bytes are stored as they are
    fs.pipe_file(f"{store.folder}/{loaded}", bytes(data))
    index = store.index(IDS[:24])
    assert missing_in(index) == list(range(8, 16))
    with pytest.raises(CorruptPart):
        store.load(index, np.arange(16, 24))
    assert store.index(IDS[:24]).parts == (good,)
    assert {path.rsplit("/", 1)[-1] for path in fs.ls(store.quarantine, detail=False)} == {scanned, loaded}


def test_storage_needs_no_right_to_see_or_create_its_bucket(bucket: str, faulty: Faulty, tmp_path: Path) -> None:
    """Those of docs/cluster_setup.md do not have it, and a busy store does not answer such a request."""
    faulty.hides_bucket = True
    assert claim_storage(f"{bucket}/run", "mine")
    with hold_lease(f"{bucket}/run"):
        assert open_store(f"{bucket}/run").append(make_samples("fox-1"))
        artifact = Artifact(f"{bucket}/run", "checkpoint", "f00d")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights").write_bytes(b"weights")
        with artifact.writing():
            artifact.upload(tmp_path, "copy")
            artifact.publish(counts={}, seconds={})
        state = f"{artifact.path}/training/checkpoint_1"
        pyarrow.fs.copy_files(
            str(tmp_path),
            state,
            source_filesystem=pyarrow.fs.LocalFileSystem(),
            destination_filesystem=arrow_filesystem(artifact),
        )
    for path in (f"{artifact.path}/copy", state):
        assert artifact.fs.cat_file(f"{path}/model/weights") == b"weights"


def test_sample_store_in_a_folder_whose_name_is_a_pattern(storage: str) -> None:
    neighbor = open_store(f"{storage}/a1-b")
    left = neighbor.append(make_samples(*IDS[:8]))
    store = open_store(f"{storage}/{ODD_NAME}")
    names = [store.append(make_samples(*IDS[start : start + 8])) for start in (0, 8)]
    assert store.part_names() == sorted(names)
    store.artifact.fs.pipe_file(f"{store.folder}/{names[0]}", b"corrupt")
    assert missing_in(store.index(IDS[:16])) == list(range(8))
    assert store.artifact.fs.exists(f"{store.quarantine}/{names[0]}")
    store.artifact.publish(counts={}, seconds={})
    assert other_fingerprints(f"{storage}/{ODD_NAME}", "samples", []) == ["f00d"]
    store.artifact.remove("parts")
    assert store.part_names() == []
    assert neighbor.part_names() == [left]


def test_artifact_is_visible_once_it_is_published(storage: str, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(os.urandom(1 << 20))
    for number in range(4):
        artifact = Artifact(storage, "checkpoint", f"{number:04d}")
        table = pa.table({"row": list(range(100))})
        with artifact.writing():
            artifact.upload(tmp_path, "model")
            artifact.write_table("rows.parquet", table)
            assert artifact.manifest() is None
            manifest = artifact.publish(counts={"rows": 100}, seconds={})
        again = Artifact(storage, "checkpoint", f"{number:04d}")
        assert again.manifest() == manifest
        assert again.read_table("rows.parquet").equals(table)
        assert again.fs.cat_file(f"{again.path}/model/weights") == (tmp_path / "weights").read_bytes()
    half = Artifact(storage, "checkpoint", "half")

    def fail() -> None:
        with half.writing():
            half.upload(tmp_path, "model")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not half.fs.exists(half.path)
    assert other_fingerprints(storage, "checkpoint", ["0000"]) == ["0001", "0002", "0003"]


def test_hold_lease_admits_one_driver_at_a_time(storage: str) -> None:
    inside: list[int] = []
    most: list[int] = []

    def drive(number: int) -> None:
        with hold_lease(storage, period=2.0):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.2)
            inside.remove(number)

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4
    fs, path = fsspec.url_to_fs(f"{storage}/driver.json")
    assert not fs.exists(path)
