"""Accuracy by slot, its mean and GAP with bootstrap intervals, and the paired difference of two models.

Shapes: E examples, S slots, R bootstrap resamples.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.randomness import derive_generator

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Grid:
    """Every example asked at every slot: `correct_ES` holds 1 where the answer was right, else 0."""

    documents: int
    slots: tuple[int, ...]
    example_ids: tuple[str, ...]
    correct_ES: Floats


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy by slot and what follows from it; fractions, not percent.

    gap: max - min of accuracy_by_slot. Intervals: 95 %, percentile bootstrap over examples. The bootstrap of a maximum
    minus a minimum leans high, so gap_ci95 can lie above the gap itself.
    """

    documents: int
    examples: int
    slots: tuple[int, ...]
    accuracy_by_slot: tuple[float, ...]
    accuracy_ci95: tuple[Interval, ...]
    mean: float
    ci95: Interval
    gap: float
    gap_ci95: Interval


def to_grid(predictions: pa.Table, documents: int) -> Grid:
    """The predictions of one prompt length as a grid.

    Raises:
        ValueError: if an example was not asked exactly once at each slot.
    """
    chosen = predictions.filter(pc.field("documents") == documents)
    ids, row_E = np.unique(chosen["example_id"].to_numpy(zero_copy_only=False), return_inverse=True)
    slots, column_S = np.unique(chosen["slot"].to_numpy(), return_inverse=True)
    asked = np.zeros((len(ids), len(slots)), int)
    np.add.at(asked, (row_E, column_S), 1)
    if not asked.size or not (asked == 1).all():
        raise ValueError(f"{documents} documents: want each example once at each slot, got counts {np.unique(asked)}")
    correct_ES = np.zeros(asked.shape)
    correct_ES[row_E, column_S] = chosen["correct"].to_numpy(zero_copy_only=False)
    return Grid(documents, tuple(slots.tolist()), tuple(ids.tolist()), correct_ES)


def to_curve(grid: Grid, *, resamples: int, seed: int) -> Curve:
    """Accuracy by slot with intervals. Examples are resampled whole, since one example's slots are not independent."""
    accuracy_S = grid.correct_ES.mean(0)
    resampled_RS = _resample_means(grid.correct_ES, resamples, seed)
    return Curve(
        documents=grid.documents,
        examples=len(grid.example_ids),
        slots=grid.slots,
        accuracy_by_slot=tuple(accuracy_S.tolist()),
        accuracy_ci95=tuple(_interval(column_R) for column_R in resampled_RS.T),
        mean=float(accuracy_S.mean()),
        ci95=_interval(resampled_RS.mean(1)),
        gap=float(np.ptp(accuracy_S)),
        gap_ci95=_interval(np.ptp(resampled_RS, axis=1)),
    )


def paired_difference(before: Grid, after: Grid, *, resamples: int, seed: int) -> dict[str, Any]:
    """Mean of (after - before) over the same prompts, with its interval.

    Raises:
        ValueError: if the two grids hold different prompts.
    """
    if (before.documents, before.slots, before.example_ids) != (after.documents, after.slots, after.example_ids):
        raise ValueError("a paired comparison wants the same examples at the same slots")
    difference_E1 = (after.correct_ES - before.correct_ES).mean(1, keepdims=True)
    interval = _interval(_resample_means(difference_E1, resamples, seed)[:, 0])
    return {"mean_difference": float(difference_E1.mean()), "ci95": interval}


def _resample_means(value_ES: Floats, resamples: int, seed: int) -> Floats:
    examples = len(value_ES)
    draws = derive_generator(seed, "bootstrap").multinomial(examples, np.full(examples, 1 / examples), resamples)
    means_RS: Floats = draws @ value_ES / examples
    return means_RS


def _interval(value_R: Floats) -> Interval:
    low, high = np.percentile(value_R, [2.5, 97.5])
    return float(low), float(high)
