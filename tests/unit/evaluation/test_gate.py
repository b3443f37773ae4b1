from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from pos2distill.config.gate import Gate
from pos2distill.errors import GateError
from pos2distill.evaluation.gate import check_gate
from pos2distill.evaluation.scores import Grid, to_curve


def grid_of(right: tuple[int, ...], examples: int) -> Grid:
    """At each slot, the first so many of the examples are right."""
    correct_ES = np.zeros((examples, len(right)))
    for slot, count in enumerate(right):
        correct_ES[:count, slot] = 1
    return make_grid(correct_ES)


def make_grid(correct_ES: npt.NDArray[np.float64]) -> Grid:
    examples, slots = correct_ES.shape
    ids = tuple(f"e{example:04d}" for example in range(examples))
    return Grid(9, tuple((slot,) for slot in range(slots)), ("",) * slots, ids, correct_ES, correct_ES)


def check(gate: Gate, grid: Grid, baseline: Grid | None = None) -> list[str]:
    curve = to_curve(grid, bootstrap_samples=500, seed=0)
    return [passed.line for passed in check_gate(gate, curve, grid, baseline, bootstrap_samples=500, seed=0)]


def test_gap_that_the_data_show() -> None:
    with pytest.raises(GateError, match=r"^GAP 20.0, at least 1\d\.\d with 95 % confidence, is above 5$"):
        check(Gate(gap_above=5), grid_of((400, 340, 320), 400))


def test_gap_that_the_data_leave_open() -> None:
    """More would decide than with a normal distribution, 56, since 20 questions know their own noise badly."""
    (line,) = check(Gate(gap_above=5), grid_of((20, 17, 16), 20))
    assert line == (
        "GAP 20.0 is above 5, but 20 questions cannot tell (at least 0.0 with 95 % confidence); about 84 would, "
        "if it is as far above as estimated"
    )


def test_gap_whose_lower_end_rounds_to_0() -> None:
    """The interval does not contain 0, so the line must not show it as its end."""
    grid = grid_of((400, 340, 320), 400)
    curve = replace(to_curve(grid, bootstrap_samples=500, seed=0), gap_ci95=(1e-6, 0.3))
    with pytest.raises(GateError, match=r"^GAP 20.0, above 0 with 95 % confidence, is above 0$"):
        check_gate(Gate(gap_above=0), curve, grid, bootstrap_samples=500, seed=0)
    (passed,) = check_gate(Gate(gap_above=5), curve, grid, bootstrap_samples=500, seed=0)
    assert "400 questions cannot tell (above 0 with 95 % confidence)" in passed.line
    assert passed.is_undecided
    (passed,) = check_gate(Gate(gap_above=30), curve, grid, bootstrap_samples=500, seed=0)
    assert not passed.is_undecided


@pytest.mark.parametrize("limit", [20, 100])
def test_gap_at_the_limit_passes(limit: float) -> None:
    """1 - 0.8 is a little less or more than 0.2 in floating point; equal is not above."""
    assert check(Gate(gap_above=limit), grid_of((400, 340, 320), 400)) == [f"GAP 20.0 is not above {limit}"]


def test_flat_models_rarely_fail() -> None:
    """Of 40 models without position bias, max - min is above 5 points for most, and the gate fails at most 6."""
    generator = np.random.default_rng(0)
    failed = above = 0
    for _ in range(40):
        grid = make_grid((generator.random((60, 6)) < 0.75).astype(float))
        above += float(np.ptp(grid.correct_ES.mean(0))) > 0.05
        try:
            check(Gate(gap_above=0), grid)
        except GateError:
            failed += 1
    assert above > 32
    assert failed <= 6


def test_mean_that_the_data_show() -> None:
    """Wilson's upper end of 200 of 400 is .549."""
    with pytest.raises(GateError, match=r"^mean 50.0, at most 54.9 with 95 % confidence, is below 80$"):
        check(Gate(mean_below=80), grid_of((200,), 400))
    assert check(Gate(mean_below=50), grid_of((200,), 400)) == ["mean 50.0 is not below 50"]


def test_drop_against_a_baseline() -> None:
    baseline, worse = grid_of((400, 400), 400), grid_of((360, 360), 400)
    with pytest.raises(GateError, match=r"^drop of the mean 10.0, at least \d\.\d with 95 % confidence, is above 2$"):
        check(Gate(drop_above=2), worse, baseline)
    assert check(Gate(drop_above=2), baseline, worse) == ["drop of the mean -10.0 is not above 2"]
    assert check(Gate(drop_above=2), baseline, baseline) == ["drop of the mean 0.0 is not above 2"]


@pytest.mark.parametrize(
    ("gate", "line"),
    [
        (Gate(mean_below=29), "mean 29.0 is not below 29"),
        (Gate(drop_above=7), "drop of the mean 7.0 is not above 7"),
    ],
)
def test_mean_and_drop_at_the_limit_pass(gate: Gate, line: str) -> None:
    """In floating point, 29 of 100 are a little less than 29 points, and a drop from 36 a little more than 7."""
    grid, baseline = grid_of((29,), 100), grid_of((36,), 100)
    curve = to_curve(grid, bootstrap_samples=500, seed=0)
    (passed,) = check_gate(gate, curve, grid, baseline, bootstrap_samples=500, seed=0)
    assert (passed.line, passed.is_undecided) == (line, False)


def test_drop_against_other_questions() -> None:
    with pytest.raises(ValueError, match="requires the same examples at the same slots"):
        check(Gate(drop_above=2), grid_of((4, 4), 4), grid_of((4, 4), 5))


def test_no_right_answer_fails() -> None:
    with pytest.raises(GateError, match=r"^no answer is correct \(mean 0.0\), so the GAP means nothing$"):
        check(Gate(gap_above=100), grid_of((0, 0), 10))


def test_hardly_any_right_answer_fails_a_limit_of_the_gap_alone() -> None:
    """2 of 2,300 answers: a broken model, whose GAP is within any limit."""
    broken = grid_of((2, 0), 1150)
    with pytest.raises(GateError, match=r"^hardly any answer is correct \(mean 0.1\), so the GAP means nothing$"):
        check(Gate(gap_above=5), broken)
    assert check(Gate(mean_below=0), broken) == ["mean 0.1 is not below 0"]


def line_on_mean(right_E: list[float], limit: float) -> str:
    """Of a gate on the mean: E questions at two slots, each with this accuracy."""
    grid = grid_of((1, 1), 1)
    correct_ES = np.array([[1.0, 1.0] if right == 1 else [right * 2, 0.0] for right in right_E])
    ids = tuple(f"q{index}" for index in range(len(right_E)))
    (line,) = check(Gate(mean_below=limit), replace(grid, correct_ES=correct_ES, example_ids=ids))
    return line


def test_mean_that_the_data_leave_open_names_questions_for_that_excess() -> None:
    """15 points with a deviation of .490: ((1.960 + .842) .490 / .15)^2 = 83.8."""
    assert line_on_mean([1.0] * 12 + [0.0] * 8, 75).endswith("; about 84 would, if it is as far below as estimated")


def test_mean_that_is_within_one_error_of_its_limit_names_none() -> None:
    """The standard error of 12 of 20 is 11 points."""
    assert line_on_mean([1.0] * 12 + [0.0] * 8, 69).startswith("mean 60.0 is below 69, but 20 questions cannot tell")
    assert "would" not in line_on_mean([1.0] * 12 + [0.0] * 8, 69)


def test_mean_of_questions_that_all_agree_names_none() -> None:
    assert "would" not in line_on_mean([0.5] * 20, 60)
