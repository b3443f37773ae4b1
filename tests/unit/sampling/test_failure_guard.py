import pytest

from pos2distill.errors import UserError
from pos2distill.sampling.failure_guard import FailureGuard


def add(guard: FailureGuard, outcomes: str, start: int = 0) -> None:
    """One letter a sample: k(ept), w(rong), e(mpty), f(ailed)."""
    names = {"k": "kept", "w": "wrong", "e": "empty", "f": "failed"}
    errors = ["out of memory" if each == "f" else None for each in outcomes]
    guard.add([names[each] for each in outcomes], errors, [f"fox-{start + n}" for n in range(len(outcomes))])


def test_failure_guard_reports_the_first_errors() -> None:
    guard = FailureGuard(0.05, 1000)
    add(guard, "k" * 38 + "fe")  # 2 of 40 are 5 %, which is allowed
    add(guard, "k" * 15)
    with pytest.raises(UserError) as caught:
        add(guard, "fffff", start=40)
    assert str(caught.value) == (
        "7 of 60 samples failed (more than runtime.max_failed_fraction=0.05): example fox-38: out of memory; "
        "example fox-39: an empty answer; example fox-40: out of memory"
    )


def test_failure_guard_does_not_count_wrong_answers() -> None:
    guard = FailureGuard(0.0, 100)
    add(guard, "wk" * 50)
    assert (guard.seen, guard.failed) == (100, 0)


def test_failure_guard_checks_from_20_samples_on() -> None:
    guard = FailureGuard(0.5, 100)
    add(guard, "f" * 19)
    with pytest.raises(UserError, match="20 of 20 samples failed"):
        add(guard, "f")


def test_failure_guard_checks_fewer_samples_if_there_are_no_more() -> None:
    guard = FailureGuard(0.5, 4)
    add(guard, "fff")
    with pytest.raises(UserError, match=r"4 of 4 samples failed \(more than runtime.max_failed_fraction=0.5\)"):
        add(guard, "f")


def test_failure_guard_with_fraction_one_allows_everything() -> None:
    add(FailureGuard(1.0, 30), "f" * 30)
