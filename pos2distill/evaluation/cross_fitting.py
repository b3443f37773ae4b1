"""Accuracies at the best and the worst slot, without the bias of choosing both by the answers that measure them.

The examples are divided into two halves at random. One half chooses slots and the other measures them, and the reverse;
the result is the mean over many divisions.
Source: cross-fitting, as in Chernozhukov et al. 2018 (double machine learning).

Shapes: E examples, S slots, R resamples, D directions (two of each division).
"""

from collections.abc import Callable, Sequence

import numpy as np

from pos2distill.evaluation.gap import score_excess
from pos2distill.evaluation.statistics import Interval, bound_for_none, resample_counts, student_t
from pos2distill.randomness import derive_generator
from pos2distill.records import Bools, Floats

_SPLITS = 200  # random divisions; others would change an estimate by less than a tenth of its standard error
_RESAMPLE_SPLITS = 20  # only their spread is used

# (R, S) accuracies of the half that chooses -> (R, S) factors of the accuracies that the other half measures.
_Contrast = Callable[[Floats], Floats]


def corrected_gap(correct_ES: Floats, *, seed: int) -> float:
    """The GAP, cross-fitted: the best and the worst slot of one half are compared on the other.

    If position has no effect, its expectation is 0, while that of max - min is above 0. It may be negative.
    Half of the examples choose less well than all of them would, so if slots differ little, it is somewhat below the
    true GAP.
    """
    return float(_parts(correct_ES, correct_ES, _best_less_worst, seed).mean())


def gap_change(before_ES: Floats, after_ES: Floats, *, bootstrap_samples: int, seed: int) -> tuple[float, Interval]:
    """The change of the corrected GAP, after - before, on the same examples, and its 95 % interval.

        se = (b + min(b, sqrt(2) s)) / 2,   [change - sqrt((t se)^2 + x_before), change + sqrt((t se)^2 + x_after)]

    b: the bootstrap's standard error; examples are resampled whole and stay in their half. s: the standard error of the
    mean of the examples' contributions to the change. b is right where slots differ clearly, and up to 1.4 times too
    large where they are equal, since resampling changes which slot is chosen more often than new examples would. s
    leaves out that another slot may be chosen: where two slots are equal, the variance is 2.1 s^2.
    A model whose slots differ by less has a corrected GAP that is further below the true one, so a fall of the GAP is
    overstated: by up to 3 points in the simulations of benchmarks/statistics.
    x: the uncertainty from few wrong answers that the standard error misses (`score_excess`): if a model is nearly
    always right, its GAP may be clearly larger, but hardly smaller. Each side is at least the bound for E equal
    examples (`bound_for_none`).
    Source: Zou and Donner 2008 (the interval of a difference from the sides of two).
    """
    return mean_gap_change(before_ES, [after_ES], bootstrap_samples=bootstrap_samples, seed=seed)


def mean_gap_change(
    before_ES: Floats, after: Sequence[Floats], *, bootstrap_samples: int, seed: int
) -> tuple[float, Interval]:
    """The mean of `gap_change` over several models on the same examples, and its 95 % interval over examples.

    Each model has its own best and worst slot. So this is not the change of the GAP of their average, in which slots
    that differ from model to model cancel. The interval does not cover how much trainings differ.
    """
    if before_ES.shape[1] == 1:
        return 0.0, (0.0, 0.0)
    count_RE = resample_counts(len(before_ES), bootstrap_samples, seed)
    before_E = _parts(before_ES, before_ES, _best_less_worst, seed)
    before_R = _resampled(before_ES, before_ES, _best_less_worst, count_RE, seed)
    after_E = np.mean([_parts(each_ES, each_ES, _best_less_worst, seed) for each_ES in after], axis=0)
    after_R = np.mean([_resampled(each_ES, each_ES, _best_less_worst, count_RE, seed) for each_ES in after], axis=0)
    excess = (score_excess(before_ES), float(np.mean([score_excess(each_ES) for each_ES in after])))
    return with_interval(after_E - before_E, after_R - before_R, fixed_factor=2**0.5, excess=excess)


def best_slot_change(
    before_ES: Floats, after_ES: Floats, *, bootstrap_samples: int, seed: int
) -> tuple[float, Interval]:
    """The change of the accuracy, after - before, at the slot that is best before, and its 95 % interval.

    The slot that is best among the same answers is good by chance too, and a model that did not change would seem to
    lose there. So one half of the examples chooses the slot and the other half measures the change at it. The interval
    is that of `gap_change`, with s instead of sqrt(2) s.
    """
    change_ES = after_ES - before_ES
    if len(before_ES) == 1:  # it cannot be divided
        return float((_best(before_ES) * change_ES).sum()), (-1.0, 1.0)
    count_RE = resample_counts(len(before_ES), bootstrap_samples, seed)
    change_R = _resampled(before_ES, change_ES, _best, count_RE, seed)
    return with_interval(_parts(before_ES, change_ES, _best, seed), change_R, fixed_factor=1)


def with_interval(
    part_E: Floats, change_R: Floats, *, fixed_factor: float, excess: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, Interval]:
    """A change between -1 and 1 with its interval, from the parts of the examples and the changes of resamples.

    Args:
        fixed_factor: factor for the standard error of the parts' mean.
        excess: what is added to the squares of the lower and of the upper side.
    """
    examples = len(part_E)
    change = min(1.0, max(-1.0, float(part_E.mean())))
    if examples == 1:
        return change, (-1.0, 1.0)
    bootstrap = float(change_R.std(ddof=1)) * (examples / (examples - 1)) ** 0.5
    fixed = fixed_factor * float(part_E.std(ddof=1)) / examples**0.5
    margin = student_t(examples - 1) * (bootstrap + min(bootstrap, fixed)) / 2
    below, above = (max((margin**2 + beyond) ** 0.5, bound_for_none(examples)) for beyond in excess)
    return change, (max(-1.0, change - below), min(1.0, change + above))


def _best_less_worst(choosing_RS: Floats) -> Floats:
    return _best(choosing_RS) - _best(-choosing_RS)


def _best(choosing_RS: Floats) -> Floats:
    chosen_RS = np.zeros(choosing_RS.shape)
    chosen_RS[np.arange(len(choosing_RS)), choosing_RS.argmax(1)] = 1
    return chosen_RS


def _parts(choosing_ES: Floats, measured_ES: Floats, contrast: _Contrast, seed: int) -> Floats:
    """(E,) each example's contribution while the other half chooses; the estimate is their mean over all divisions."""
    chooses_DE = _choosing_halves(len(choosing_ES), seed, _SPLITS)
    chosen_DS = contrast(_weighted_means(choosing_ES, chooses_DE.astype(float)))
    measured_ED = np.where(chooses_DE.T, 0.0, measured_ES @ chosen_DS.T)
    parts_E: Floats = measured_ED.sum(1) / _SPLITS
    return parts_E


def _resampled(choosing_ES: Floats, measured_ES: Floats, contrast: _Contrast, weight_RE: Floats, seed: int) -> Floats:
    """(R,) estimates of weighted examples. All copies of an example are in the same half."""
    total_R = np.zeros(len(weight_RE))
    for chooses_E in _choosing_halves(len(choosing_ES), seed, _RESAMPLE_SPLITS):
        chosen_RS = contrast(_weighted_means(choosing_ES[chooses_E], weight_RE[:, chooses_E]))
        total_R += (chosen_RS * _weighted_means(measured_ES[~chooses_E], weight_RE[:, ~chooses_E])).sum(1)
    return total_R / (2 * _RESAMPLE_SPLITS)


def _choosing_halves(examples: int, seed: int, splits: int) -> Bools:
    """(D, E) which examples choose, D = 2 splits: of each random division the first half, then the second."""
    generator = derive_generator(seed, "cross-fitted gap")
    order_DE = generator.permuted(np.tile(np.arange(examples), (splits, 1)), axis=1)
    in_first_DE = order_DE < examples // 2
    return np.stack([in_first_DE, ~in_first_DE], 1).reshape(2 * splits, examples)


def _weighted_means(value_ES: Floats, weight_RE: Floats) -> Floats:
    # A half without any weight (of a few examples, by chance) has means of 0.
    weight_R1 = np.maximum(weight_RE.sum(1, keepdims=True), 1)
    means_RS: Floats = weight_RE @ value_ES / weight_R1
    return means_RS
