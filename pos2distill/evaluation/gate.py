"""Whether a model passes: limits on its GAP, its mean and its drop below another run, for automatic checks.

A gate fails only where the data show that the limit is exceeded: by noise alone, a good model fails each limit in about
5 % of the runs at most. With three limits, the rates measured on simulated models add up to as much as .11, and to more
where the test of position errs more often (see `position_p_value`). Where the measured value is beyond the limit but
the questions are too few to tell, the gate passes with a line that says how many questions would decide, if the excess
is as large as it seems.

Shapes: E examples, S slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pos2distill.config.gate import Gate
from pos2distill.errors import GateError
from pos2distill.evaluation.formatting import format_lower, format_value
from pos2distill.evaluation.gap import questions_above
from pos2distill.evaluation.scores import Curve, Grid, share_examples
from pos2distill.evaluation.statistics import difference_interval, questions_needed
from pos2distill.records import Floats


@dataclass(frozen=True, slots=True)
class Passed:
    """A limit that a model passes.

    Attributes:
        is_undecided: the value is beyond it, and the questions are too few to tell.
    """

    line: str
    is_undecided: bool


@dataclass(frozen=True, slots=True)
class _GateScore:
    """A measured value and its limit, in percentage points.

    Attributes:
        name: what the value is.
        bound: the end of its 95 % interval on the side of the limit.
        needed: computes how many questions would decide; None if that is not known.
        examples: number of measured examples.
        is_floor: the limit is the smallest value that passes, else the largest.
    """

    name: str
    value: float
    bound: float
    limit: float
    needed: Callable[[], int | None]
    examples: int
    is_floor: bool = False

    def is_beyond(self, value: float) -> bool:
        """Whether a value exceeds the limit."""
        # Rounded, since 0.2 - 0.15 is more than 0.05 in floating point.
        excess = self.limit - value if self.is_floor else value - self.limit
        return round(excess, 6) > 0


def check_gate(
    gate: Gate, curve: Curve, grid: Grid, baseline: Grid | None = None, *, bootstrap_samples: int, seed: int
) -> list[Passed]:
    """Compare a model with its limits.

    Args:
        curve: the curve of the grid.
        baseline: the grid of the run that `drop_above` compares with.
        bootstrap_samples, seed: settings of the intervals.
    Returns: for each limit that it passes.
    Raises:
        GateError: naming the first limit that is exceeded; or if hardly any answer is correct, since then the GAP means
            nothing.
        GridMismatch: if the baseline has other questions or slots.
    """
    reason = curve.why_gap_is_meaningless
    # Limits of the mean also apply to a model that answers hardly anything.
    if reason and (gate.gap_above is not None or not curve.mean):
        raise GateError(f"{reason} (mean {100 * curve.mean:.1f}), so the GAP means nothing")
    correct_ES, examples = grid.correct_ES, curve.examples
    scores = []
    if gate.gap_above is not None:
        low = 100 * curve.gap_ci95[0]
        needed = partial(questions_above, correct_ES, gate.gap_above / 100, draws=bootstrap_samples, seed=seed)
        scores.append(_GateScore("GAP", 100 * curve.gap, low, gate.gap_above, needed, examples))
    if gate.mean_below is not None:
        value, high = 100 * curve.mean, 100 * curve.ci95[1]
        needed = partial(_needed, value - gate.mean_below, correct_ES.mean(1))
        scores.append(_GateScore("mean", value, high, gate.mean_below, needed, examples, is_floor=True))
    if gate.drop_above is not None:
        assert baseline is not None
        before, after = share_examples(baseline, grid)
        difference_E = (after.correct_ES - before.correct_ES).mean(1)
        drop, low = -100 * float(difference_E.mean()), -100 * difference_interval(difference_E)[1]
        needed = partial(_needed, drop - gate.drop_above, difference_E)
        scores.append(_GateScore("drop of the mean", drop, low, gate.drop_above, needed, len(after.example_ids)))
    return [_check(score) for score in scores]


def _check(score: _GateScore) -> Passed:
    """A value that passes.

    Raises:
        GateError: if even the bound is beyond the limit.
    """
    side = "below" if score.is_floor else "above"
    shown = f"{score.name} {format_value(score.value, digits=1)}"
    bound = f"{_format_bound(score)} with 95 % confidence"
    if score.is_beyond(score.bound):
        raise GateError(f"{shown}, {bound}, is {side} {score.limit:g}")
    if not score.is_beyond(score.value):
        return Passed(f"{shown} is not {side} {score.limit:g}", is_undecided=False)
    line = f"{shown} is {side} {score.limit:g}, but {score.examples} questions cannot tell ({bound})"
    needed = score.needed()
    if needed is not None:
        line += f"; about {max(needed, score.examples + 1)} would, if it is as far {side} as estimated"
    return Passed(line, is_undecided=True)


def _format_bound(score: _GateScore) -> str:
    if score.is_floor:
        return f"at most {score.bound:.1f}"
    lower = format_lower(score.bound, digits=1)
    return lower if lower.startswith("above") else f"at least {lower}"


def _needed(excess: float, value_E: Floats) -> int | None:
    """How many questions show that a mean exceeds its limit by this excess.

    None if the excess is one standard error or less, or if all questions agree, since their variance is then not known.
    """
    deviation = float(value_E.std())
    if not deviation or abs(excess) / 100 <= deviation / len(value_E) ** 0.5:
        return None
    return questions_needed(abs(excess) / 100, deviation)
