"""When the training state is saved."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from pos2distill.config import CheckpointsSection
from pos2distill.training import checkpointer
from pos2distill.training.checkpointer import Checkpointer
from pos2distill.training.distributed import DistContext
from pos2distill.training.loop import Action
from pos2distill.training.progress import TrainingProgress


class Session:
    """The session of one rank: what is requested, and what was saved."""

    def __init__(self, rank: int = 0, uploads: Literal["at once", "slowly"] = "at once") -> None:
        self.dist = DistContext(rank, 2)
        self.stop = False
        self.preempted = False
        self.saved: list[int] = []
        self.slowly = uploads == "slowly"
        self.uploading: Path | None = None

    def stop_requested(self) -> bool:
        assert self.dist.rank == 0
        return self.stop

    def is_preempted(self) -> bool:
        return self.preempted

    def save_state(self, step: int, folder: Path) -> None:
        self.saved.append(step)
        self.uploading = folder
        if not self.slowly:
            self.end_upload()

    def wait_until_listed(self) -> None:
        assert self.dist.rank == 0

    def end_upload(self) -> None:
        assert self.uploading
        self.uploading.rmdir()


class NoState:
    """A strategy without weights."""

    def save_state(self, folder: Path) -> None:
        assert not any(folder.iterdir())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(minutes=0.0)
    now.time = SimpleNamespace(monotonic=lambda: 60 * now.minutes)
    monkeypatch.setattr(checkpointer, "time", now.time)
    return now


def make(session: Session, tmp_path: Path, step: int = 0, **settings: Any) -> Checkpointer:
    job: Any = SimpleNamespace(runtime=SimpleNamespace(checkpoints=CheckpointsSection(**settings)))
    return Checkpointer(job, session, NoState(), None, step, tmp_path)  # type: ignore[arg-type]


def save(saver: Checkpointer, step: int) -> None:
    saver.save(TrainingProgress(step, 0, np.zeros(4, bool)))


def test_checkpointer_saves_every_few_steps_and_never_within_one(clock: SimpleNamespace, tmp_path: Path) -> None:
    saver = make(Session(), tmp_path, step=10, steps=3)
    assert saver.requested_action(12, False) is Action.CONTINUE
    assert saver.requested_action(13, True) is Action.CONTINUE
    assert saver.requested_action(13, False) is Action.CHECKPOINT
    save(saver, 13)
    assert saver.requested_action(13, False) is Action.CONTINUE
    assert saver.requested_action(16, False) is Action.CHECKPOINT
    saver.close()


def test_checkpointer_saves_after_a_time_if_a_step_was_made(clock: SimpleNamespace, tmp_path: Path) -> None:
    saver = make(Session(), tmp_path, minutes=15)
    clock.minutes = 16.0
    assert saver.requested_action(0, False) is Action.CONTINUE
    assert saver.requested_action(1, True) is Action.CONTINUE
    assert saver.requested_action(1, False) is Action.CHECKPOINT
    save(saver, 1)
    clock.minutes = 30.0
    assert saver.requested_action(2, False) is Action.CONTINUE
    saver.close()


def test_checkpointer_saves_once_at_a_notice_also_within_a_step(clock: SimpleNamespace, tmp_path: Path) -> None:
    session = Session(rank=1)
    saver = make(session, tmp_path)
    session.preempted = True
    assert saver.requested_action(4, True) is Action.CHECKPOINT_NOW
    save(saver, 4)
    assert saver.requested_action(4, True) is Action.CONTINUE
    assert saver.requested_action(5, False) is Action.CONTINUE
    assert session.saved == [4]
    saver.close()


def test_checkpointer_does_not_save_again_for_a_notice_that_arrives_later_than_at_another_rank(
    clock: SimpleNamespace, tmp_path: Path
) -> None:
    session = Session(rank=1)
    saver = make(session, tmp_path)
    save(saver, 4)  # as another rank requested
    session.preempted = True
    assert saver.requested_action(4, True) is Action.CONTINUE
    assert saver.requested_action(5, True) is Action.CONTINUE
    saver.close()


def test_checkpointer_saves_one_state_once(clock: SimpleNamespace, tmp_path: Path) -> None:
    """A stop may follow a notice within one step."""
    session = Session()
    saver = make(session, tmp_path)
    for step in (4, 4, 5):
        save(saver, step)
    assert session.saved == [4, 5]
    saver.close()


def test_checkpointer_requests_a_stop_within_a_step(clock: SimpleNamespace, tmp_path: Path) -> None:
    session = Session()
    saver = make(session, tmp_path, steps=1)
    session.stop = True
    assert saver.requested_action(0, True) is Action.STOP
    assert saver.requested_action(1, False) is Action.STOP
    saver.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpointer_puts_off_a_regular_checkpoint_while_any_rank_uploads_the_last_one(
    clock: SimpleNamespace, tmp_path: Path, rank: int
) -> None:
    """The rank that uploads would keep all others waiting."""
    sessions = [Session(each, uploads="slowly" if each == rank else "at once") for each in (0, 1)]
    savers = [make(session, tmp_path, steps=1) for session in sessions]
    for saver in savers:
        save(saver, 1)

    def requested() -> Action:
        return max(saver.requested_action(2, False) for saver in savers)

    assert requested() is Action.POSTPONE
    assert savers[rank].requested_action(2, True) is Action.CONTINUE
    sessions[1].preempted = True
    assert requested() is Action.CHECKPOINT_NOW
    assert requested() is Action.POSTPONE
    sessions[rank].end_upload()
    assert requested() is Action.CHECKPOINT
    sessions[0].stop = True
    assert requested() is Action.STOP
    for saver in savers:
        saver.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpointer_saves_after_the_log_and_the_second_state_once_the_first_is_listed(
    clock: SimpleNamespace, tmp_path: Path, rank: int
) -> None:
    """Steps after a checkpoint are made again, but a checkpoint whose steps are not in the log would lose them.

    A log with the steps of a second state means that the list of states exists.
    """
    events: list[str] = []
    session = Session(rank)

    def save_state(step: int, folder: Path) -> None:
        events.append("save")
        shutil.rmtree(folder)

    session.save_state = save_state  # type: ignore[method-assign]
    session.wait_until_listed = lambda: events.append("wait")  # type: ignore[method-assign]
    saver = make(session, tmp_path)
    if rank == 0:
        saver.log = SimpleNamespace(flush=lambda: events.append("flush"))  # type: ignore[assignment]
    for step in (4, 8):
        save(saver, step)
    expected = ["flush", "save", "wait", "flush", "save"]
    assert events == (expected if rank == 0 else ["save", "save"])
    saver.close()


def test_checkpointer_has_one_checkpoint_on_disk_even_at_a_notice(clock: SimpleNamespace, tmp_path: Path) -> None:
    session = Session(rank=1, uploads="slowly")
    saver = make(session, tmp_path)
    save(saver, 4)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert session.saved == [4]
        assert len(list((tmp_path / "rank-1").iterdir())) == 1
        session.end_upload()

    clock.time.sleep = sleep
    save(saver, 5)
    assert waited
    assert session.saved == [4, 5]
    assert len(list((tmp_path / "rank-1").iterdir())) == 1
    saver.close()
    assert (tmp_path / "rank-1").exists()  # the upload still reads from it
