import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pos2distill.config import ModelSection, Recipe
from pos2distill.errors import CorruptState, Stopped, UserError
from pos2distill.store.artifacts import Artifact
from pos2distill.training import step_log, worker
from pos2distill.training.distributed import DistContext
from pos2distill.training.loop import TrainingLoop
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.state import write_state
from pos2distill.training.worker import clear_scratch_folder
from tests.support.commands import run_distill


def test_clear_scratch_folder_removes_what_dead_workers_left_and_only_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine: Any = SimpleNamespace(checkpoint=SimpleNamespace(url="s3://b/mine"))
    other: Any = SimpleNamespace(checkpoint=SimpleNamespace(url="s3://b/other"))
    first: Any = SimpleNamespace(local_rank=0)
    second: Any = SimpleNamespace(local_rank=1)
    kept = clear_scratch_folder(other, first)
    (kept / "rank-0").mkdir()
    scratch = clear_scratch_folder(mine, first)
    (scratch / "rank-5" / "40-x").mkdir(parents=True)  # left by a rank that now runs on another node
    assert clear_scratch_folder(mine, second) == scratch
    assert (scratch / "rank-5").exists()  # one worker of a node removes it
    assert not list(clear_scratch_folder(mine, first).iterdir())
    assert (kept / "rank-0").exists()


SHAPES = {"weight": (2, 3), "bias": (2,)}


class FakeSession:
    """A worker with these saved states, the newest first, whose copies are closed after use."""

    def __init__(self, *states: Path) -> None:
        self.states = states
        self.dist = DistContext()
        self.reader_rank, self.readers = 0, 1
        self.closed: list[str] = []
        self.warned: list[str] = []
        self.warn = self.warned.append

    def saved_states(self) -> Iterator[Path]:
        yield from self.states

    def state_url(self, state: Path) -> str:
        return f"s3://b/{state.name}"

    @contextmanager
    def opened_state(self, state: Path, scratch: Path) -> Iterator[Path]:
        yield state
        self.closed.append(state.name)


def save(folder: Path, step: int) -> Path:
    """A state of two ranks."""
    for rank in range(2):
        write_state(folder, SHAPES, lambda kind, name: torch.ones(SHAPES[name]), step=step, rank=rank, world_size=2)
    TrainingProgress(step, 0, np.zeros(4, bool)).save(folder)
    return folder


def resumed(session: Any, shapes: dict[str, tuple[int, ...]] = SHAPES) -> tuple[TrainingProgress, list[str]]:
    """The progress, and the names of the states that were loaded."""
    loaded: list[str] = []
    strategy: Any = SimpleNamespace(
        state_shapes=lambda: shapes, load_state=lambda stored: loaded.append(stored.folder.name)
    )
    job: Any = SimpleNamespace(checkpoint=Artifact("s3://b", "checkpoint", "f"))
    return worker.resume(job, session, strategy, 4, Path()), loaded


@pytest.mark.parametrize("number", [0, 1])
def test_resume_takes_the_state_before_one_with_a_corrupt_file(tmp_path: Path, number: int) -> None:
    """Whichever file it is: this worker alone reads this copy."""
    session = FakeSession(save(tmp_path / "newest", 6), save(tmp_path / "before", 3))
    file = f"state-0000{number}-of-00002-000.safetensors"
    (tmp_path / "newest" / file).write_bytes(b"")
    progress, loaded = resumed(session)
    assert (progress.step, loaded) == (3, ["before"])
    assert session.closed == ["newest", "before"]
    (warning,) = session.warned
    assert warning.startswith(f"s3://b/newest/{file}: corrupt (")
    assert warning.endswith("; training continues from an earlier state, at step 3")


@pytest.mark.parametrize("corrupt", [0, 1])
def test_resume_on_one_of_two_readers_checks_its_own_files_and_heeds_the_other(tmp_path: Path, corrupt: int) -> None:
    session = FakeSession(save(tmp_path / "newest", 6), save(tmp_path / "before", 3))
    session.reader_rank, session.readers = 1, 2
    (tmp_path / "newest" / f"state-0000{corrupt}-of-00002-000.safetensors").write_bytes(b"")
    found_here: list[bool] = []

    def gather(found: object) -> list[object]:
        """What the other reader finds: the corrupt file, if it is the first."""
        found_here.append(found is not None)
        is_first_state = len(found_here) == 1
        return [CorruptState("s3://b/newest: corrupt") if corrupt == 0 and is_first_state else None, found]

    session.dist = SimpleNamespace(rank=1, all_gather_object=gather)  # type: ignore[assignment]
    progress, loaded = resumed(session)
    assert (progress.step, loaded) == (3, ["before"])
    assert found_here == [corrupt == 1, False]
    assert session.warned == []  # rank 0 says it once


def test_resume_closes_a_state_before_it_raises_what_is_wrong_with_it(tmp_path: Path) -> None:
    """A copy of many gigabytes would stay on the disk."""
    session = FakeSession(save(tmp_path / "newest", 6), save(tmp_path / "before", 3))
    remedy = "; remove s3://b/checkpoint-f/training to train again from the samples"
    with pytest.raises(UserError) as caught:
        resumed(session, {"weight": (2, 4), "bias": (2,)})
    assert str(caught.value) == (
        f"s3://b/newest/state.json: the state of another model (weight: [2, 3]; this model: [2, 4]){remedy}"
    )
    assert session.closed == ["newest"]
    for name in ("newest", "before"):
        (tmp_path / name / "progress.json").unlink()
    with pytest.raises(UserError) as caught:
        resumed(session)
    assert str(caught.value) == f"s3://b/newest/progress.json: missing{remedy}"


def test_run_worker_closes_trackers_if_training_cannot_begin(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart in this process opens them again."""
    closed: list[str] = []
    tracker = SimpleNamespace(name="tensorboard", close=lambda: closed.append("tensorboard"))
    monkeypatch.setattr(step_log, "open_tracker", lambda *_: tracker)

    def fail(*_: object) -> None:
        raise RuntimeError("no room for the optimizer")

    monkeypatch.setattr(worker, "Checkpointer", fail)
    with pytest.raises(RuntimeError, match="no room"):
        run_distill(make_recipe(runtime={"executor": "local", "trackers": ["tensorboard"]}))
    assert closed == ["tensorboard"]


def test_run_worker_does_not_gather_in_the_group_of_samples_after_a_stop(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the thread that prepares batches may wait for a rank whose own has failed, for days."""
    gathered: list[object] = []

    def stop(*_: object) -> bool:
        gathered.clear()
        return False

    gather = DistContext.all_gather_object
    monkeypatch.setattr(TrainingLoop, "train", stop)

    def record(dist: DistContext, value: object) -> list[object]:
        gathered.append(value)
        return gather(dist, value)

    monkeypatch.setattr(DistContext, "all_gather_object", record)
    with pytest.raises(Stopped, match="stopped after step 0"):
        run_distill(make_recipe(runtime={"executor": "local"}))
    assert gathered == []


def test_run_worker_meets_the_other_ranks_for_the_last_time_before_the_model_is_saved(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank uploads it alone, which may take longer than the half hour that the others wait for a rank."""
    calls: list[str] = []
    reduce, save = DistContext.all_reduce_max, worker.save_model

    def record_reduce(dist: DistContext, value: int) -> int:
        calls.append("reduce")
        return reduce(dist, value)

    def record_save(*arguments: Any) -> tuple[str, ...]:
        calls.append("save")
        return save(*arguments)

    monkeypatch.setattr(DistContext, "all_reduce_max", record_reduce)
    monkeypatch.setattr(worker, "save_model", record_save)
    run_distill(make_recipe(runtime={"executor": "local"}))
    assert calls.count("save") == 1
    assert calls[-2:] == ["reduce", "save"]


BASE = ModelSection(path="base")


class FakeStrategy:
    """Records the order of its calls and writes a file for each."""

    def __init__(self, rounding: float) -> None:
        self.calls: list[str] = []
        self.rounding = rounding

    def save(self, folder: Path) -> float:
        self._write("save", folder)
        return self.rounding

    def save_adapter(self, folder: Path) -> None:
        self._write("save_adapter", folder)

    def _write(self, call: str, folder: Path) -> None:
        self.calls.append(call)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "new").write_text(call)


@pytest.fixture
def save_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`save_model(storage, lora=…, student_start=…, rounding=…)`: the calls, files of the checkpoint, warnings."""
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer").write_text(""))
    monkeypatch.setattr(worker, "load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(worker, "copy_other_configs", lambda *_: None)

    def save(
        storage: str, *, lora: Any, student_start: ModelSection = BASE, rounding: float = 0.1
    ) -> tuple[list[str], set[str], tuple[str, ...]]:
        scratch = tmp_path / "scratch"
        study = SimpleNamespace(model=BASE, training=SimpleNamespace(lora=lora, learning_rate=3e-6))
        artifact = Artifact(storage, "checkpoint", "f")
        killed = Path(artifact.path if artifact.is_local else scratch)
        for folder in ("model", "adapter"):  # left by a run that was killed while it saved
            (killed / folder).mkdir(parents=True)
            (killed / folder / "old").write_text("")
        strategy: Any = FakeStrategy(rounding)
        job: Any = SimpleNamespace(study=study, student_start=student_start, checkpoint=artifact)
        session: Any = SimpleNamespace(dist=DistContext(), warn=None)
        warnings = worker.save_model(job, session, strategy, scratch)
        found = artifact.fs.find(artifact.path)
        return strategy.calls, {path.removeprefix(f"{artifact.path}/") for path in found}, warnings

    return save


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_save_model_writes_adapters_by_themselves_too(save_model: Any, tmp_path: Path, scheme: str) -> None:
    calls, files, warnings = save_model(f"{scheme}{tmp_path}/storage", lora=object())
    assert warnings == ()
    assert calls == ["save_adapter", "save"]  # `save` may round the weights
    assert files == {"adapter/new", "model/new", "model/tokenizer"}


@pytest.mark.parametrize(
    ("lora", "student_start"), [(None, BASE), (object(), ModelSection(path="storage/checkpoint-a/model"))]
)
def test_save_model_writes_no_adapter_that_would_not_fit_the_studys_model(
    save_model: Any, tmp_path: Path, lora: Any, student_start: ModelSection
) -> None:
    calls, files, _ = save_model(f"memory://{tmp_path}/storage", lora=lora, student_start=student_start)
    assert calls == ["save"]
    assert files == {"model/new", "model/tokenizer"}


@pytest.mark.parametrize("student_start", [BASE, ModelSection(path="storage/checkpoint-a/model")])
def test_save_model_warns_of_an_update_that_rounding_changed(
    save_model: Any, tmp_path: Path, student_start: ModelSection
) -> None:
    """The adapters of a later round are not written."""
    storage = f"memory://{tmp_path}/storage"
    _, _, warnings = save_model(storage, lora=object(), student_start=student_start, rounding=0.834)
    exact = f"; {storage}/checkpoint-f/adapter has the exact update" if student_start == BASE else ""
    assert warnings == (
        f"training.learning_rate: 3e-06: rounding to bfloat16 changed the adapters' update in the merged model by 83%"
        f"{exact}; a higher rate loses less",
    )
