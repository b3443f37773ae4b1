"""The records of training steps, and the trackers that show them."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pos2distill.errors import UserError
from pos2distill.literal_paths import list_matching
from pos2distill.store import retry
from pos2distill.store.artifacts import Artifact
from pos2distill.store.files import write_bytes
from pos2distill.training import step_log
from pos2distill.training.step_log import StepLog
from pos2distill.training.trackers import TrackedRun

warned: list[str] = []


def open_log(storage: str, step: int, trackers: tuple[str, ...] = ("wandb",)) -> StepLog:
    job: Any = SimpleNamespace(
        name="run",
        checkpoint=Artifact(storage, "checkpoint", "f00d"),
        logged_settings={},
        runtime=SimpleNamespace(trackers=trackers),
        study=SimpleNamespace(training=SimpleNamespace(epochs=1)),
    )
    session: Any = SimpleNamespace(report_step=lambda *_: None, warn=warned.append)
    return StepLog(job, session, step, samples=8)


def write_steps(log: StepLog, first: int, last: int) -> None:
    """As training does between two checkpoints."""
    for step in range(first, last + 1):
        record: Any = SimpleNamespace(as_dict=lambda step=step: {"step": step}, fraction=0.5, step=step, loss=1.0)
        log(record)
    log.flush()


def steps_of(log: StepLog) -> list[int]:
    fs = log.artifact.fs
    lines = [line for path in list_matching(fs, log.folder, "*.jsonl") for line in fs.cat_file(path).splitlines()]
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, dict[str, str]]]:
    """Name, first step and known ids of the runs that were opened in trackers, which call each run `id`."""
    runs: list[tuple[str, int, dict[str, str]]] = []

    def open_tracker(name: str, run: TrackedRun) -> Any:
        assert name == "wandb"
        runs.append((run.name, run.step, dict(run.ids)))
        run.ids["wandb"] = "id"
        return Tracker(name, fails_from=99)

    monkeypatch.setattr(step_log, "open_tracker", open_tracker)
    return runs


def test_step_log_continues_the_run_of_its_trackers(
    storage: str, opened: list[tuple[str, int, dict[str, str]]]
) -> None:
    write_steps(open_log(storage, 0), 0, 5)
    write_steps(open_log(storage, 6), 6, 9)
    assert opened == [("run-f00d", 0, {}), ("run-f00d", 6, {"wandb": "id"})]
    log = open_log(storage, 10)
    file = f"{log.artifact.path}/trackers.json"
    for content in (b"", b"[]", b'{"wandb": {}}'):
        log.artifact.fs.pipe_file(file, content)
        with pytest.raises(UserError) as caught:
            open_log(storage, 10)
        assert str(caught.value) == (
            f"{storage}/checkpoint-f00d/trackers.json: corrupt; delete this file: training continues, with a new run "
            f"in each tracker (runtime.trackers)"
        )
    log.artifact.fs.rm_file(file)
    open_log(storage, 10)
    assert opened[-1] == ("run-f00d", 10, {})


def test_step_log_removes_steps_after_the_checkpoint(storage: str, opened: list[Any]) -> None:
    log = open_log(storage, 0)
    write_steps(log, 0, 3)
    write_steps(log, 4, 5)
    log = open_log(storage, 4)
    assert steps_of(log) == [0, 1, 2, 3]
    write_steps(log, 4, 7)
    assert steps_of(log) == list(range(8))


@pytest.mark.parametrize(("checkpoint", "records"), [(100, 4), (3, 4)])
def test_step_log_refuses_to_continue_without_the_records_of_earlier_steps(
    storage: str, opened: list[Any], checkpoint: int, records: int
) -> None:
    write_steps(open_log(storage, 0), 0, 3)
    with pytest.raises(UserError) as caught:
        open_log(storage, checkpoint)
    url = f"{storage}/checkpoint-f00d"
    assert str(caught.value) == (
        f"{url}/steps: holds {records} records of the {checkpoint} steps before the last checkpoint; delete {url} to "
        f"train again from the samples"
    )


class Tracker:
    """Fails from a step on, and where it is closed if it has not been."""

    def __init__(self, name: str, fails_from: int) -> None:
        self.name = name
        self.fails_from = fails_from
        self.logged: list[int] = []
        self.closed = threading.Event()

    def log(self, record: Any) -> None:
        if record.step >= self.fails_from:
            raise ConnectionError("the server\nis away")
        self.logged.append(record.step)

    def close(self) -> None:
        self.closed.set()
        if self.fails_from == 4:
            raise RuntimeError


def test_step_log_continues_without_a_tracker_that_fails(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = [Tracker("mlflow", 2), Tracker("tensorboard", 99), Tracker("wandb", 4)]
    by_name = {tracker.name: tracker for tracker in trackers}
    monkeypatch.setattr(step_log, "open_tracker", lambda name, run: by_name[name])
    log = open_log(storage, 0, tuple(by_name))
    warned.clear()
    write_steps(log, 0, 3)
    log.close()
    assert [each.logged for each in trackers] == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert steps_of(log) == [0, 1, 2, 3]
    assert all(each.closed.wait(10) for each in trackers)
    assert warned == [
        "runtime.trackers: mlflow failed (ConnectionError: the server is away); training continues without it; a run "
        "that is resumed logs to it again",
        "runtime.trackers: wandb could not be closed (RuntimeError: ), so that it may lack the last steps",
    ]


def test_step_log_opens_the_trackers_of_a_new_run_and_continues_a_run_without_them(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"mlflow": "7"}

    made: list[Tracker] = []

    def open_tracker(name: str, run: TrackedRun) -> Tracker:
        if name == "wandb":
            raise ConnectionError("the server\nis away")
        run.ids.update(ids)
        made.append(Tracker(name, fails_from=99))
        return made[-1]

    monkeypatch.setattr(step_log, "open_tracker", open_tracker)
    reason = "runtime.trackers: wandb cannot be opened (ConnectionError: the server is away)"
    with pytest.raises(UserError) as caught:
        open_log(storage, 0, ("mlflow", "wandb"))
    assert str(caught.value) == reason
    assert made[0].closed.is_set()
    write_steps(open_log(storage, 0, ("mlflow",)), 0, 3)
    for step in (0, 4):  # also before its first checkpoint, it is a run that trackers know
        warned.clear()
        log = open_log(storage, step, ("mlflow", "wandb"))
        assert warned == [f"{reason}; training continues without it"]
        assert [tracker.name for tracker in log.trackers] == ["mlflow"]
        write_steps(log, step, step + 3)


def test_step_log_waits_for_a_storage_that_does_not_answer(
    storage: str, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [ConnectionResetError("reset"), ConnectionResetError("reset")]

    def write(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        write_bytes(*arguments)

    monkeypatch.setattr(step_log, "write_bytes", write)
    monkeypatch.setattr(retry, "_RETRY_SECONDS", 0.0)
    log = open_log(storage, 0)
    warned.clear()
    write_steps(log, 0, 1)
    assert steps_of(log) == [0, 1]
    assert warned == ["reset; workers wait until the storage answers"]
