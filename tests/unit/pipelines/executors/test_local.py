"""The parts of the local executor's training worker that need no model."""

import asyncio
import gc
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.executors import local
from pipelines.executors.local import LocalSession, _EventLoop
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.errors import Terminated
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
    assert [name[:8] for name in local.saved_folders(session.checkpoint)] == ["00000003"]
    assert "no route to host; workers wait until the storage answers" in capsys.readouterr().err
