import errno
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pos2distill.errors import UserError
from pos2distill.records import SCHEMA_VERSION
from pos2distill.store.artifacts import Artifact, other_fingerprints
from pos2distill.store.files import write_bytes, write_json


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
def test_artifact_publish_rejects_corrupt_seconds(storage: str, content: bytes) -> None:
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
def test_artifact_read_json_rejects_what_is_no_such_object(storage: str, content: bytes) -> None:
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


def test_artifact_manifest_rejects_another_schema_version(storage: str) -> None:
    artifact = publish(storage)
    path = f"{artifact.path}/manifest.json"
    raw = json.loads(artifact.fs.cat_file(path))
    write_json(artifact.fs, path, {**raw, "schema_version": raw["schema_version"] + 1})
    with pytest.raises(UserError, match=r"written by another version of pos2distill; run its command again"):
        artifact.manifest()


@pytest.mark.parametrize(
    "content",
    ["", '{"schema_version": 1', "[]", "{}", json.dumps({"schema_version": SCHEMA_VERSION, "counts": {}})],
)
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
