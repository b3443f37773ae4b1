import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from pos2distill.errors import UserError
from pos2distill.store.artifacts import (
    Artifact,
    check_storage,
    claim_storage,
    other_fingerprints,
    release_storage,
    write_bytes,
    write_json,
)
from tests.support.stores import make_samples, open_store

# --- one file at a time


def test_a_crash_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    store.append(make_samples("a"))

    def crash(*paths: Any) -> None:
        raise OSError("the machine went down")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="went down"):
        store.append(make_samples("b"))
    assert store.index(["a", "b"]).stored.tolist() == [True, False]
    assert len(list(Path(store.folder).iterdir())) == 1


def test_a_file_is_written_over_whole(storage: str) -> None:
    fs, path = fsspec.url_to_fs(f"{storage}/file")
    fs.makedirs(fs._parent(path), exist_ok=True)
    write_bytes(fs, path, b"a long first content")
    write_bytes(fs, path, b"short")
    assert fs.cat_file(path) == b"short"
    assert [entry.rsplit("/", 1)[-1] for entry in fs.ls(fs._parent(path), detail=False)] == ["file"]


# --- artifacts


def test_an_artifact_is_there_once_it_is_published(storage: str) -> None:
    artifact = Artifact(storage, "examples", "abcd")
    table = pa.table({"a": [1, 2]})
    with artifact.writing():
        artifact.write_table("rows.parquet", table)
        assert artifact.manifest() is None
        published = artifact.publish(counts={"rows": 2}, seconds={"examples": 0.5}, details={"note": "ä"})
    again = Artifact(storage, "examples", "abcd")
    assert again.manifest() == published
    assert (published.fingerprint, published.counts, published.seconds) == ("abcd", {"rows": 2}, {"examples": 0.5})
    assert again.read_table("rows.parquet").equals(table)
    assert Artifact(storage, "examples", "ffff").manifest() is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_half_written(storage: str, error: type[BaseException]) -> None:
    artifact = Artifact(storage, "examples", "abcd")

    def fail() -> None:
        with artifact.writing():
            artifact.write_table("half.parquet", pa.table({"a": [1]}))
            raise error

    with pytest.raises(error):
        fail()
    assert not artifact.fs.exists(artifact.path)


def test_what_a_killed_run_left_goes_first(storage: str) -> None:
    artifact = Artifact(storage, "examples", "abcd")
    with artifact.writing():
        artifact.write_table("left.parquet", pa.table({"a": [1]}))
    with artifact.writing():
        assert not artifact.fs.exists(f"{artifact.path}/left.parquet")


def test_a_folder_is_uploaded(storage: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "weights").write_bytes(b"123")
    artifact = Artifact(storage, "checkpoint", "abcd")
    with artifact.writing():
        artifact.upload(folder, "model")
    assert artifact.fs.cat_file(f"{artifact.path}/model/weights") == b"123"
    assert artifact.is_local is not storage.startswith("memory")


def publish(storage: str, fingerprint: str = "abcd") -> Artifact:
    artifact = Artifact(storage, "samples", fingerprint)
    with artifact.writing():
        artifact.publish(counts={}, seconds={})
    return artifact


def test_another_schema_version_is_refused(storage: str) -> None:
    artifact = publish(storage)
    path = f"{artifact.path}/manifest.json"
    raw = json.loads(artifact.fs.cat_file(path))
    write_json(artifact.fs, path, {**raw, "schema_version": raw["schema_version"] + 1})
    with pytest.raises(UserError, match=r"written by another version of this program; use another runtime.storage"):
        artifact.manifest()


@pytest.mark.parametrize("content", ["", '{"schema_version": 1', "[]", "{}", '{"schema_version": 4, "counts": {}}'])
def test_a_damaged_manifest_is_told(storage: str, content: str) -> None:
    artifact = publish(storage)
    write_bytes(artifact.fs, f"{artifact.path}/manifest.json", content.encode())
    with pytest.raises(UserError, match=f"damaged manifest .*; delete {artifact.url} and run again"):
        artifact.manifest()


def test_other_settings_stay_beside(storage: str) -> None:
    publish(storage, "bbbb")
    publish(storage, "aaaa")
    with Artifact(storage, "samples", "cccc").writing():
        pass  # not finished
    assert other_fingerprints(storage, "samples", "dddd") == ["aaaa", "bbbb"]
    assert other_fingerprints(storage, "samples", "aaaa") == ["bbbb"]
    assert other_fingerprints(storage, "checkpoint", "aaaa") == []


# --- the run's folder


def test_a_folder_belongs_to_one_recipe(storage: str) -> None:
    claim_storage(storage, "mine")
    claim_storage(storage, "mine")
    with pytest.raises(UserError) as caught:
        claim_storage(storage, "yours")
    assert str(caught.value) == (
        f"{storage}: holds the run of recipe 'mine', not 'yours'; choose another runtime.storage"
    )


def test_a_folder_in_which_nothing_was_made_is_given_back(storage: str) -> None:
    fs, path = fsspec.url_to_fs(storage)
    claim_storage(storage, "mine")
    fs.pipe_file(f"{path}/driver.json", b"{}")  # of whoever gives it back
    release_storage(storage)
    claim_storage(storage, "yours")
    publish(storage, "aaaa")
    release_storage(storage)
    assert check_storage(storage, "yours")


def test_looking_at_a_folder_does_not_take_it(storage: str) -> None:
    assert not check_storage(storage, "mine")
    claim_storage(storage, "yours")
    with pytest.raises(UserError, match="holds the run of recipe 'yours', not 'mine'"):
        check_storage(storage, "mine")


def test_a_folder_that_is_no_run_is_refused(storage: str) -> None:
    fs, path = fsspec.url_to_fs(storage)
    fs.makedirs(path)
    claim_storage(storage, "mine")  # empty: taken
    fs.rm(f"{path}/run.json")
    fs.pipe_file(f"{path}/thesis.tex", b"years of work")
    with pytest.raises(UserError, match=r"is not empty and holds no run \(no run.json\); choose another"):
        claim_storage(storage, "mine")
    assert fs.cat_file(f"{path}/thesis.tex") == b"years of work"
    with pytest.raises(UserError, match="is not empty and holds no run"):
        claim_storage(f"{storage}/thesis.tex", "mine")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"runtime.storage"):
        claim_storage(f"{tmp_path}/file/run", "mine")


def test_a_damaged_marker_is_told(storage: str) -> None:
    claim_storage(storage, "mine")
    fs, path = fsspec.url_to_fs(storage)
    fs.pipe_file(f"{path}/run.json", b"")
    with pytest.raises(UserError, match=r"run.json"):
        claim_storage(storage, "mine")
