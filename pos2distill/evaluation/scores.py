"""Accuracy by slot, its mean and GAP with bootstrap intervals, and the paired difference of two models.

A slot here is a placement: of several hops, an ordered tuple of slots.
Shapes: E examples, S slots, R bootstrap bootstrap_samples.
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
    """Every example asked at every placement: `correct_ES` holds 1 where the answer was right, else 0; `f1_ES` its F1.

    slots: of each placement; where examples have different numbers of hops, those of the fewest. groups: "" for none.
    """

    documents: int
    slots: tuple[Slots, ...]
    groups: tuple[str, ...]
    example_ids: tuple[str, ...]
    correct_ES: Floats
    f1_ES: Floats


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy by slot and what follows from it; fractions, not percent.

    slots: a number each, or the list of an ordered tuple. gap: max - min of accuracy_by_slot. by_group: mean accuracy
    of each group of placements. f1: mean token F1. Intervals: 95 %, percentile bootstrap over examples. The bootstrap
    of a maximum minus a minimum leans high, so gap_ci95 can lie above the gap itself.
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
    """A placement as people read it, from 1: `7`, or `7>19` for the first hop at 7 and the second at 19."""
    return ">".join(str(slot + 1) for slot in ((slots,) if isinstance(slots, int) else slots))


def truncation_warning(counts: Mapping[str, int]) -> str | None:
    """What to say of a stage's answers if more than a tenth of them had no room to end.

    Args:
        counts: of a manifest; of samples, or of a model's answers, or of a stage that generates nothing.
    """
    section, answers = ("sampling", counts["sampled"]) if "sampled" in counts else ("evaluation", counts.get("prompts"))
    cut = counts.get("hit_max_tokens", 0)
    if not answers or 10 * cut <= answers:
        return None
    return f"{cut} of {answers} answers were cut at {section}.max_new_tokens; raise it if they were not done"


def to_grid(predictions: pa.Table, documents: int) -> Grid:
    """The predictions of one prompt length as a grid.

    Raises:
        ValueError: if an example was not asked exactly once at each placement.
    """
    chosen = predictions.filter(pc.field("documents") == documents)
    ids, row_E = np.unique(chosen["example_id"].to_numpy(zero_copy_only=False), return_inverse=True)
    numbers, column_S = np.unique(chosen["placement"].to_numpy(), return_inverse=True)
    asked = np.zeros((len(ids), len(numbers)), int)
    np.add.at(asked, (row_E, column_S), 1)
    if not asked.size or not (asked == 1).all():
        raise ValueError(f"{documents} documents: want each example once at each slot, got counts {np.unique(asked)}")
    correct_ES, f1_ES = np.zeros(asked.shape), np.zeros(asked.shape)
    correct_ES[row_E, column_S] = chosen["correct"].to_numpy(zero_copy_only=False)
    f1_ES[row_E, column_S] = chosen["f1"].to_numpy(zero_copy_only=False)
    slots: dict[int, Slots] = {}
    groups: dict[int, str] = {}
    for number, own, group in zip(*(chosen[name].to_pylist() for name in ("placement", "slots", "group")), strict=True):
        if number not in slots or len(own) < len(slots[number]):
            slots[number], groups[number] = tuple(own), group
    return Grid(
        documents,
        tuple(slots[number] for number in numbers.tolist()),
        tuple(groups[number] for number in numbers.tolist()),
        tuple(ids.tolist()),
        correct_ES,
        f1_ES,
    )


def to_curve(grid: Grid, *, bootstrap_samples: int, seed: int) -> Curve:
    """Accuracy by slot with intervals. Examples are resampled whole, since one example's slots are not independent."""
    accuracy_S = grid.correct_ES.mean(0)
    resampled_RS = _resample_means(grid.correct_ES, bootstrap_samples, seed)
    names = dict.fromkeys(group for group in grid.groups if group)
    return Curve(
        documents=grid.documents,
        examples=len(grid.example_ids),
        slots=tuple(slots[0] if len(slots) == 1 else slots for slots in grid.slots),
        groups=grid.groups,
        accuracy_by_slot=tuple(accuracy_S.tolist()),
        accuracy_ci95=tuple(_interval(column_R) for column_R in resampled_RS.T),
        mean=float(accuracy_S.mean()),
        ci95=_interval(resampled_RS.mean(1)),
        gap=float(np.ptp(accuracy_S)),
        gap_ci95=_interval(np.ptp(resampled_RS, axis=1)),
        f1=float(grid.f1_ES.mean()),
        by_group={name: float(accuracy_S[[group == name for group in grid.groups]].mean()) for name in names},
    )


def paired_difference(before: Grid, after: Grid, *, bootstrap_samples: int, seed: int) -> dict[str, Any]:
    """Mean of (after - before) over the same prompts, with its interval.

    Raises:
        ValueError: if the two grids hold different prompts.
    """
    if (before.documents, before.slots, before.example_ids) != (after.documents, after.slots, after.example_ids):
        raise ValueError("a paired comparison wants the same examples at the same slots")
    difference_E1 = (after.correct_ES - before.correct_ES).mean(1, keepdims=True)
    interval = _interval(_resample_means(difference_E1, bootstrap_samples, seed)[:, 0])
    return {"mean_difference": float(difference_E1.mean()), "ci95": interval}


def _resample_means(value_ES: Floats, bootstrap_samples: int, seed: int) -> Floats:
    examples = len(value_ES)
    draws = derive_generator(seed, "bootstrap").multinomial(
        examples, np.full(examples, 1 / examples), bootstrap_samples
    )
    means_RS: Floats = draws @ value_ES / examples
    return means_RS


def _interval(value_R: Floats) -> Interval:
    low, high = np.percentile(value_R, [2.5, 97.5])
    return float(low), float(high)
