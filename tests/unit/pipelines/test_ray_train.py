import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs
import pytest
import ray.train
from ray.train import Checkpoint

from pipelines.executors.ray.train import RaySession, arrow_filesystem
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.training.distributed import DistContext


def test_arrow_filesystem_wraps_the_artifacts_own(make_recipe: Callable[..., Recipe]) -> None:
    artifact = make_plan(make_recipe(runtime={"storage": "memory://bucket/run"})).distill.artifact
    filesystem = arrow_filesystem(artifact)
    assert filesystem is not None
    filesystem.create_dir(artifact.path)
    with filesystem.open_output_stream(f"{artifact.path}/note") as file:
        file.write(b"42")
    assert artifact.fs.cat_file(f"{artifact.path}/note") == b"42"


def test_arrow_filesystem_of_a_local_folder_is_none(make_recipe: Callable[..., Recipe]) -> None:
    assert arrow_filesystem(make_plan(make_recipe()).distill.artifact) is None


@pytest.fixture
def session() -> RaySession:
    made = object.__new__(RaySession)  # the constructor asks Ray Train for the worker's rank
    made.dist, made.local_rank, made.node_rank = DistContext(), 0, 0
    return made


def test_last_checkpoint_of_a_remote_storage_is_copied_to_scratch_and_removed(
    session: RaySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: Any = fsspec.filesystem("memory")
    folder = f"/{uuid.uuid4().hex}/checkpoint"
    memory.pipe(f"{folder}/state.json", b"{}")
    filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(memory))
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: Checkpoint(folder, filesystem))
    with session.last_checkpoint(tmp_path) as copy:
        assert copy is not None
        assert copy.is_relative_to(tmp_path)
        assert (copy / "state.json").read_bytes() == b"{}"
    assert not list(tmp_path.iterdir())


def test_last_checkpoint_of_a_mounted_storage_is_read_in_place(
    session: RaySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: Checkpoint.from_directory(stored))
    scratch = tmp_path / "scratch"
    with session.last_checkpoint(scratch) as folder:
        assert folder == stored
    assert stored.exists()
    assert not scratch.exists()


def test_last_checkpoint_of_a_new_run_is_none(
    session: RaySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    with session.last_checkpoint(tmp_path) as folder:
        assert folder is None
