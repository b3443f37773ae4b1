"""Accuracy by slot, its mean and GAP with intervals, and the paired difference of two models.

A slot here is a placement: for several hops, an ordered tuple of slots.
Shapes: E examples, S slots, O orders of the distractors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.evaluation.cross_fitting import best_slot_change, corrected_gap, gap_change
from pos2distill.evaluation.gap import difference_variances, gap_interval, position_p_value
from pos2distill.evaluation.statistics import (
    Interval,
    accuracy_interval,
    difference_interval,
    questions_needed,
)
from pos2distill.records import QUESTIONS, Floats, Slots

_SHOWN_POINTS = (1, 2, 5, 10)
_DRAWS = 1999  # random shifts in the test of position; the smallest p value is 1 / 2000
_HARDLY_ANY = 0.02  # fraction of the answers at a slot, with 95 % confidence


@dataclass(frozen=True, slots=True)
class Grid:
    """The scores of every example at every placement.

    Attributes:
        slots: slots of each placement; where examples have different numbers of hops, those of an example with the
            fewest.
        groups: name of each placement's group; "" for none.
        correct_ES: 1 where the answer is correct, else 0; with several orders of the distractors, the fraction of
            orders.
        f1_ES: token F1 of the answer; its mean over orders.
        orders: number of orders of the distractors.
        refused: ids of evaluated examples that are left out, since a server refused one of their prompts.
        questions: a digest of all questions and their answers; "" if it is not known.
    """

    documents: int
    slots: tuple[Slots, ...]
    groups: tuple[str, ...]
    example_ids: tuple[str, ...]
    correct_ES: Floats
    f1_ES: Floats
    orders: int = 1
    refused: frozenset[str] = frozenset()
    questions: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy by slot and its summary; fractions, not percent.

    Attributes:
        slots: 0-based; an int for one gold document, a tuple in hop order for several.
        gap: max - min of accuracy_by_slot.
        gap_corrected: without its upward bias (see `corrected_gap`).
        position_p: the probability that slots differ at least as much if position has no effect.
        broken_by_order: by slot, the fraction of questions that are correct in one order of the distractors and
            wrong in another (PSR); empty for one order.
        by_group: mean accuracy of each group of placements.
        f1: mean token F1.
        accuracy_ci95, ci95, gap_ci95, by_group_ci95: 95 % intervals, see `statistics`; `ci95` is that of the mean.
    """

    documents: int
    examples: int
    slots: tuple[int | Slots, ...]
    groups: tuple[str, ...]
    accuracy_by_slot: tuple[float, ...]
    accuracy_ci95: tuple[Interval, ...]
    mean: float
    ci95: Interval
    gap: float
    gap_ci95: Interval
    gap_corrected: float
    position_p: float
    f1: float
    by_group: dict[str, float]
    by_group_ci95: dict[str, Interval]
    broken_by_order: tuple[float, ...] = ()

    @property
    def why_gap_is_meaningless(self) -> str | None:
        """Why the GAP says nothing: a model without correct answers has GAP 0. None if it is meaningful."""
        if not self.mean:
            return "no answer is correct"
        # The best slot decides, since a model may answer at only one of many slots.
        if max(high for _, high in self.accuracy_ci95) < _HARDLY_ANY:
            return "hardly any answer is correct"
        return None


def format_slots(slots: int | Slots) -> str:
    """A placement as 1-based text: `7`, or `7>19` for the first hop at 7 and the second at 19; `none` without any."""
    if isinstance(slots, int):
        return str(slots + 1)
    if not slots:
        return "none"
    return ">".join(str(slot + 1) for slot in slots)


def position_order(position: str) -> list[int]:
    """A sort key of positions as `format_slots` writes them."""
    return [int(number) for number in position.split(">") if number != "none"]


def to_grid(predictions: pa.Table, documents: int, refused: Iterable[str] = ()) -> Grid:
    """The predictions at one prompt length as a grid.

    Args:
        predictions: a table of `PREDICTION_SCHEMA`.
        documents: the prompt length to select.
        refused: as in `Grid`; needed only to pair it with another one.
    Raises:
        ValueError: unless there is exactly one prediction for each example, placement and order of the distractors.
    """
    selected = predictions.filter(pc.field("documents") == documents)
    # N predictions: `cell_N` are the indices of their examples, placements and orders of the distractors.
    example_ids_E, example_N = np.unique(selected["example_id"].to_numpy(zero_copy_only=False), return_inverse=True)
    placements_S, placement_N = np.unique(selected["placement"].to_numpy(), return_inverse=True)
    orders_O, order_N = np.unique(selected["order"].to_numpy(), return_inverse=True)
    cell_N = (example_N, placement_N, order_N)
    count_ESO = np.zeros((len(example_ids_E), len(placements_S), len(orders_O)), int)
    # `add.at` counts duplicates; `count_ESO[cell_N] += 1` would count them once.
    np.add.at(count_ESO, cell_N, 1)
    if not count_ESO.size or not (count_ESO == 1).all():
        raise ValueError(
            f"{documents} documents: expected each example once at each slot, got counts {np.unique(count_ESO)}"
        )
    correct_ESO = np.zeros(count_ESO.shape)
    correct_ESO[cell_N] = selected["correct"].to_numpy(zero_copy_only=False)
    f1_ESO = np.zeros(count_ESO.shape)
    f1_ESO[cell_N] = selected["f1"].to_numpy(zero_copy_only=False)

    names = _name_placements(selected, placements_S.tolist())
    return Grid(
        documents=documents,
        slots=tuple(placed for placed, _ in names),
        groups=tuple(group for _, group in names),
        example_ids=tuple(example_ids_E.tolist()),
        correct_ES=correct_ESO.mean(2),
        f1_ES=f1_ESO.mean(2),
        orders=len(orders_O),
        refused=frozenset(refused),
        questions=(predictions.schema.metadata or {}).get(QUESTIONS, b"").decode(),
    )


def _name_placements(predictions: pa.Table, placements: Sequence[int]) -> list[tuple[Slots, str]]:
    """The slots and the group of each placement; the fewest slots where examples differ in their hops."""
    slots: dict[int, Slots] = {}
    groups: dict[int, str] = {}
    for prediction in predictions.select(["placement", "slots", "group"]).to_pylist():
        placement = prediction["placement"]
        if placement not in slots or len(prediction["slots"]) < len(slots[placement]):
            slots[placement] = tuple(prediction["slots"])
            groups[placement] = prediction["group"]
    return [(slots[placement], groups[placement]) for placement in placements]


def to_curve(grid: Grid, *, bootstrap_samples: int, seed: int) -> Curve:
    """Accuracy by slot with intervals."""
    correct_ES = grid.correct_ES
    accuracy_S = correct_ES.mean(0)
    by_group: dict[str, float] = {}
    by_group_ci95: dict[str, Interval] = {}
    for name in grid.groups:
        if name and name not in by_group:
            in_group_S = np.asarray(grid.groups) == name
            group_ES = correct_ES[:, in_group_S]
            by_group[name] = float(accuracy_S[in_group_S].mean())
            by_group_ci95[name] = accuracy_interval(group_ES.mean(1), answers=group_ES.shape[1] * grid.orders)
    position_p = position_p_value(correct_ES, draws=_DRAWS, seed=seed)
    return Curve(
        documents=grid.documents,
        examples=len(grid.example_ids),
        slots=tuple(slots[0] if len(slots) == 1 else slots for slots in grid.slots),
        groups=grid.groups,
        accuracy_by_slot=tuple(accuracy_S.tolist()),
        accuracy_ci95=tuple(accuracy_interval(correct_E, answers=grid.orders) for correct_E in correct_ES.T),
        mean=float(accuracy_S.mean()),
        ci95=accuracy_interval(correct_ES.mean(1), answers=correct_ES.shape[1] * grid.orders),
        gap=float(np.ptp(accuracy_S)),
        gap_ci95=gap_interval(correct_ES, position_p=position_p, draws=bootstrap_samples, seed=seed),
        gap_corrected=corrected_gap(correct_ES, seed=seed),
        position_p=position_p,
        f1=float(grid.f1_ES.mean()),
        by_group=by_group,
        broken_by_order=_broken_by_order(grid),
        by_group_ci95=by_group_ci95,
    )


def expected_accuracy(grid: Grid, ranks: Sequence[float]) -> tuple[float, Interval]:
    """The accuracy to expect if documents are shown in a retriever's order, and its 95 % interval.

        sum_r ranks_r * accuracy at slot r / sum_r ranks_r

    Between measured slots, accuracy is interpolated; beyond the first and the last one, theirs is used.

    Args:
        grid: scores of prompts with one gold document.
        ranks: how often the gold document has each rank, in proportion.
    """
    weight_S = _slot_weights(grid, ranks)
    value_E = grid.correct_ES @ weight_S
    # The number of slots if their weights are equal, fewer if some slots count more than others.
    independent = grid.orders / float((weight_S**2).sum())
    return float(value_E.mean()), accuracy_interval(value_E, answers=independent)


def summarize_expected(grid: Grid, ranks: Sequence[float]) -> dict[str, Any]:
    """The result of `expected_accuracy` as plain values for JSON."""
    accuracy, interval = expected_accuracy(grid, ranks)
    return {"accuracy": accuracy, "ci95": interval}


def _slot_weights(grid: Grid, ranks: Sequence[float]) -> Floats:
    """(S,) by how much the accuracy at each measured slot counts; their sum is 1."""
    slot_S = np.array([slots[0] for slots in grid.slots])
    in_order = np.argsort(slot_S)
    weight_S = np.zeros(len(slot_S))
    for rank, rank_weight in enumerate(ranks):
        # The weight of each measured slot in the interpolated value at this rank.
        for column in in_order:
            alone_S = np.zeros(len(slot_S))
            alone_S[column] = 1.0
            weight_S[column] += rank_weight * np.interp(rank, slot_S[in_order], alone_S[in_order])
    weights_S: Floats = weight_S / weight_S.sum()
    return weights_S


def _broken_by_order(grid: Grid) -> tuple[float, ...]:
    if grid.orders == 1:
        return ()
    depends_ES = (grid.correct_ES > 0) & (grid.correct_ES < 1)
    return tuple(depends_ES.mean(0).tolist())


class GridMismatch(ValueError):
    """Two grids have no prompts in common, or different ones."""


def share_examples(before: Grid, after: Grid) -> tuple[Grid, Grid]:
    """Both grids without the examples that are refused in either of them, so that every answer has a counterpart.

    Raises:
        GridMismatch: if the remaining prompts or the questions differ, or none remain.
    """
    if not may_be_same_questions(before, after):
        raise GridMismatch("the same ids are of other questions, or of other answers to them")
    left_out = before.refused | after.refused
    before, after = _without(before, left_out), _without(after, left_out)
    same = (before.documents, before.slots, before.example_ids) == (after.documents, after.slots, after.example_ids)
    if not same or not before.example_ids:
        raise GridMismatch("a paired comparison requires the same examples at the same slots")
    return before, after


def may_be_same_questions(one: Grid, other: Grid) -> bool:
    """Whether equal ids of two grids are of equal questions, as far as that is known."""
    return not (one.questions and other.questions) or one.questions == other.questions


def _without(grid: Grid, example_ids: frozenset[str]) -> Grid:
    kept = [index for index, example_id in enumerate(grid.example_ids) if example_id not in example_ids]
    ids = tuple(grid.example_ids[index] for index in kept)
    return replace(grid, example_ids=ids, correct_ES=grid.correct_ES[kept], f1_ES=grid.f1_ES[kept])


def paired_difference(before: Grid, after: Grid, *, bootstrap_samples: int, seed: int) -> dict[str, Any]:
    """Changes, after - before, over the same prompts, with 95 % intervals: of the mean, the GAP and the best slot.

    Raises:
        GridMismatch: as in `share_examples`.
    """
    before, after = share_examples(before, after)
    # The mean over slots leaves one number for each example, the unit that is resampled.
    difference_E = (after.correct_ES - before.correct_ES).mean(1)
    both = (before.correct_ES, after.correct_ES)
    change, change_ci95 = gap_change(*both, bootstrap_samples=bootstrap_samples, seed=seed)
    best, best_ci95 = best_slot_change(*both, bootstrap_samples=bootstrap_samples, seed=seed)
    return {
        "mean_difference": float(difference_E.mean()),
        "ci95": difference_interval(difference_E),
        "gap_change": change,
        "gap_change_ci95": change_ci95,
        "best_slot_change": best,
        "best_slot_change_ci95": best_ci95,
        "questions_to_see": _questions_to_see(float(difference_E.std()), len(difference_E)),
    }


def questions_to_see_positions(grid: Grid) -> dict[str, int]:
    """How many questions show a true difference between two slots with 80 % power, by the difference in points.

    The two slots are named before they are measured, and compared on the same questions. The variance of the questions'
    differences between two slots is the measured one, averaged over all pairs of slots. Empty for a single slot.
    """
    slots = len(grid.slots)
    if slots == 1:
        return {}
    # Each pair is in the matrix twice; the diagonal is 0.
    variance = float(difference_variances(grid.correct_ES).sum()) / (slots * (slots - 1))
    return _questions_to_see(variance**0.5, len(grid.example_ids))


def _questions_to_see(deviation: float, examples: int) -> dict[str, int]:
    """How many questions show a true mean difference with 80 % power, by the difference in points.

    Args:
        deviation: standard deviation of the differences of the examples.
    """
    # As if at least one example differed, since a measured deviation of 0 does not show that the true one is 0.
    deviation = max(deviation, examples**-0.5)
    return {str(points): questions_needed(points / 100, deviation) for points in _SHOWN_POINTS}
