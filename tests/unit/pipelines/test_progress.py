"""The progress of a run: what is counted, and how it is shown."""

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines import progress
from pipelines.progress import (
    ProgressSpec,
    ProgressTracker,
    RunProgress,
    StageProgress,
    show_progress,
    show_stage,
)
from pipelines.stages import distill
from pos2distill.errors import UserError
from pos2distill.sampling.failure_guard import FailureGuard
from pos2distill.store.artifacts import Artifact
from pos2distill.store.selection import Selection

IDS = 40


def make_spec(label: str = "distill", total: int = 20, stored: dict[str, int] | None = None) -> ProgressSpec:
    ids = pa.array([f"e{index}" for index in range(IDS)])
    return ProgressSpec(
        "run", label, total, stored or {}, FailureGuard(0.5, total), ids, Selection.unknown(IDS, wanted=total)
    )


def line(spec: ProgressSpec, current: RunProgress, *, done: int = 0, seconds: float = 10.0) -> str:
    return progress._line(spec, current.count(spec.label), done, seconds, current)


def test_line_says_that_processes_start_until_one_has_reported() -> None:
    tracker = ProgressTracker(make_spec(stored={"kept": 3}))
    assert line(tracker.spec, tracker.read()) == (
        "distill: starting processes and loading models, 10 s so far; sampled 3, kept 3"
    )
    tracker.heartbeat("samplers", "a")
    assert line(tracker.spec, tracker.read()) == (
        "distill: 0 of 20 examples, 0.00 a second, time left unknown; sampled 3, kept 3, samplers 1"
    )


def test_resumed_run_says_at_which_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = Artifact(str(tmp_path), "checkpoint", "feed")
    spec = make_spec(total=20)
    assert distill._resumed(spec, checkpoint) is spec  # it has made no step
    step = {"epoch": 0, "examples": ["e0"], "rows": 4, "loss": 0.5, "loss_trivial": 0.5, "loss_anchor": None}
    step |= {"weight_by_slot": {}, "grad_norm": 1.0, "learning_rate": 1e-3}
    lines = [json.dumps({**step, "step": number, "fraction": (number + 1) / 8}) for number in range(2)]
    folder = tmp_path / "checkpoint-feed" / "steps"
    folder.mkdir(parents=True)
    (folder / "00000.jsonl").write_text("\n".join(lines) + "\n")
    assert distill._resumed(spec, checkpoint).trained == 5
    assert capsys.readouterr().err == "distill: resuming at step 2 of about 8\n"


def test_line_says_how_long_training_will_take() -> None:
    """Counted are examples that training has processed, kept or not; the total is that of all epochs."""
    current = RunProgress(stored=Counter(kept=6, wrong=4), trained=15, steps=3, loss=0.25)
    assert line(make_spec(), current, done=5) == (
        "distill: 15 of 20 examples, 1.00 a second, 5 s left; sampled 10, kept 6, step 3, loss 0.2500"
    )


def test_line_of_sampling_counts_kept_samples() -> None:
    """Answers that are not kept are no part of what is left to do."""
    current = RunProgress(stored=Counter(kept=6, failed=4))
    assert line(make_spec("sample", stored={"kept": 5}), current, done=5) == (
        "sample: 6 of 20 examples, 0.10 a second, 140 s left; sampled 10, kept 6, failed 4"
    )


def test_show_progress_prints_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.01)
    tracker = ProgressTracker(make_spec(total=4))
    with show_progress(tracker.spec, tracker.read):
        time.sleep(0.1)
        tracker.count_step(2, 1, 0.5)
        time.sleep(0.1)
        tracker.count_step(4, 2, 0.4)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "distill: starting processes and loading models, 0 s so far; sampled 0, kept 0"
    assert lines[-1].startswith("distill: 4 of 4 examples, ")
    assert lines[-1].endswith("0 s left; sampled 0, kept 0, step 2, loss 0.4000")


def test_tracker_raises_after_too_many_failed_samples_and_has_counted_them() -> None:
    tracker = ProgressTracker(make_spec(total=4))
    with pytest.raises(UserError, match="samples failed"):
        tracker.count_stored(["failed"] * 4, ["out of memory"] * 4, [f"e{index}" for index in range(4)])
    assert tracker.read().stored == {"failed": 4}


def test_tracker_knows_which_examples_are_still_needed() -> None:
    """Wanted are 2: with e0 wrong, e1 and e3 are the first kept ones, and e4 is not needed."""
    tracker = ProgressTracker(make_spec("sample", total=2))
    ids = ["e0", "e2", "e3", "e4"]
    assert tracker.needed([]) == []
    assert tracker.needed(ids) == [True, True, True, True]
    assert tracker.needed(["e2", "e3"]) is None  # e0 and e1 may be enough
    tracker.count_stored(["wrong"], [None], ["e0"])
    assert tracker.needed(["e4"]) == [True]  # if one of two is kept, of e1 to e4 two are
    tracker.count_stored(["kept", "kept"], [None, None], ["e1", "e3"])
    assert tracker.needed(ids) == [True, True, True, False]  # e2 may be kept, but e3 is needed until then
    tracker.count_stored(["kept"], [None], ["e2"])
    assert tracker.needed(ids) == [True, True, False, False]


def test_tracker_lets_a_batch_begin_when_nothing_is_stored_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch at a time: what the others wait for may be queued behind them."""
    tracker = ProgressTracker(make_spec("sample", total=2))
    now = time.monotonic()
    monkeypatch.setattr("pipelines.progress.time.monotonic", lambda: now)
    assert tracker.needed(["e2", "e3"]) is None
    now += progress._PATIENCE_SECONDS
    assert tracker.needed(["e2", "e3"]) == [True, True]
    assert tracker.needed(["e4"]) is None


def test_tracker_counts_in_a_selection_that_cannot_be_written_to() -> None:
    """As Ray brings it to the tracker's actor."""
    spec = make_spec("sample", total=2)
    for array in (spec.selection.known_N, spec.selection.kept_N):
        array.setflags(write=False)
    tracker = ProgressTracker(spec)
    tracker.count_stored(["kept", "kept"], [None, None], ["e0", "e1"])
    assert tracker.needed(["e1", "e2"]) == [True, False]
    assert not spec.selection.known_N.any()


def test_tracker_forgets_actors_that_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = ProgressTracker(make_spec())
    tracker.heartbeat("samplers", "a")
    tracker.heartbeat("samplers", "b")
    assert tracker.read().actors == {"samplers": 2}
    now = time.monotonic()
    tracker.heartbeat("samplers", "b")
    monkeypatch.setattr("pipelines.progress.time.monotonic", lambda: now + progress._ACTIVE_SECONDS)
    assert tracker.read().actors == {"samplers": 1}


def test_tracker_keeps_the_first_fatal_error() -> None:
    tracker = ProgressTracker(make_spec())
    for error in ("the cause", "what follows from it"):
        tracker.report_fatal(error)
    assert tracker.fatal_error() == "the cause"


def test_stage_progress_counts_time_left_for_what_this_run_does() -> None:
    stage = StageProgress("evaluate base", 100, 40, "prompt")
    assert stage.line(12.0) == ("evaluate base: 40 of 100 prompts; loading models, then the first batch, 12 s so far")
    stage.update(20, "best 0.5")
    assert stage.line(10.0) == "evaluate base: 60 of 100 prompts, 2.00 a second, 20 s left; best 0.5"


def test_show_stage_prints_lines_without_a_terminal_unless_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.01)
    monkeypatch.delenv("POS2DISTILL_QUIET", raising=False)
    with show_stage("evaluate base", 4, done=0, unit="prompt") as stage:
        time.sleep(0.1)
        stage.update(4)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("evaluate base: 0 of 4 prompts; loading models, then the first batch, 0 s so far")
    assert lines[-1].startswith("evaluate base: 4 of 4 prompts, ")
    monkeypatch.setenv("POS2DISTILL_QUIET", "1")
    with show_stage("evaluate base", 4, done=0, unit="prompt") as stage:
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_tracker_of_a_resumed_run_starts_at_its_checkpoint() -> None:
    tracker = ProgressTracker(replace(make_spec(), trained=5))
    assert tracker.read().count("distill") == 5
