"""Accuracy by slot, its mean and GAP with bootstrap intervals, and the paired difference of two models.

A slot here is a placement: for several hops, an ordered tuple of slots.
Shapes: E examples, S slots, R bootstrap resamples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.randomness import derive_generator
from pos2distill.records import Slots

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Grid:
    """The scores of every example at every placement.

    slots: of each placement; where examples have different numbers of hops, the slots of an example with the fewest.
    groups: name of each placement's group; "" for none.
    correct_ES: 1 where the answer is correct, else 0. f1_ES: token F1 of the answer.
    """

    documents: int
    slots: tuple[Slots, ...]
    groups: tuple[str, ...]
    example_ids: tuple[str, ...]
    correct_ES: Floats
    f1_ES: Floats


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy by slot and its summary; fractions, not percent.

    slots: 0-based; an int for one gold document, a tuple in hop order for several.
    gap: max - min of accuracy_by_slot. by_group: mean accuracy of each group of placements. f1: mean token F1.
    Intervals (ci95, gap_ci95, accuracy_ci95): 95 %, percentile bootstrap over examples. The bootstrap of a maximum
    minus a minimum is biased upwards, so gap_ci95 may be entirely above gap.
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
    f1: float
    by_group: dict[str, float]


def format_slots(slots: int | Slots) -> str:
    """A placement as 1-based text: `7`, or `7>19` for the first hop at 7 and the second at 19."""
    if isinstance(slots, int):
        return str(slots + 1)
    return ">".join(str(slot + 1) for slot in slots)


def truncation_warning(counts: Mapping[str, int]) -> str | None:
    """A warning if more than a tenth of a stage's answers reached `max_new_tokens`, else None.

    Args:
        counts: of the manifest of any stage; those of a stage that generates nothing give None.
    """
    if "sampled" in counts:
        section, answers = "sampling", counts["sampled"]
    else:
        section, answers = "evaluation", counts.get("prompts", 0)
    truncated = counts.get("hit_max_tokens", 0)
    if 10 * truncated <= answers:
        return None
    return f"{truncated} of {answers} answers were cut at {section}.max_new_tokens; raise it if they are incomplete"


def to_grid(predictions: pa.Table, documents: int) -> Grid:
    """The predictions at one prompt length as a grid.

    Args:
        predictions: a table of `PREDICTION_SCHEMA`.
        documents: the prompt length to select.
    Raises:
        ValueError: unless there is exactly one prediction for each example and placement.
    """
    selected = predictions.filter(pc.field("documents") == documents)
    # N predictions; row_N and column_N are their cells of the grid.
    example_ids_E, row_N = np.unique(selected["example_id"].to_numpy(zero_copy_only=False), return_inverse=True)
    placements_S, column_N = np.unique(selected["placement"].to_numpy(), return_inverse=True)
    count_ES = np.zeros((len(example_ids_E), len(placements_S)), int)
    # `add.at` counts duplicates; `count_ES[row_N, column_N] += 1` would count them once.
    np.add.at(count_ES, (row_N, column_N), 1)
    if not count_ES.size or not (count_ES == 1).all():
        raise ValueError(
            f"{documents} documents: expected each example once at each slot, got counts {np.unique(count_ES)}"
        )
    correct_ES = np.zeros(count_ES.shape)
    correct_ES[row_N, column_N] = selected["correct"].to_numpy(zero_copy_only=False)
    f1_ES = np.zeros(count_ES.shape)
    f1_ES[row_N, column_N] = selected["f1"].to_numpy(zero_copy_only=False)

    slots: dict[int, Slots] = {}
    groups: dict[int, str] = {}
    for prediction in selected.select(["placement", "slots", "group"]).to_pylist():
        placement = prediction["placement"]
        # Examples with different numbers of hops have the same placements. The fewest slots name a placement.
        if placement not in slots or len(prediction["slots"]) < len(slots[placement]):
            slots[placement] = tuple(prediction["slots"])
            groups[placement] = prediction["group"]
    return Grid(
        documents=documents,
        slots=tuple(slots[placement] for placement in placements_S.tolist()),
        groups=tuple(groups[placement] for placement in placements_S.tolist()),
        example_ids=tuple(example_ids_E.tolist()),
        correct_ES=correct_ES,
        f1_ES=f1_ES,
    )


def to_curve(grid: Grid, *, bootstrap_samples: int, seed: int) -> Curve:
    """Accuracy by slot with intervals.

    The bootstrap resamples whole examples, because the answers to one example at different slots are not independent.
    """
    accuracy_S = grid.correct_ES.mean(0)
    resampled_RS = _resample_means(grid.correct_ES, bootstrap_samples, seed)
    by_group: dict[str, float] = {}
    for name in grid.groups:
        if name and name not in by_group:
            in_group_S = np.asarray(grid.groups) == name
            by_group[name] = float(accuracy_S[in_group_S].mean())
    return Curve(
        documents=grid.documents,
        examples=len(grid.example_ids),
        slots=tuple(slots[0] if len(slots) == 1 else slots for slots in grid.slots),
        groups=grid.groups,
        accuracy_by_slot=tuple(accuracy_S.tolist()),
        accuracy_ci95=tuple(_interval(resampled_R) for resampled_R in resampled_RS.T),
        mean=float(accuracy_S.mean()),
        ci95=_interval(resampled_RS.mean(1)),
        gap=float(np.ptp(accuracy_S)),
        gap_ci95=_interval(np.ptp(resampled_RS, axis=1)),
        f1=float(grid.f1_ES.mean()),
        by_group=by_group,
    )


def corrected_gap(grid: Grid, *, splits: int, seed: int) -> float:
    """The GAP without the bias of choosing the best and the worst slot by the same answers that measure them.

    The examples are divided into two halves at random; the best and the worst slot of one half are compared on the
    other half, and the reverse. The mean over all splits is 0 in expectation for a model without any effect of
    position, where max - min is above 0. Half of the examples choose less well than all of them, so where slots differ
    by little, it is somewhat below the true GAP.

    Args:
        splits: random divisions.
    """
    generator = derive_generator(seed, "cross-fitted gap")
    examples = len(grid.correct_ES)
    differences = []
    for _ in range(splits):
        shuffled_ES = grid.correct_ES[generator.permutation(examples)]
        halves = (shuffled_ES[: examples // 2], shuffled_ES[examples // 2 :])
        for chooser_ES, judge_ES in (halves, halves[::-1]):
            accuracy_S = chooser_ES.mean(0)
            measured_S = judge_ES.mean(0)
            differences.append(measured_S[accuracy_S.argmax()] - measured_S[accuracy_S.argmin()])
    return float(np.mean(differences))


def paired_difference(before: Grid, after: Grid, *, bootstrap_samples: int, seed: int) -> dict[str, Any]:
    """Mean of (after - before) over the same prompts, with its 95 % interval.

    Raises:
        ValueError: if the two grids have different prompts.
    """
    if (before.documents, before.slots, before.example_ids) != (after.documents, after.slots, after.example_ids):
        raise ValueError("a paired comparison requires the same examples at the same slots")
    # The mean over slots leaves one number for each example, the unit that the bootstrap resamples.
    difference_E1 = (after.correct_ES - before.correct_ES).mean(1, keepdims=True)
    resampled_R1 = _resample_means(difference_E1, bootstrap_samples, seed)
    return {"mean_difference": float(difference_E1.mean()), "ci95": _interval(resampled_R1[:, 0])}


def _resample_means(value_ES: Floats, bootstrap_samples: int, seed: int) -> Floats:
    """(R, S) means over bootstrap resamples of the examples."""
    examples = len(value_ES)
    # How often an example is in a resample is multinomial, so a resample's mean is a product with these counts.
    # The generator depends on the seed alone, so models with the same examples are resampled in the same way.
    generator = derive_generator(seed, "bootstrap")
    count_RE = generator.multinomial(examples, np.full(examples, 1 / examples), bootstrap_samples)
    means_RS: Floats = count_RE @ value_ES / examples
    return means_RS


def _interval(value_R: Floats) -> Interval:
    """The 2.5 % and 97.5 % percentiles."""
    low, high = np.percentile(value_R, [2.5, 97.5])
    return float(low), float(high)
