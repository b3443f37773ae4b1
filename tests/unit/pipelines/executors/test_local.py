"""The parts of the local executor's training worker that need no model."""

import asyncio
import errno
import gc
import io
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.executors import local, saved_steps
from pipelines.executors.local import LocalSession, _EventLoop
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.errors import Terminated, UserError
from pos2distill.store import retry
from pos2distill.store.artifacts import Artifact
from tests.support.paths import ODD_NAME


def test_an_interrupt_leaves_no_traceback_behind(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio logs what a task met that nobody has asked for its result."""

    async def interrupted() -> None:
        raise Terminated

    async def answer_two() -> None:
        await asyncio.gather(interrupted(), interrupted())

    events = _EventLoop()
    with pytest.raises(Terminated):
        events.run(answer_two())
    events.close()
    del events
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("remote", [True, False])
def test_opened_state_is_copied_only_from_a_remote_storage(
    make_recipe: Callable[..., Recipe], tmp_path: Path, remote: bool
) -> None:
    storage = f"memory://{uuid.uuid4().hex}/{ODD_NAME}" if remote else str(tmp_path / ODD_NAME)
    session = object.__new__(LocalSession)  # without samples
    session.checkpoint, session.keep = make_plan(make_recipe(runtime={"storage": storage})).distill.artifact, 1
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert not list(session.saved_states())
    saved = tmp_path / "state"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    session.save_checkpoint(3, saved)
    assert not saved.exists()
    (state,) = session.saved_states()
    with session.opened_state(state, scratch) as folder:
        assert (folder / "state.json").read_text() == "{}"
        assert folder.is_relative_to(scratch) == remote
    assert not list(scratch.iterdir())


def test_list_of_saved_states_is_written_once_the_storage_answers(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An outage between the state and the list of states, which names it."""
    session = object.__new__(LocalSession)  # without samples
    session.checkpoint, session.keep = make_plan(make_recipe()).distill.artifact, 1
    monkeypatch.setattr(retry, "_RETRY_SECONDS", 0.0)
    failures = iter([ConnectionError("no route to host")])
    write_json = Artifact.write_json

    def failing_once(artifact: Artifact, path: str, content: object) -> None:
        for failure in failures:
            raise failure
        write_json(artifact, path, content)

    monkeypatch.setattr(Artifact, "write_json", failing_once)
    saved = tmp_path / "state"
    saved.mkdir()
    session.save_checkpoint(3, saved)
    assert list(local.LOCAL_STATES.read(session.checkpoint).values()) == [3]
    assert "no route to host; workers wait until the storage answers" in capsys.readouterr().err


@pytest.fixture
def session(make_recipe: Callable[..., Recipe]) -> LocalSession:
    made = object.__new__(LocalSession)  # without samples
    made.checkpoint, made.keep = make_plan(make_recipe()).distill.artifact, 2
    return made


def save(session: LocalSession, folder: Path, step: int = 3) -> str:
    """Save a state. Returns its name."""
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    session.save_checkpoint(step, folder)
    return list(local.LOCAL_STATES.read(session.checkpoint))[-1]


def test_a_list_of_states_that_cannot_be_read_for_now_is_not_an_empty_one(
    session: LocalSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty one, training would begin again and remove its steps."""
    name = save(session, tmp_path / "state")
    opened = io.open

    def fail(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).endswith("latest.json"):
            raise OSError(errno.ESTALE, "Stale file handle", file)
        return opened(file, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", fail)
        patched.setattr(os.path, "exists", lambda path: not str(path).endswith("latest.json"))
        with pytest.raises(OSError, match="Stale"):
            local.LOCAL_STATES.read(session.checkpoint)
    assert list(local.LOCAL_STATES.read(session.checkpoint)) == [name]


def test_a_local_state_is_on_the_disk_before_the_list_names_it(
    session: LocalSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []

    def sync(folder: Path) -> None:
        assert (folder / "state.json").exists()
        assert not local.LOCAL_STATES.read(session.checkpoint)
        synced.append(folder)

    monkeypatch.setattr(local, "sync_folder", sync)
    name = save(session, tmp_path / "state")
    assert [folder.name for folder in synced] == [name]


def test_states_whose_upload_was_cut_off_are_removed(session: LocalSession, tmp_path: Path) -> None:
    names = [save(session, tmp_path / "state"), save(session, tmp_path / "state")]
    folder = Path(session.checkpoint.path) / "training" / "local"
    (folder / "00000009-cut" / "inside").mkdir(parents=True)
    local.LOCAL_STATES.repair(session.checkpoint)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "latest.json"])


def test_a_listed_state_that_is_missing_is_taken_off_the_list(
    session: LocalSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the next state that is saved would replace the only one that is left."""
    left, missing = save(session, tmp_path / "state"), save(session, tmp_path / "state", 6)
    folder = Path(session.checkpoint.path) / "training" / "local"
    shutil.rmtree(folder / missing)
    assert saved_steps(session.checkpoint) == {"local": 3}
    local.LOCAL_STATES.repair(session.checkpoint)
    assert capsys.readouterr().err == (
        f"warning: {folder}/{missing}: missing, but listed in latest.json; training continues from the state at step "
        f"3\n"
    )
    new = save(session, tmp_path / "state")
    assert list(local.LOCAL_STATES.read(session.checkpoint)) == [left, new]
    assert (folder / left / "state.json").exists()
    for name in (left, new):
        shutil.rmtree(folder / name)
    for look in (saved_steps, local.LOCAL_STATES.repair):
        with pytest.raises(UserError) as caught:
            look(session.checkpoint)
        assert str(caught.value) == (
            f"{folder}/{new}: missing, but listed in latest.json; remove {folder.parent} to train again from the "
            f"samples"
        )
    assert list(local.LOCAL_STATES.read(session.checkpoint)) == [left, new]


@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_states_in_a_folder_that_cannot_be_listed_are_not_missing(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """As of a bucket that is busy. Otherwise the message would say that the training must begin again."""
    session = object.__new__(LocalSession)
    url = f"memory://{uuid.uuid4().hex}" if storage == "memory" else str(tmp_path / "run")
    session.checkpoint, session.keep = make_plan(make_recipe(runtime={"storage": url})).distill.artifact, 2
    save(session, tmp_path / "state")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Please reduce your request rate.")

    monkeypatch.setattr(type(session.checkpoint.fs), "ls", fail)
    for look in (local.LOCAL_STATES.present, local.LOCAL_STATES.repair):
        with pytest.raises((OSError, UserError), match="reduce your request rate"):
            look(session.checkpoint)


def test_a_state_that_is_missing_in_a_remote_storage_is_an_empty_folder(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Whoever reads it finds its files missing, and an earlier state is tried."""
    session = object.__new__(LocalSession)
    session.checkpoint = make_plan(make_recipe(runtime={"storage": f"memory://{uuid.uuid4().hex}"})).distill.artifact
    with session.opened_state("00000003-gone", tmp_path) as folder:
        assert not list(folder.iterdir())
    assert not list(tmp_path.glob("resume"))
    with pytest.raises(MemoryError), session.opened_state("00000003-gone", tmp_path):
        raise MemoryError
    assert not list(tmp_path.glob("resume"))
