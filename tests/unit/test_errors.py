import pytest

from pos2distill.errors import CorruptPart, UserError, did_you_mean, find_corrupt_part, find_user_error


@pytest.mark.parametrize(
    ("name", "options", "hint"),
    [
        ("lerning_rate", ["learning_rate", "epochs"], "; did you mean 'learning_rate'?"),
        ("zzz", ["beta", "alpha"], "; expected one of: alpha, beta"),
        ("zzz", [], ""),
    ],
)
def test_did_you_mean(name: str, options: list[str], hint: str) -> None:
    assert did_you_mean(name, options) == hint


def test_a_user_error_is_found_through_every_kind_of_link() -> None:
    told = UserError("the file is gone")
    explicit = RuntimeError("a")
    explicit.__cause__ = told
    implicit = RuntimeError("b")
    implicit.__context__ = explicit
    remote = RuntimeError("c")
    remote.cause = implicit  # type: ignore[attr-defined]
    workers = RuntimeError("d")
    workers.worker_failures = {0: ValueError("other"), 1: remote}  # type: ignore[attr-defined]
    assert [find_user_error(each) for each in (told, explicit, implicit, remote, workers)] == [told] * 5


def test_damage_is_found_and_is_no_user_error() -> None:
    """Workers that start again mend it; only the last one too many is told."""
    damage = CorruptPart("part-1: damaged")
    workers = RuntimeError("a")
    workers.worker_failures = {1: damage}  # type: ignore[attr-defined]
    assert find_corrupt_part(workers) is damage
    assert find_user_error(workers) is None
    assert find_corrupt_part(RuntimeError("b")) is None


def test_a_bug_is_no_user_error_and_loops_end() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert find_user_error(first) is None


def test_a_user_error_is_read_from_the_traceback_that_is_left_of_it() -> None:
    """Ray Data drops the cause and keeps its text."""
    text = "ray::f()\n  File x\npos2distill.errors.UserError: line 3: 'gold' is missing\n\nThe above exception was"
    found = find_user_error(RuntimeError(text))
    assert str(found) == "line 3: 'gold' is missing"
    assert find_user_error(RuntimeError("SomeError: pos2distill.errors.UserError: quoted")) is None
