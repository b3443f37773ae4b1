"""What a coordinator counts, and which samples it still needs."""

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipelines.run_coordinator import _ACTIVE_SECONDS, _PATIENCE_SECONDS, RunCoordinator, RunProgress
from pos2distill.errors import MachineError, TransientError, UserError
from pos2distill.sampling.operators import store_samples
from tests.support.coordinator_spec import make_spec
from tests.support.stores import make_samples, open_store


def test_run_progress_names_what_has_happened() -> None:
    current = RunProgress(stored=Counter(kept=6, wrong=4), trained=15, steps=3, loss=0.25, actors={"samplers": 2})
    assert str(current) == "sampled 10, kept 6, samplers 2, step 3, loss 0.2500"
    assert str(RunProgress(stored=Counter(kept=6, failed=4))) == "sampled 10, kept 6, failed 4"


def test_run_progress_of_sampling_counts_kept_samples() -> None:
    """Answers that are not kept are no part of what is left to do. Training counts samples over all epochs."""
    current = RunProgress(stored=Counter(kept=6, wrong=4), trained=15)
    assert (current.count("kept"), current.count("trained")) == (6, 15)


def test_run_coordinator_raises_after_too_many_failed_samples_and_has_counted_them() -> None:
    coordinator = RunCoordinator(make_spec(total=4))
    with pytest.raises(UserError, match="samples failed"):
        coordinator.count_stored(["failed"] * 20, ["out of memory"] * 20, [f"e{index}" for index in range(20)])
    assert coordinator.read().stored == {"failed": 20}


def test_run_coordinator_compares_the_fraction_of_failed_samples_once_enough_are_kept() -> None:
    """Wanted are 2 of 40, so that most are never sampled. Half of them may fail."""
    coordinator = RunCoordinator(make_spec(total=2))
    coordinator.count_stored(["failed", "failed", "failed"], ["out of memory"] * 3, ["e0", "e1", "e2"])
    with pytest.raises(UserError, match="3 of 5 samples failed"):
        coordinator.count_stored(["kept", "kept"], [None, None], ["e3", "e4"])
    coordinator = RunCoordinator(make_spec(total=2))
    coordinator.count_stored(
        ["failed", "failed", "kept", "kept"], ["out of memory"] * 2 + [None] * 2, ["e0", "e1", "e2", "e3"]
    )


def test_run_coordinator_tells_how_long_nothing_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pipelines.run_coordinator.time.monotonic", lambda: now)
    coordinator = RunCoordinator(make_spec(total=5))
    now = 130.0
    assert coordinator.read().idle_seconds == 30
    coordinator.count_stored(["kept"], [None], ["e0"])
    now = 140.0
    assert coordinator.read().idle_seconds == 10
    coordinator.report_step(1, 1, 0.5)
    assert coordinator.read().idle_seconds == 0


def test_run_coordinator_counts_a_sample_that_is_made_again_once() -> None:
    """As the samples of a node that is lost after they were stored and before they were trained on."""
    coordinator = RunCoordinator(make_spec("sample", total=5))
    for _ in range(2):
        coordinator.count_stored(["kept", "failed"], [None, "out of memory"], ["e0", "e1"])
    assert coordinator.read().stored == {"kept": 1, "failed": 1}
    assert (coordinator.spec.guard.seen, coordinator.spec.guard.failed) == (2, 1)


def test_run_coordinator_takes_the_outcome_of_a_sample_that_is_made_again() -> None:
    """As the store does: with e1 wrong now, e2 is needed again."""
    coordinator = RunCoordinator(make_spec("sample", total=2))
    coordinator.count_stored(["kept", "kept"], [None, None], ["e0", "e1"])
    assert coordinator.claim_needed(["e2"]) == [False]
    coordinator.count_stored(["kept", "wrong"], [None, None], ["e0", "e1"])
    assert coordinator.claim_needed(["e2"]) == [True]


def test_samples_that_are_made_again_replace_the_part_of_the_first_time(tmp_path: Path) -> None:
    """Although fewer of them are needed by then; otherwise the store would count some of each part."""
    store = open_store(str(tmp_path))
    coordinator = RunCoordinator(make_spec("sample", total=2))

    def make(*outcomes: tuple[str, str]) -> None:
        """Sample a block with these outcomes by id, as far as the coordinator finds it needed."""
        needed = coordinator.claim_needed([sample_id for sample_id, _ in outcomes])
        assert needed is not None
        made = [
            make_samples(each[0], outcome=each[1])
            for each, is_needed in zip(outcomes, needed, strict=True)
            if is_needed
        ]
        store_samples(pa.concat_tables(made), store.artifact, coordinator, return_samples=False)

    make(("e1", "kept"), ("e2", "kept"), ("e3", "wrong"))
    make(("e0", "kept"))
    assert coordinator.selection.end == 2
    make(("e1", "wrong"), ("e2", "wrong"), ("e3", "kept"))
    assert len(store.part_names()) == 2
    _, kept_N = store.read_index_and_kept(coordinator.spec.ids)
    assert np.flatnonzero(kept_N).tolist() == np.flatnonzero(coordinator.selection.kept_N).tolist() == [0, 3]


def test_run_coordinator_knows_which_samples_are_still_needed() -> None:
    """Wanted are 2: with e0 wrong, e1 and e3 are the first kept ones, and e4 is not needed."""
    coordinator = RunCoordinator(make_spec("sample", total=2))
    ids = ["e0", "e2", "e3", "e4"]
    assert coordinator.claim_needed([]) == []
    assert coordinator.claim_needed(ids) == [True, True, True, True]
    assert coordinator.claim_needed(["e2", "e3"]) is None  # e0 and e1 may be enough
    coordinator.count_stored(["wrong"], [None], ["e0"])
    assert coordinator.claim_needed(["e4"]) == [True]  # if one of two is kept, of e1 to e4 two are
    coordinator.count_stored(["kept", "kept"], [None, None], ["e1", "e3"])
    assert coordinator.claim_needed(ids) == [True, True, True, False]  # e2 may be kept, but e3 is needed until then
    coordinator.count_stored(["kept"], [None], ["e2"])
    assert coordinator.claim_needed(["e4"]) == [False]


def test_run_coordinator_lets_a_batch_begin_when_nothing_is_stored_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch at a time: what the others wait for may be queued behind them."""
    coordinator = RunCoordinator(make_spec("sample", total=2))
    now = time.monotonic()
    monkeypatch.setattr("pipelines.run_coordinator.time.monotonic", lambda: now)
    assert coordinator.claim_needed(["e2", "e3"]) is None
    now += _PATIENCE_SECONDS
    assert coordinator.claim_needed(["e2", "e3"]) == [True, True]
    assert coordinator.claim_needed(["e4"]) is None


def test_run_coordinator_counts_in_a_selection_that_cannot_be_written_to() -> None:
    """As Ray brings it to the coordinator's actor."""
    spec = make_spec("sample", total=2)
    for array in (spec.selection.sampled_N, spec.selection.kept_N):
        array.setflags(write=False)
    coordinator = RunCoordinator(spec)
    coordinator.count_stored(["kept", "kept"], [None, None], ["e0", "e1"])
    assert coordinator.claim_needed(["e1", "e2"]) == [True, False]
    assert not spec.selection.sampled_N.any()


def test_run_coordinator_forgets_actors_that_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = RunCoordinator(make_spec())
    coordinator.heartbeat("samplers", "a")
    coordinator.heartbeat("samplers", "b")
    assert coordinator.read().actors == {"samplers": 2}
    now = time.monotonic()
    coordinator.heartbeat("samplers", "b")
    monkeypatch.setattr("pipelines.run_coordinator.time.monotonic", lambda: now + _ACTIVE_SECONDS)
    assert coordinator.read().actors == {"samplers": 1}


def test_run_coordinator_keeps_the_first_fatal_error() -> None:
    coordinator = RunCoordinator(make_spec())
    cause = MachineError("the cause")
    for error in (cause, UserError("what follows from it")):
        coordinator.report_fatal(error)
    assert coordinator.fatal_error() is cause


def test_run_coordinator_of_a_resumed_run_starts_at_its_checkpoint() -> None:
    coordinator = RunCoordinator(replace(make_spec(), trained=5))
    assert coordinator.read().count("trained") == 5


def test_run_coordinator_ends_training_after_a_fatal_error_instead_of_saving() -> None:
    coordinator = RunCoordinator(make_spec())
    coordinator.request_stop()
    assert coordinator.stop_requested()
    coordinator.report_fatal(TransientError("the cause"))
    with pytest.raises(TransientError, match=r"^the cause$"):
        coordinator.stop_requested()
