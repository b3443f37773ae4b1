"""What two curves say, in one sentence: for the report, the terminal and the model card."""

from collections.abc import Mapping
from typing import Any

from pos2distill.evaluation.scores import Curve, format_slots

_HIGHEST_P = 0.05


def describe_change(before: Curve, after: Curve, paired: Mapping[str, Any]) -> str:
    """How distillation changed the position bias, the best position and the mean, as one paragraph.

    It calls a change of the mean or of the best position real only if the paired interval excludes 0; the best position
    is chosen by some questions and its change is measured on others. The differences between positions are those
    of measured accuracies, and the same answers choose the best one, so with few questions they are too large. The
    paragraph says so if the test of position does not reject chance, or the interval of the corrected GAP's change
    includes 0.

    Args:
        before, after: curves of the same prompts.
        paired: what `paired_difference` returns.
    """
    nothing_before, nothing_after = before.why_gap_is_meaningless, after.why_gap_is_meaningless
    if nothing_before and nothing_after:
        # If both curves have a reason, the weaker one holds for both.
        reason = nothing_before if before.mean >= after.mean else nothing_after
        return f"{_capitalize(reason)}, before or after distillation ({_questions(before)}), so the GAP means nothing."
    first = f"{_capitalize(_difference(before))}{_chance(before)}; after distillation,"
    if nothing_after:
        return f"{first} {nothing_after}, so the GAP means nothing. {_mean_change(before, paired)}"
    if nothing_before:
        reason = _capitalize(nothing_before)
        return f"{reason} before distillation; after it, {_difference(after)}. {_mean_change(before, paired)}"
    difference_after = f"{_difference(after, known=before)}{_gap_chance(before, after, paired)}"
    return f"{first} {difference_after}. {_best_position(before, after, paired)} {_mean_change(before, paired)}"


def describe_curve(curve: Curve) -> str:
    """How much lower the accuracy at the worst position is than at the best one, as a sentence."""
    reason = curve.why_gap_is_meaningless
    if reason:
        return f"{_capitalize(reason)} ({_questions(curve)}, mean {curve.mean:.3f}), so the GAP means nothing."
    return f"{_capitalize(_difference(curve))}{_chance(curve)}."


def _chance(curve: Curve) -> str:
    """A remark if positions differ no more than they would by chance."""
    if not curve.gap or curve.position_p <= _HIGHEST_P:
        return ""
    return f" (which may be chance: p = {curve.position_p:.2g})"


def _difference(curve: Curve, known: Curve | None = None) -> str:
    """How much lower the worst position is than the best. known: a curve of which the same sentence already says so."""
    if not curve.gap:
        placed = "placements among" if isinstance(curve.slots[0], tuple) else "positions of"
        return f"all {len(curve.slots)} {placed} {curve.documents} have the same accuracy"
    worst, best = _worst(curve), _best(curve)
    points = format_points(curve.gap)
    if known is not None and known.gap and (_worst(known), _best(known)) == (worst, best):
        return f"{points} lower"
    position = f"position {format_slots(curve.slots[worst])}"
    # The number of documents is the same in both parts of a sentence.
    if known is None:
        position += f" of {curve.documents}"
    return f"accuracy at {position} is {points} lower than at position {format_slots(curve.slots[best])}"


def _gap_chance(before: Curve, after: Curve, paired: Mapping[str, Any]) -> str:
    """A remark if the GAP may not have changed."""
    if format_points(before.gap) == format_points(after.gap):
        return ""
    low, high = paired["gap_change_ci95"]
    return " (a change that may be chance)" if low <= 0 <= high else ""


def _best_position(before: Curve, after: Curve, paired: Mapping[str, Any]) -> str:
    """How the accuracy of the position that was best before has changed."""
    best = _best(before)
    old, new = before.accuracy_by_slot[best], after.accuracy_by_slot[best]
    if _percent(new) == _percent(old):
        return f"Accuracy at the best position stays at {_percent(old)} %."
    measured = f"from {_percent(old)} to {_percent(new)} %"
    low, high = paired["best_slot_change_ci95"]
    if low <= 0 <= high:
        return f"Accuracy at the best position goes {measured}, which may be chance."
    change = paired["best_slot_change"]
    verb = "falls" if change < 0 else "rises"
    interval = f"95 % interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"Accuracy at the best position {verb} by {format_points(abs(change))} ({interval}; measured {measured})."


def _mean_change(before: Curve, paired: Mapping[str, Any]) -> str:
    difference = paired["mean_difference"]
    low, high = paired["ci95"]
    interval = f"(95 % interval {100 * low:+.1f} to {100 * high:+.1f})"
    if low > 0 or high < 0:
        change = f"{'rises' if difference > 0 else 'falls'} by {format_points(abs(difference))}"
        return f"The mean accuracy {change} {interval}: more than chance explains with {_questions(before)}."
    change = f"changes by {100 * difference:+.1f} points"
    return f"The mean accuracy {change} {interval}: {_questions(before)} cannot tell it from 0."


def _questions(curve: Curve) -> str:
    return "1 question" if curve.examples == 1 else f"{curve.examples} questions"


def _best(curve: Curve) -> int:
    return curve.accuracy_by_slot.index(max(curve.accuracy_by_slot))


def _worst(curve: Curve) -> int:
    return curve.accuracy_by_slot.index(min(curve.accuracy_by_slot))


def format_points(fraction: float) -> str:
    """A difference of accuracies in percentage points: `12.5 points`."""
    number = _percent(fraction)
    return f"{number} point" if number == "1" else f"{number} points"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}".removesuffix(".0")


def _capitalize(text: str) -> str:
    # Not `capitalize`, which would change the rest to lower case.
    return text[0].upper() + text[1:]
