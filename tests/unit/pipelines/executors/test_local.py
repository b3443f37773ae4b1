"""The parts of the local executor's training worker that need no model."""

import asyncio
import errno
import gc
import io
import os
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipelines.executors import local, state_list
from pipelines.executors.local import LocalExecutor, LocalSession, _EventLoop
from pipelines.plan import make_plan
from pos2distill.config import PoolSection, Recipe, Runtime
from pos2distill.errors import CorruptPart, Terminated
from pos2distill.sampling.operators import ActorOperator, Operator, TaskOperator
from pos2distill.store import retry
from pos2distill.store.artifacts import Artifact
from pos2distill.training import worker
from pos2distill.training.job import TrainingJob, TrainingOutcome
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


def build_session(recipe: Recipe) -> LocalSession:
    """A worker's session without samples, which keeps two states."""
    session = object.__new__(LocalSession)
    session.checkpoint, session.keep = make_plan(recipe).distill.artifact, 2
    session.corrupt_states = set()
    return session


@pytest.mark.parametrize("remote", [True, False])
def test_opened_state_is_copied_only_from_a_remote_storage(
    make_recipe: Callable[..., Recipe], tmp_path: Path, remote: bool
) -> None:
    storage = f"memory://{uuid.uuid4().hex}/{ODD_NAME}" if remote else str(tmp_path / ODD_NAME)
    session = build_session(make_recipe(runtime={"storage": storage}))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert not list(session.saved_states())
    saved = tmp_path / "state"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    session.save_state(3, saved)
    assert not saved.exists()
    (state,) = session.saved_states()
    with session.opened_state(state, scratch) as folder:
        assert (folder / "state.json").read_text() == "{}"
        assert folder.is_relative_to(scratch) == remote
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("method", ["write_json", "upload"])
def test_save_state_waits_for_a_storage_that_does_not_answer(
    session: LocalSession, tmp_path: Path, unreachable_once: Callable[[object, str], None], method: str
) -> None:
    save(session, tmp_path / "state", 3)
    unreachable_once(Artifact, method)
    save(session, tmp_path / "state", 6)
    assert list(local.LOCAL_STATES.read(session.checkpoint).values()) == [3, 6]


def test_save_state_waits_for_the_list_of_states(
    session: LocalSession, tmp_path: Path, unreachable_once: Callable[[object, str], None]
) -> None:
    """An outage after the state is uploaded, which the list does not name yet."""
    save(session, tmp_path / "state", 3)
    unreachable_once(state_list, "read_if_any")
    save(session, tmp_path / "state", 6)
    assert list(local.LOCAL_STATES.read(session.checkpoint).values()) == [3, 6]


def test_opened_state_waits_for_a_storage_that_does_not_answer(
    make_recipe: Callable[..., Recipe], tmp_path: Path, unreachable_once: Callable[[object, str], None]
) -> None:
    session = build_session(make_recipe(runtime={"storage": f"memory://{uuid.uuid4().hex}"}))
    name = save(session, tmp_path / "state")
    unreachable_once(local, "download")
    with session.opened_state(name, tmp_path) as folder:
        assert (folder / "state.json").read_text() == "{}"


@pytest.fixture
def unreachable_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[object, str], None]]:
    """`unreachable_once(module, name)`: the next call of this function fails as in an outage; a warning says so."""
    monkeypatch.setattr(retry, "_RETRY_SECONDS", 0.0)
    failures = []

    def apply(owner: object, name: str) -> None:
        function = getattr(owner, name)
        failures.append(ConnectionError("no route to host"))

        def failing(*arguments: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop()
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, failing)

    yield apply
    assert not failures
    assert "no route to host; workers wait until the storage answers" in capsys.readouterr().err


@pytest.fixture
def session(make_recipe: Callable[..., Recipe]) -> LocalSession:
    return build_session(make_recipe())


def save(session: LocalSession, folder: Path, step: int = 3) -> str:
    """Save a state. Returns its name."""
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    session.save_state(step, folder)
    return list(local.LOCAL_STATES.read(session.checkpoint))[-1]


def test_saved_states_that_are_corrupt_are_not_kept_in_place_of_intact_ones(
    session: LocalSession, tmp_path: Path
) -> None:
    """Two are kept: had the corrupt one counted, the next state would be the only one."""
    intact, corrupt = save(session, tmp_path / "state", 3), save(session, tmp_path / "state", 6)
    states = session.saved_states()
    assert next(states) == corrupt
    assert next(states) == intact  # asked for, since the newest one is corrupt
    new = save(session, tmp_path / "state", 9)
    assert list(local.LOCAL_STATES.read(session.checkpoint)) == [intact, new]
    folder = Path(session.checkpoint.path) / "training" / "local"
    assert sorted(path.name for path in folder.iterdir()) == sorted([intact, new, "latest.json"])
    newest = save(session, tmp_path / "state", 12)
    assert list(local.LOCAL_STATES.read(session.checkpoint)) == [new, newest]


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


def test_a_state_that_is_missing_in_a_remote_storage_is_an_empty_folder(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Whoever reads it finds its files missing, and an earlier state is tried."""
    session = build_session(make_recipe(runtime={"storage": f"memory://{uuid.uuid4().hex}"}))
    with session.opened_state("00000003-gone", tmp_path) as folder:
        assert not list(folder.iterdir())
    assert not list(tmp_path.glob("resume"))
    with pytest.raises(MemoryError), session.opened_state("00000003-gone", tmp_path):
        raise MemoryError
    assert not list(tmp_path.glob("resume"))


class Model:
    """Stands for a model on a GPU: only the garbage collector frees it, since it is part of a reference cycle."""

    def __init__(self) -> None:
        self.itself = self

    def __call__(self, block: pa.Table) -> pa.Table:
        return block


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Model]]:
    """The test adds its models. When torch returns the GPU's memory, all of them must be gone."""
    added: list[weakref.ref[Model]] = []

    def empty_cache() -> None:
        assert added
        assert not [model for model in added if model() is not None]
        added.clear()

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", empty_cache)
    return added


def test_map_returns_the_memory_of_its_models_at_its_end(models: list[weakref.ref[Model]]) -> None:
    def create() -> Model:
        model = Model()
        models.append(weakref.ref(model))
        return model

    operators: list[Operator] = [
        TaskOperator("read", lambda block: block),
        ActorOperator("samplers", create, PoolSection()),
    ]
    blocks = LocalExecutor(Runtime(executor="local")).map([pa.table({"x": [1]})] * 2, operators, label="test")
    assert next(blocks).num_rows == 1
    assert len(models) == 1
    assert len(list(blocks)) == 1
    assert not models


def test_train_returns_the_memory_of_each_attempt(
    monkeypatch: pytest.MonkeyPatch, models: list[weakref.ref[Model]]
) -> None:
    """A restart starts an engine again."""
    attempts: list[str] = []

    def run_worker(job: TrainingJob, session: LocalSession) -> TrainingOutcome:
        assert not models
        model = Model()
        models.append(weakref.ref(model))
        attempts.append("run")
        if len(attempts) == 1:
            raise CorruptPart
        return TrainingOutcome(True, 1, 1.0)

    monkeypatch.setattr(worker, "run_worker", run_worker)
    monkeypatch.setattr(local, "LOCAL_STATES", SimpleNamespace(repair=lambda checkpoint: None))
    monkeypatch.setattr(local, "LocalSession", lambda *_: SimpleNamespace(close=lambda: attempts.append("close")))
    runtime = Runtime(executor="local")
    job: Any = SimpleNamespace(runtime=runtime, checkpoint=None)
    stream: Any = SimpleNamespace(blocks=list, operators=[])
    coordinator: Any = None
    assert LocalExecutor(runtime).train(job, stream, coordinator).finished
    assert attempts == ["run", "close", "run", "close"]
    assert not models
