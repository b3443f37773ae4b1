"""What a reporter counts, and which samples it still needs."""

import time
from collections import Counter
from dataclasses import replace

import pytest

from pipelines.progress_reporter import _ACTIVE_SECONDS, _PATIENCE_SECONDS, ProgressReporter, RunProgress
from pos2distill.errors import MachineError, TransientError, UserError
from tests.support.progress_spec import make_spec


def test_run_progress_names_what_has_happened() -> None:
    current = RunProgress(stored=Counter(kept=6, wrong=4), trained=15, steps=3, loss=0.25, actors={"samplers": 2})
    assert str(current) == "sampled 10, kept 6, samplers 2, step 3, loss 0.2500"
    assert str(RunProgress(stored=Counter(kept=6, failed=4))) == "sampled 10, kept 6, failed 4"


def test_run_progress_of_sampling_counts_kept_samples() -> None:
    """Answers that are not kept are no part of what is left to do. Training counts samples over all epochs."""
    current = RunProgress(stored=Counter(kept=6, wrong=4), trained=15)
    assert (current.count("sample"), current.count("distill")) == (6, 15)


def test_progress_reporter_raises_after_too_many_failed_samples_and_has_counted_them() -> None:
    reporter = ProgressReporter(make_spec(total=4))
    with pytest.raises(UserError, match="samples failed"):
        reporter.count_stored(["failed"] * 20, ["out of memory"] * 20, [f"e{index}" for index in range(20)])
    assert reporter.read().stored == {"failed": 20}


def test_progress_reporter_compares_the_fraction_of_failed_samples_once_enough_are_kept() -> None:
    """Wanted are 2 of 40, so that most are never sampled. Half of them may fail."""
    reporter = ProgressReporter(make_spec(total=2))
    reporter.count_stored(["failed", "failed", "failed"], ["out of memory"] * 3, ["e0", "e1", "e2"])
    with pytest.raises(UserError, match="3 of 5 samples failed"):
        reporter.count_stored(["kept", "kept"], [None, None], ["e3", "e4"])
    reporter = ProgressReporter(make_spec(total=2))
    reporter.count_stored(
        ["failed", "failed", "kept", "kept"], ["out of memory"] * 2 + [None] * 2, ["e0", "e1", "e2", "e3"]
    )


def test_progress_reporter_tells_how_long_nothing_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pipelines.progress_reporter.time.monotonic", lambda: now)
    reporter = ProgressReporter(make_spec(total=5))
    now = 130.0
    assert reporter.read().idle_seconds == 30
    reporter.count_stored(["kept"], [None], ["e0"])
    now = 140.0
    assert reporter.read().idle_seconds == 10
    reporter.count_step(1, 1, 0.5)
    assert reporter.read().idle_seconds == 0


def test_progress_reporter_counts_a_sample_that_is_made_again_once() -> None:
    """As the samples of a node that is lost after they were stored and before they were trained on."""
    reporter = ProgressReporter(make_spec("sample", total=5))
    for _ in range(2):
        reporter.count_stored(["kept", "failed"], [None, "out of memory"], ["e0", "e1"])
    assert reporter.read().stored == {"kept": 1, "failed": 1}
    assert (reporter.spec.guard.seen, reporter.spec.guard.failed) == (2, 1)


def test_progress_reporter_takes_the_outcome_of_a_sample_that_is_made_again() -> None:
    """As the store does: with e1 wrong now, e2 is needed again."""
    reporter = ProgressReporter(make_spec("sample", total=2))
    reporter.count_stored(["kept", "kept"], [None, None], ["e0", "e1"])
    assert reporter.claim_needed(["e2"]) == [False]
    reporter.count_stored(["kept", "wrong"], [None, None], ["e0", "e1"])
    assert reporter.claim_needed(["e2"]) == [True]


def test_progress_reporter_knows_which_samples_are_still_needed() -> None:
    """Wanted are 2: with e0 wrong, e1 and e3 are the first kept ones, and e4 is not needed."""
    reporter = ProgressReporter(make_spec("sample", total=2))
    ids = ["e0", "e2", "e3", "e4"]
    assert reporter.claim_needed([]) == []
    assert reporter.claim_needed(ids) == [True, True, True, True]
    assert reporter.claim_needed(["e2", "e3"]) is None  # e0 and e1 may be enough
    reporter.count_stored(["wrong"], [None], ["e0"])
    assert reporter.claim_needed(["e4"]) == [True]  # if one of two is kept, of e1 to e4 two are
    reporter.count_stored(["kept", "kept"], [None, None], ["e1", "e3"])
    assert reporter.claim_needed(ids) == [True, True, True, False]  # e2 may be kept, but e3 is needed until then
    reporter.count_stored(["kept"], [None], ["e2"])
    assert reporter.claim_needed(ids) == [True, True, False, False]


def test_progress_reporter_lets_a_batch_begin_when_nothing_is_stored_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch at a time: what the others wait for may be queued behind them."""
    reporter = ProgressReporter(make_spec("sample", total=2))
    now = time.monotonic()
    monkeypatch.setattr("pipelines.progress_reporter.time.monotonic", lambda: now)
    assert reporter.claim_needed(["e2", "e3"]) is None
    now += _PATIENCE_SECONDS
    assert reporter.claim_needed(["e2", "e3"]) == [True, True]
    assert reporter.claim_needed(["e4"]) is None


def test_progress_reporter_counts_in_a_selection_that_cannot_be_written_to() -> None:
    """As Ray brings it to the reporter's actor."""
    spec = make_spec("sample", total=2)
    for array in (spec.selection.sampled_N, spec.selection.kept_N):
        array.setflags(write=False)
    reporter = ProgressReporter(spec)
    reporter.count_stored(["kept", "kept"], [None, None], ["e0", "e1"])
    assert reporter.claim_needed(["e1", "e2"]) == [True, False]
    assert not spec.selection.sampled_N.any()


def test_progress_reporter_forgets_actors_that_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = ProgressReporter(make_spec())
    reporter.heartbeat("samplers", "a")
    reporter.heartbeat("samplers", "b")
    assert reporter.read().actors == {"samplers": 2}
    now = time.monotonic()
    reporter.heartbeat("samplers", "b")
    monkeypatch.setattr("pipelines.progress_reporter.time.monotonic", lambda: now + _ACTIVE_SECONDS)
    assert reporter.read().actors == {"samplers": 1}


def test_progress_reporter_keeps_the_first_fatal_error() -> None:
    reporter = ProgressReporter(make_spec())
    cause = MachineError("the cause")
    for error in (cause, UserError("what follows from it")):
        reporter.report_fatal(error)
    assert reporter.fatal_error() is cause


def test_progress_reporter_of_a_resumed_run_starts_at_its_checkpoint() -> None:
    reporter = ProgressReporter(replace(make_spec(), trained=5))
    assert reporter.read().count("distill") == 5


def test_progress_reporter_ends_training_after_a_fatal_error_instead_of_saving() -> None:
    reporter = ProgressReporter(make_spec())
    reporter.request_stop()
    assert reporter.stop_requested()
    reporter.report_fatal(TransientError("the cause"))
    with pytest.raises(TransientError, match=r"^the cause$"):
        reporter.stop_requested()
