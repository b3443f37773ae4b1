import errno
import io
import json
import os
import re
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


def test_write_bytes_leaves_nothing_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    store.append(make_samples("a"))

    def crash(*paths: Any) -> None:
        raise OSError("the machine went down")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="went down"):
        store.append(make_samples("b"))
    assert store.index(["a", "b"]).stored.tolist() == [True, False]
    assert len(list(Path(store.folder).iterdir())) == 1


def test_write_bytes_replaces_the_whole_file(storage: str) -> None:
    fs, path = fsspec.url_to_fs(f"{storage}/file")
    fs.makedirs(fs._parent(path), exist_ok=True)
    write_bytes(fs, path, b"a long first content")
    write_bytes(fs, path, b"short")
    assert fs.cat_file(path) == b"short"
    assert [entry.rsplit("/", 1)[-1] for entry in fs.ls(fs._parent(path), detail=False)] == ["file"]


# --- artifacts


def test_artifact_is_visible_once_published(storage: str) -> None:
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


def test_artifact_publish_counts_the_seconds_of_stopped_runs(storage: str) -> None:
    artifact = Artifact(storage, "samples", "abcd")
    artifact.add_seconds({"sample": 99.0})
    assert not artifact.fs.exists(artifact.path)  # this run has written nothing
    artifact.fs.makedirs(artifact.path)
    artifact.add_seconds({"sample": 2.0, "teacher": 0.5})
    artifact.add_seconds({"sample": 3.0})
    published = artifact.publish(counts={}, seconds={"sample": 4.0, "store": 1.0})
    assert published.seconds == {"sample": 9.0, "teacher": 0.5, "store": 1.0}
    # They are part of the manifest now, and a second publication would count them again.
    assert artifact.fs.ls(artifact.path, detail=False) == [f"{artifact.path}/manifest.json"]


@pytest.mark.parametrize("content", [b"garbage", b"[]", b'{"sample": "x"}', b""])
def test_artifact_publish_refuses_corrupt_seconds(storage: str, content: bytes) -> None:
    artifact = Artifact(storage, "samples", "abcd")
    artifact.fs.makedirs(artifact.path)
    artifact.fs.pipe_file(f"{artifact.path}/seconds.json", content)
    with pytest.raises(UserError) as caught:
        artifact.publish(counts={}, seconds={"sample": 4.0})
    assert str(caught.value) == (
        f"{artifact.path}/seconds.json: corrupt; expected the seconds of earlier runs by stage; delete this file and "
        f"run again: all else is kept"
    )
    artifact.remove("seconds.json")
    assert artifact.publish(counts={}, seconds={"sample": 4.0}).seconds == {"sample": 4.0}


@pytest.mark.parametrize("content", [b"garbage", b"[]", b'{"b": 1}', b"\xff"])
def test_artifact_read_json_refuses_what_is_no_such_object(storage: str, content: bytes) -> None:
    artifact = Artifact(storage, "examples", "abcd")
    artifact.fs.makedirs(artifact.path)
    with pytest.raises(UserError, match=r"a\.json: missing; delete .+ and run again to make it again"):
        artifact.read_json("a.json", "a")
    artifact.fs.pipe_file(f"{artifact.path}/a.json", b'{"a": 1, "b": 2}')
    assert artifact.read_json("a.json", "a") == {"a": 1, "b": 2}
    artifact.fs.pipe_file(f"{artifact.path}/a.json", content)
    with pytest.raises(UserError, match=r"a\.json: corrupt; delete .+ and run again to make it again"):
        artifact.read_json("a.json", "a")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_artifact_writing_removes_the_folder_after_a_failure(storage: str, error: type[BaseException]) -> None:
    artifact = Artifact(storage, "examples", "abcd")

    def fail() -> None:
        with artifact.writing():
            artifact.write_table("half.parquet", pa.table({"a": [1]}))
            raise error

    with pytest.raises(error):
        fail()
    assert not artifact.fs.exists(artifact.path)


def test_artifact_writing_removes_files_of_a_killed_run(storage: str) -> None:
    artifact = Artifact(storage, "examples", "abcd")
    with artifact.writing():
        artifact.write_table("left.parquet", pa.table({"a": [1]}))
    with artifact.writing():
        assert not artifact.fs.exists(f"{artifact.path}/left.parquet")


def test_artifact_upload_copies_a_folder(storage: str, tmp_path: Path) -> None:
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


def test_artifact_is_not_taken_for_unfinished_while_its_file_system_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount does for a moment. `os.path.exists`, and so fsspec, says then that nothing is there."""
    artifact = Artifact(str(tmp_path), "examples", "f00d")
    with artifact.writing():
        published = artifact.publish(counts={}, seconds={})
    opened = io.open

    def fail(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).endswith("manifest.json"):
            raise OSError(errno.ESTALE, "Stale file handle", file)
        return opened(file, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", fail)
        patched.setattr(os.path, "exists", lambda path: not str(path).endswith("manifest.json"))
        with pytest.raises(OSError, match="Stale"):
            artifact.manifest()
        with pytest.raises(OSError, match="Stale"), artifact.writing():
            pass
    assert artifact.manifest() == published


def test_artifact_manifest_refuses_another_schema_version(storage: str) -> None:
    artifact = publish(storage)
    path = f"{artifact.path}/manifest.json"
    raw = json.loads(artifact.fs.cat_file(path))
    write_json(artifact.fs, path, {**raw, "schema_version": raw["schema_version"] + 1})
    with pytest.raises(UserError, match=r"written by another version of pos2distill; use another runtime.storage"):
        artifact.manifest()


@pytest.mark.parametrize("content", ["", '{"schema_version": 1', "[]", "{}", '{"schema_version": 7, "counts": {}}'])
def test_artifact_manifest_reports_a_corrupt_file(storage: str, content: str) -> None:
    artifact = publish(storage)
    write_bytes(artifact.fs, f"{artifact.path}/manifest.json", content.encode())
    with pytest.raises(UserError, match=f"corrupt manifest .*; delete {re.escape(artifact.url)} and run again"):
        artifact.manifest()


def test_other_fingerprints_lists_finished_artifacts_only(storage: str) -> None:
    publish(storage, "bbbb")
    publish(storage, "aaaa")
    with Artifact(storage, "samples", "cccc").writing():
        pass  # not finished
    assert other_fingerprints(storage, "samples", ["dddd"]) == ["aaaa", "bbbb"]
    assert other_fingerprints(storage, "samples", ["aaaa"]) == ["bbbb"]
    assert other_fingerprints(storage, "checkpoint", ["aaaa"]) == []


# --- the folder of a run


def test_claim_storage_refuses_another_recipe(storage: str) -> None:
    claim_storage(storage, "mine")
    claim_storage(storage, "mine")
    with pytest.raises(UserError) as caught:
        claim_storage(storage, "yours")
    assert str(caught.value) == (
        f"{storage}: holds the run of recipe 'mine', not 'yours'; choose another runtime.storage"
    )


def test_release_storage_frees_a_folder_without_artifacts_only(storage: str) -> None:
    fs, path = fsspec.url_to_fs(storage)
    claim_storage(storage, "mine")
    fs.pipe_file(f"{path}/driver.json", b"{}")  # of the driver that releases the storage
    release_storage(storage)
    claim_storage(storage, "yours")
    publish(storage, "aaaa")
    release_storage(storage)
    assert check_storage(storage, "yours")


def test_check_storage_does_not_claim(storage: str) -> None:
    assert not check_storage(storage, "mine")
    claim_storage(storage, "yours")
    with pytest.raises(UserError, match="holds the run of recipe 'yours', not 'mine'"):
        check_storage(storage, "mine")


def test_claim_storage_refuses_a_folder_with_foreign_files(storage: str) -> None:
    fs, path = fsspec.url_to_fs(storage)
    fs.makedirs(path)
    claim_storage(storage, "mine")  # empty, so it can be claimed
    fs.rm_file(f"{path}/run.json")
    fs.pipe_file(f"{path}/thesis.tex", b"years of work")
    with pytest.raises(UserError, match=r"is not empty and holds no run \(no run.json\); choose another"):
        claim_storage(storage, "mine")
    assert fs.cat_file(f"{path}/thesis.tex") == b"years of work"
    with pytest.raises(UserError, match=r"thesis.tex: is a file, expected a folder \(runtime.storage\)$"):
        claim_storage(f"{storage}/thesis.tex", "mine")


def test_claim_storage_reports_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"/file/run: cannot be used \(Not a directory\) \(runtime.storage\); a part of"
    ):
        claim_storage(f"{tmp_path}/file/run", "mine")


def test_claim_storage_reports_a_corrupt_run_file(storage: str) -> None:
    claim_storage(storage, "mine")
    fs, path = fsspec.url_to_fs(storage)
    fs.pipe_file(f"{path}/run.json", b"")
    with pytest.raises(UserError, match=r"corrupt run.json \(.+\); choose another runtime.storage"):
        claim_storage(storage, "mine")


@pytest.mark.parametrize("name", ["run.json.0123abcd.partial", "driver.json.0123abcd.partial", "driver.json"])
def test_claim_storage_of_a_folder_in_which_a_run_is_about_to_start(tmp_path: Path, name: str) -> None:
    """Or in which one was killed then."""
    (tmp_path / name).write_text("{")
    assert claim_storage(str(tmp_path), "mine") is False
    assert check_storage(str(tmp_path), "mine")


def test_claim_storage_refuses_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "run.json.bak").write_text("{}")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        claim_storage(str(tmp_path), "mine")
