from dataclasses import replace
from typing import Any

import pytest

from pos2distill.evaluation.scores import Curve
from pos2distill.evaluation.verdict import describe_change, describe_curve, format_points


def curve(
    *accuracy: float, slots: tuple[Any, ...] = (), documents: int = 10, examples: int = 60, position_p: float = 0.01
) -> Curve:
    """A curve with an interval of 5 points on both sides at every slot."""
    return Curve(
        documents=documents,
        examples=examples,
        slots=slots or tuple(range(len(accuracy))),
        groups=("",) * len(accuracy),
        accuracy_by_slot=accuracy,
        accuracy_ci95=tuple((max(0.0, value - 0.05), min(1.0, value + 0.05)) for value in accuracy),
        mean=sum(accuracy) / len(accuracy),
        ci95=(0.0, 1.0),
        gap=max(accuracy) - min(accuracy),
        gap_ci95=(0.0, 1.0),
        gap_corrected=0.0,
        position_p=position_p,
        f1=0.0,
        by_group={},
        by_group_ci95={},
    )


def paired(
    difference: float,
    low: float,
    high: float,
    gap_change: tuple[float, float] = (-0.2, -0.1),
    best: tuple[float, float, float] = (0.0, -0.1, 0.1),
) -> dict[str, Any]:
    return {
        **{"mean_difference": difference, "ci95": (low, high), "gap_change_ci95": gap_change},
        **{"best_slot_change": best[0], "best_slot_change_ci95": best[1:]},
    }


def test_describe_change_of_a_cured_model() -> None:
    before, after = curve(0.8, 0.68, 0.75), curve(0.8, 0.77, 0.79)
    assert describe_change(before, after, paired(0.043, 0.01, 0.08)) == (
        "Accuracy at position 2 of 10 is 12 points lower than at position 1; after distillation, 3 points lower. "
        "Accuracy at the best "
        "position stays at 80 %. The mean accuracy rises by 4.3 points (95 % interval +1.0 to +8.0): more "
        "than chance explains with 60 questions."
    )


def test_describe_change_that_may_be_chance() -> None:
    before, after = curve(0.5, 0.625), curve(0.6, 0.65)
    assert describe_change(before, after, paired(0.0625, -0.01, 0.13)) == (
        "Accuracy at position 1 of 10 is 12.5 points lower than at position 2; after distillation, 5 points lower. "
        "Accuracy at the best position "
        "goes from 62.5 to 65 %, which may be chance. The mean accuracy changes by +6.2 points (95 % interval "
        "-1.0 to +13.0): 60 questions cannot tell it from 0."
    )


def test_describe_change_for_the_worse_names_the_new_worst_position() -> None:
    before, after = curve(1.0, 0.5), curve(0.75, 0.75, slots=(0, 1))
    assert describe_change(before, after, paired(-0.1, -0.2, -0.05, best=(-0.24, -0.3, -0.18))) == (
        "Accuracy at position 2 of 10 is 50 points lower than at position 1; after distillation, all 2 positions of "
        "10 have the same "
        "accuracy. Accuracy at the best position falls by 24 points (95 % interval -30.0 to -18.0; measured from 100 "
        "to 75 %). The "
        "mean accuracy falls by 10 points (95 % interval -20.0 to -5.0): more than chance explains with 60 questions."
    )
    other = curve(0.9, 1.0)
    assert "; after distillation, accuracy at position 1 is 10 points lower than at position 2. " in describe_change(
        before, other, paired(0.2, 0.1, 0.3)
    )


def test_describe_change_of_the_best_position_is_none_where_it_cannot_be_shown() -> None:
    words = describe_change(curve(0.50004, 0.4), curve(0.50001, 0.4), paired(0, -1, 1, best=(-0.00003, -0.1, 0.1)))
    assert "Accuracy at the best position stays at 50 %." in words


@pytest.mark.parametrize(
    ("best", "text"),
    [
        ((-0.02, -0.04, 0.0), "goes from 60 to 55 %, which may be chance"),
        ((-0.02, -0.04, -0.001), "falls by 2 points (95 % interval -4.0 to -0.1; measured from 60 to 55 %)"),
        ((0.03, 0.01, 0.05), "rises by 3 points (95 % interval +1.0 to +5.0; measured from 60 to 55 %)"),
    ],
)
def test_describe_change_of_the_best_position_goes_by_its_interval(best: tuple[float, float, float], text: str) -> None:
    words = describe_change(curve(0.6, 0.5), curve(0.55, 0.5), paired(0, -1, 1, best=best))
    assert f" Accuracy at the best position {text}. " in words


@pytest.mark.parametrize(("low", "high", "real"), [(0.0, 0.1, False), (-0.1, 0.0, False), (1e-9, 0.1, True)])
def test_describe_change_is_real_only_if_the_interval_excludes_zero(low: float, high: float, real: bool) -> None:
    text = describe_change(curve(0.5, 0.6), curve(0.5, 0.6), paired(0.0, low, high))
    assert text.endswith("more than chance explains with 60 questions.") == real
    assert text.endswith("60 questions cannot tell it from 0.") != real


def test_describe_change_of_pairs_and_of_a_flat_model() -> None:
    pairs = curve(0.5, 0.25, slots=((0, 1), (8, 0)), documents=20)
    assert describe_change(pairs, pairs, paired(0, 0, 0)).startswith(
        "Accuracy at position 9>1 of 20 is 25 points lower than at position 1>2; after distillation, 25 points lower. "
    )
    flat = curve(0.5, 0.5)
    assert describe_change(flat, curve(0.5, 0.6), paired(0, 0, 0)).startswith(
        "All 2 positions of 10 have the same accuracy; after distillation, accuracy at position 1 is 10 points lower "
        "than at position 2. "
    )
    assert (
        describe_curve(curve(0.5, 0.5, slots=((0, 1), (8, 0)))) == "All 2 placements among 10 have the same accuracy."
    )


def test_describe_change_and_curve_without_a_right_answer() -> None:
    nothing = curve(0.0, 0.0, examples=1)
    expected = "No answer is correct, before or after distillation (1 question), so the GAP means nothing."
    assert describe_change(nothing, nothing, paired(0, 0, 0)) == expected
    assert describe_change(curve(0.2, 0.1), curve(0.0, 0.0), paired(-0.15, -0.3, 0.0)) == (
        "Accuracy at position 2 of 10 is 10 points lower than at position 1; after distillation, no answer is correct, "
        "so the GAP means "
        "nothing. The mean accuracy changes by -15.0 points (95 % interval -30.0 to +0.0): 60 questions cannot tell it "
        "from 0."
    )
    assert describe_change(curve(0.0, 0.0), curve(0.2, 0.1), paired(0.15, 0.1, 0.2)) == (
        "No answer is correct before distillation; after it, accuracy at position 2 of 10 is 10 points lower than at "
        "position 1. The mean "
        "accuracy rises by 15 points (95 % interval +10.0 to +20.0): more than chance explains with 60 questions."
    )
    assert describe_curve(nothing) == "No answer is correct (1 question, mean 0.000), so the GAP means nothing."


def hardly(*highs: float) -> Curve:
    """A curve that is 0.01 at its first slot and 0 elsewhere, with these upper ends."""
    accuracy = (0.01, *(0.0 for _ in highs[1:]))
    return replace(curve(*accuracy), accuracy_ci95=tuple((0.0, high) for high in highs))


@pytest.mark.parametrize(
    ("highs", "says"),
    [
        ((0.019, 0.004), "Hardly any answer is correct (60 questions, mean 0.005), so the GAP means nothing."),
        ((0.021, 0.004), "Accuracy at position 2 of 10 is 1 point lower than at position 1."),
    ],
)
def test_describe_curve_of_hardly_any_right_answer(highs: tuple[float, ...], says: str) -> None:
    """As of a model that a wrong RoPE scale breaks: it has the smallest GAP of all."""
    assert describe_curve(hardly(*highs)) == says


def test_describe_curve_of_a_model_that_answers_at_one_slot_of_many() -> None:
    """Its mean is small, and its GAP the largest that there is."""
    one_of_many = replace(curve(1.0, *[0.0] * 139, documents=140), ci95=(0.004, 0.011))
    assert describe_curve(one_of_many) == "Accuracy at position 2 of 140 is 100 points lower than at position 1."


def test_describe_change_of_hardly_any_right_answer() -> None:
    few, none = hardly(0.019, 0.004), curve(0.0, 0.0)
    for before, after in ((few, none), (none, few)):
        assert describe_change(before, after, paired(0, 0, 0)) == (
            "Hardly any answer is correct, before or after distillation (60 questions), so the GAP means nothing."
        )
    broken = describe_change(curve(0.5, 0.4), few, paired(-0.4, -0.5, -0.3))
    assert broken.startswith(
        "Accuracy at position 2 of 10 is 10 points lower than at position 1; after distillation, hardly any answer "
        "is correct, so the GAP"
    )
    cured = describe_change(few, curve(0.5, 0.4), paired(0.4, 0.3, 0.5))
    start = "Hardly any answer is correct before distillation; after it, "
    assert cured.startswith(f"{start}accuracy at position 2 of 10 is 10 points lower")


def test_describe_change_says_where_positions_may_differ_by_chance() -> None:
    chance = curve(0.25, 0.5, position_p=0.31)
    assert describe_change(chance, chance, paired(0, 0, 0)).startswith(
        "Accuracy at position 1 of 10 is 25 points lower than at position 2 (which may be chance: p = 0.31); after "
        "distillation, 25 points lower. "
    )
    assert describe_curve(chance).endswith(" than at position 2 (which may be chance: p = 0.31).")


@pytest.mark.parametrize(("gap_change", "chance"), [((-0.2, 0.0), True), ((-0.2, -0.01), False), ((0.1, 0.2), False)])
def test_describe_change_says_where_the_gap_may_not_have_changed(gap_change: tuple[float, float], chance: bool) -> None:
    text = describe_change(curve(0.5, 0.9), curve(0.7, 0.9), paired(0.1, 0.05, 0.15, gap_change))
    assert ("; after distillation, 20 points lower (a change that may be chance). Accuracy" in text) == chance
    assert ("; after distillation, 20 points lower. Accuracy" in text) != chance


# The second GAP differs from the first by rounding alone.
@pytest.mark.parametrize("after", [curve(0.6, 0.3), curve(0.4, 0.1)])
def test_describe_change_of_an_equal_gap_remarks_nothing_on_its_change(after: Curve) -> None:
    text = describe_change(curve(0.6, 0.3), after, paired(0.0, -0.1, 0.1, (-0.1, 0.1)))
    assert "a change that may be chance" not in text


def test_describe_curve() -> None:
    assert describe_curve(curve(0.25, 0.5)) == "Accuracy at position 1 of 10 is 25 points lower than at position 2."


@pytest.mark.parametrize(
    ("fraction", "shown"), [(0.01, "1 point"), (0.125, "12.5 points"), (0.2 - 0.15, "5 points"), (0.0004, "0 points")]
)
def test_format_points(fraction: float, shown: str) -> None:
    assert format_points(fraction) == shown
