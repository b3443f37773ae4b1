import random

import pytest

from pos2distill.errors import UserError
from pos2distill.sampling.failure_guard import FailureGuard


def add(guard: FailureGuard, outcomes: str, start: int = 0) -> None:
    """One letter a sample: k(ept), w(rong), e(mpty), f(ailed)."""
    names = {"k": "kept", "w": "wrong", "e": "empty", "f": "failed"}
    errors = ["out of memory" if each == "f" else None for each in outcomes]
    guard.add([names[each] for each in outcomes], errors, [f"fox-{start + n}" for n in range(len(outcomes))])


def test_failure_guard_reports_the_first_errors() -> None:
    guard = FailureGuard(0.05)
    add(guard, "k" * 38 + "fe")
    add(guard, "k" * 15)
    with pytest.raises(UserError) as caught:
        add(guard, "f" * 8, start=40)
    assert str(caught.value) == (
        "10 of 63 samples failed (more than runtime.max_failed_fraction=0.05): sample fox-38: out of memory; "
        "sample fox-39: an empty answer; sample fox-40: out of memory"
    )


def test_failure_guard_does_not_count_wrong_answers() -> None:
    guard = FailureGuard(0.0)
    add(guard, "wk" * 50)
    assert (guard.seen, guard.failed) == (100, 0)


def test_failure_guard_checks_from_20_samples_on() -> None:
    guard = FailureGuard(0.5)
    add(guard, "f" * 19)
    with pytest.raises(UserError, match="20 of 20 samples failed"):
        add(guard, "f")


def test_failure_guard_stops_where_chance_is_no_explanation() -> None:
    """Wilson's lower end by hand, of 20 samples and three standard errors: .032 for 3 failures, .052 for 4."""
    guard = FailureGuard(0.05)
    add(guard, "fff" + "k" * 17)
    with pytest.raises(UserError, match="4 of 20 samples failed"):
        add(FailureGuard(0.05), "ffff" + "k" * 16)


@pytest.mark.parametrize(("rate", "stopped"), [(0.03, 0), (0.10, 200)])
def test_failure_guard_does_not_depend_on_the_order(rate: float, stopped: int) -> None:
    """200 runs of 3,200 samples in parts of 32, with a limit of 5 %."""
    draws = random.Random(0)
    runs = 0
    for _ in range(200):
        guard = FailureGuard(0.05)
        try:
            for _ in range(100):
                add(guard, "".join("f" if draws.random() < rate else "k" for _ in range(32)))
        except UserError:
            runs += 1
    assert runs == stopped


def test_failure_guard_compares_the_fraction_itself_in_the_end() -> None:
    guard = FailureGuard(0.05)
    add(guard, "fffff" + "k" * 95)
    guard.finish()
    add(guard, "f" + "k" * 9)
    with pytest.raises(UserError, match="6 of 110 samples failed"):
        guard.finish()


def test_failure_guard_judges_few_samples_in_the_end() -> None:
    guard = FailureGuard(0.5)
    add(guard, "fff")
    with pytest.raises(UserError, match=r"3 of 3 samples failed \(more than runtime.max_failed_fraction=0.5\)"):
        guard.finish()


def test_failure_guard_judges_all_samples_in_the_end() -> None:
    guard = FailureGuard(0.05, stored=3197, stored_failed=100)
    add(guard, "fkk")
    guard.finish()
    guard = FailureGuard(0.05, stored=97, stored_failed=4)
    add(guard, "ffk")
    with pytest.raises(UserError, match=r"^6 of 100 samples failed .+: sample fox-0: out of memory; sample fox-1: "):
        guard.finish()


@pytest.mark.parametrize("limit", [0.0, 0.05])
def test_failure_guard_never_stops_a_run_without_failures(limit: float) -> None:
    guard = FailureGuard(limit)
    for _ in range(5000):
        add(guard, "k")
    guard.finish()


def test_failure_guard_counts_failures_of_earlier_runs_in_the_end_alone() -> None:
    """Their cause may be over, but they are left out of training all the same."""
    guard = FailureGuard(0.05, stored=50, stored_failed=40)
    add(guard, "k" * 50)
    with pytest.raises(UserError, match=r"^40 of 100 samples failed \(more than runtime.max_failed_fraction=0.05\)$"):
        guard.finish()


def test_failure_guard_with_fraction_one_allows_everything() -> None:
    guard = FailureGuard(1.0)
    add(guard, "f" * 30)
    guard.finish()
