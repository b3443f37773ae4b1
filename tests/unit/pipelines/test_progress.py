"""The progress of a run: what is counted, and how it is shown."""

import time
from collections import Counter

import pytest

from pipelines import progress
from pipelines.progress import ProgressSpec, ProgressTracker, RunProgress, show_progress
from pos2distill.errors import UserError
from pos2distill.sampling.failure_guard import FailureGuard


def make_spec(label: str = "distill", total: int = 20, stored: dict[str, int] | None = None) -> ProgressSpec:
    return ProgressSpec("run", label, total, stored or {}, FailureGuard(0.5, total))


def line(spec: ProgressSpec, current: RunProgress, *, done: int = 0, seconds: float = 10.0) -> str:
    return progress._line(spec, current.count(spec.label), done, seconds, current)


def test_line_says_that_processes_start_until_one_has_reported() -> None:
    tracker = ProgressTracker(make_spec(stored={"kept": 3}))
    assert line(tracker.spec, tracker.read()) == ("distill: starting processes and loading models; sampled 3, kept 3")
    tracker.heartbeat("samplers", "a")
    assert line(tracker.spec, tracker.read()) == (
        "distill: 0 of 20 examples, 0.00 a second, time left unknown; sampled 3, kept 3, samplers 1"
    )


def test_line_says_how_long_training_will_take() -> None:
    """Counted are examples that training has processed, kept or not; the total is that of all epochs."""
    current = RunProgress(stored=Counter(kept=6, wrong=4), trained=15, steps=3, loss=0.25)
    assert line(make_spec(), current, done=5) == (
        "distill: 15 of 20 examples, 1.00 a second, 5 s left; sampled 10, kept 6, step 3, loss 0.2500"
    )


def test_line_of_sampling_counts_stored_samples() -> None:
    current = RunProgress(stored=Counter(kept=6, failed=4))
    assert line(make_spec("sample", stored={"kept": 5}), current, done=5) == (
        "sample: 10 of 20 examples, 0.50 a second, 20 s left; sampled 10, kept 6, failed 4"
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
    assert lines[0] == "distill: starting processes and loading models; sampled 0, kept 0"
    assert lines[-1].startswith("distill: 4 of 4 examples, ")
    assert lines[-1].endswith("0 s left; sampled 0, kept 0, step 2, loss 0.4000")


def test_tracker_raises_after_too_many_failed_samples_and_has_counted_them() -> None:
    tracker = ProgressTracker(make_spec(total=4))
    with pytest.raises(UserError, match="samples failed"):
        tracker.count_stored(["failed"] * 4, ["out of memory"] * 4, ["a", "b", "c", "d"])
    assert tracker.read().stored == {"failed": 4}


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
