"""The GAP of a curve, max - min over slots, with its interval, and the test whether position has any effect.

All count or resample whole examples, whose answers are not independent. benchmarks/statistics measures how often the
interval covers the truth.

Shapes: E examples, S slots, P pairs of slots, R draws.
"""

from statistics import NormalDist

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pos2distill.evaluation.statistics import Interval, Z, bound_for_none, student_factor
from pos2distill.randomness import derive_generator
from pos2distill.records import Bools, Floats

_Z_POWER = NormalDist().inv_cdf(0.8)

# Constants of `gap_interval`, chosen by simulation (benchmarks/statistics) such that the interval misses the true GAP
# in about 5 % of the cases: if slots are equal, whenever the test of position errs; otherwise each end misses in 0 to
# 3.5 %.
_LOWEST_ERROR = 0.025
_HIGHEST_ERROR = 0.015
_CONTENDING = 1.5  # standard errors, added to a pair's difference and subtracted from the largest one
_ABOVE_ZERO = 1e-6


def gap_interval(correct_ES: Floats, *, position_p: float, draws: int, seed: int) -> Interval:
    """A 95 % interval for the true GAP. It contains max - min always, and 0 where position has no effect at 5 %.

        low  = max over contending i, j of (d_ij - q se_ij), above 0 if position_p <= .05; else 0
        high = the largest g with P(max_i (g c_i + f e_i) - min_i (g c_i + f e_i) <= max - min) >= .015, or max - min

    d_ij: difference of slots i and j, with its standard error. A pair contends if its difference may be the largest:
    d_ij + 1.5 se_ij is at least the largest d - 1.5 se. q: 97.5 % quantile of max e_ij / se_ij over these pairs; e:
    normal errors of the accuracies, with the covariance of the examples' answers, enlarged for few examples as
    Student's t is; c: the accuracies' differences, divided by max - min. So `high` allows for max - min being above the
    true GAP on average, since noise adds to it. f: the factor by which e grows if the GAP is g (`_variance_at`), so
    that few wrong answers, which vary little, give an interval as wide as Wilson's. Where all accuracies are equal
    there is no shape c, and `high` is the score end of the pair that varies most.
    `low` is at most Wilson's lower bound for E of E. It is above 0 by mistake as often as the test of position is wrong
    (see `position_p_value`).
    Source: selection of contending pairs as in Chernozhukov, Lee and Rosen 2013 (intersection bounds).

    Args:
        position_p: the result of `position_p_value`.
    """
    if correct_ES.shape[1] == 1:
        return 0.0, 0.0
    accuracy_S, error_SS = correct_ES.mean(0), _difference_errors(correct_ES)
    noise_RS = _noise(correct_ES, draws, seed)
    low = 0.0
    if position_p <= 0.05:
        difference_SS = accuracy_S[:, None] - accuracy_S[None, :]
        contends_SS = _contending(difference_SS, error_SS)
        quantile = _quantile_of_largest(contends_SS, error_SS, noise_RS)
        low = max(float((difference_SS - quantile * error_SS)[contends_SS].max()), _ABOVE_ZERO)
    if np.ptp(accuracy_S) > 0:
        high = max(_gap_with(_HIGHEST_ERROR, correct_ES, noise_RS), float(np.ptp(accuracy_S)))
    else:  # there is no shape to scale
        first, second = np.unravel_index(error_SS.argmax(), error_SS.shape)
        quantile = -NormalDist().inv_cdf(_HIGHEST_ERROR)
        high = _score_end(correct_ES[:, [first]] - correct_ES[:, [second]], quantile)
    return min(low, 1 - bound_for_none(len(correct_ES))), high


def score_excess(correct_ES: Floats) -> float:
    """The uncertainty of max - min from few wrong answers that its standard error misses: (u - d)^2 - z^2 v / n, or 0.

    d, v: mean and variance of the examples' differences between the best and the worst slot; u: the upper end of the
    score interval of d. Near 0 where both slots have many wrong answers. The largest over equally good slots.
    """
    difference_EP = _differences_of_extremes(correct_ES)
    end = _score_end(difference_EP, Z)
    variance = float(difference_EP.var(0).max())
    return max(0.0, (end - float(difference_EP[:, 0].mean())) ** 2 - Z**2 * variance / len(correct_ES))


def _differences_of_extremes(correct_ES: Floats) -> Floats:
    """(E, P) differences between the best and the worst slot, for all pairs of equally good best and worst ones."""
    accuracy_S = correct_ES.mean(0)
    best_ES = correct_ES[:, accuracy_S >= accuracy_S.max() - 1e-12]
    worst_ES = correct_ES[:, accuracy_S <= accuracy_S.min() + 1e-12]
    difference_EP: Floats = (best_ES[:, :, None] - worst_ES[:, None, :]).reshape(len(correct_ES), -1)
    return difference_EP


def _variance_at(mean: float, difference_EP: Floats) -> Floats:
    """(P,) variances of the examples' differences if their mean were g instead of d.

        v(g) = sqrt(q^2 + k^2 (g^2 - d^2)) - g^2,   q = mean of d_e^2, k = q / mean of |d_e|

    The differences in one direction become rarer by the factor by which those in the other become more frequent. For
    answers of 0 and 1, if the worst slot is never right where the best one is wrong, v(g) = g (1 - g), as for a
    proportion.
    """
    squared_P = (difference_EP**2).mean(0)
    absolute_P = np.abs(difference_EP).mean(0)
    size_P = np.divide(squared_P, absolute_P, out=np.ones_like(squared_P), where=absolute_P > 0)
    inner_P = squared_P**2 + size_P**2 * (mean**2 - difference_EP.mean(0) ** 2)
    variance_P: Floats = np.maximum(np.sqrt(np.maximum(inner_P, 0.0)) - mean**2, 0.0)
    return variance_P


def _score_end(difference_EP: Floats, quantile: float) -> float:
    """The upper end of the score interval of the mean d of differences: the largest g with g - d <= q sqrt(v(g) / n).

    For a single proportion this is Wilson's interval. Source: score intervals of paired proportions, as in Tango
    1998, here with the variance of `_variance_at`. The largest over pairs with the same d.
    """
    mean = float(difference_EP[:, 0].mean())
    low, high = mean, 1.0
    for _ in range(30):  # to a billionth
        middle = (low + high) / 2
        margin = quantile * float(_variance_at(middle, difference_EP).max() / len(difference_EP)) ** 0.5
        low, high = (middle, high) if middle - mean <= margin else (low, middle)
    return low


def questions_above(correct_ES: Floats, limit: float, *, draws: int, seed: int) -> int | None:
    """How many questions it takes for the lower end of `gap_interval` to be above `limit` with 80 % power.

        n = E ((q + z_.8) se / (g - limit))^2, and at least so many that Wilson's bound for n of n is above the limit

    q, se: as in `gap_interval`, for the best and the worst slot. g: the GAP for which the measured max - min is the
    median. None if g is not above the limit. Assumes that position has an effect at 5 %.
    """
    accuracy_S, error_SS = correct_ES.mean(0), _difference_errors(correct_ES)
    if np.ptp(accuracy_S) == 0:
        return None
    noise_RS = _noise(correct_ES, draws, seed)
    excess = _gap_with(0.5, correct_ES, noise_RS) - limit
    if excess <= 0:
        return None
    contends_SS = _contending(accuracy_S[:, None] - accuracy_S[None, :], error_SS)
    quantile = _quantile_of_largest(contends_SS, error_SS, noise_RS)
    margin = (quantile + _Z_POWER) * float(error_SS[accuracy_S.argmax(), accuracy_S.argmin()])
    # Wilson's lower bound for n of n is n / (n + z^2).
    fewest = np.floor(Z**2 * limit / (1 - limit)) + 1
    return int(max(np.ceil(len(correct_ES) * (margin / excess) ** 2), fewest))


def difference_variances(correct_ES: Floats) -> Floats:
    """(S, S) variances, over examples, of the difference of an example's answers at two slots."""
    covariance_SS = np.atleast_2d(np.cov(correct_ES, rowvar=False, bias=True))
    variance_S = covariance_SS.diagonal()
    # Rounding may make the variance of two equal slots' difference negative.
    variance_SS: Floats = np.maximum(variance_S[:, None] + variance_S[None, :] - 2 * covariance_SS, 0)
    return variance_SS


def _difference_errors(correct_ES: Floats) -> Floats:
    """(S, S) standard errors of the differences of slots' accuracies."""
    errors_SS: Floats = np.sqrt(difference_variances(correct_ES) / max(len(correct_ES) - 1, 1))
    return errors_SS


def _noise(correct_ES: Floats, draws: int, seed: int) -> Floats:
    """(R, S) normal errors of the accuracies. Estimated from few examples they would be too small, and are enlarged."""
    examples = len(correct_ES)
    weight_RE = derive_generator(seed, "errors of accuracies").normal(size=(draws, examples))
    noise_RS: Floats = weight_RE @ (correct_ES - correct_ES.mean(0)) / examples * _enlargement(examples)
    return noise_RS


def _enlargement(examples: int) -> float:
    """Factor that widens a standard error estimated from few examples (Bessel, Student's t)."""
    return float((examples / max(examples - 1, 1)) ** 0.5 * student_factor(examples))


def _contending(difference_SS: Floats, error_SS: Floats) -> Bools:
    """(S, S) whether a pair of slots may have the largest difference."""
    margin_SS = _CONTENDING * error_SS
    contends_SS: Bools = difference_SS + margin_SS >= (difference_SS - margin_SS).max()
    return contends_SS


def _quantile_of_largest(contends_SS: Bools, error_SS: Floats, noise_RS: Floats) -> float:
    """The quantile of the largest error of the contending differences, each divided by its standard error."""
    # A pair that agrees in every example has no error, and is left out.
    divisor_SS = np.where(contends_SS & (error_SS > 1e-12), error_SS, np.inf)
    largest_R = np.zeros(len(noise_RS))
    for slot, divisor_S in enumerate(divisor_SS):
        studentised_RS = (noise_RS[:, [slot]] - noise_RS) / divisor_S
        largest_R = np.maximum(largest_R, studentised_RS.max(1))
    return float(np.quantile(largest_R, 1 - _LOWEST_ERROR))


def _gap_with(probability: float, correct_ES: Floats, noise_RS: Floats) -> float:
    """The largest GAP of this shape for which max - min is at most the measured one with this probability; or 0."""
    accuracy_S = correct_ES.mean(0)
    gap = float(np.ptp(accuracy_S))
    shape_S = (accuracy_S - accuracy_S.mean()) / gap
    difference_EP = _differences_of_extremes(correct_ES)
    variance_P = difference_EP.var(0)
    low, high = 0.0, 1.0
    for _ in range(20):  # to a millionth
        middle = (low + high) / 2
        larger_P = np.ones_like(variance_P)
        if middle > gap:
            np.divide(_variance_at(middle, difference_EP), variance_P, out=larger_P, where=variance_P > 1e-12)
        factor = float(larger_P.max()) ** 0.5
        as_small = float((np.ptp(middle * shape_S + factor * noise_RS, axis=1) <= gap).mean())
        low, high = (middle, high) if as_small >= probability else (low, middle)
    return low


def position_p_value(correct_ES: Floats, *, draws: int, seed: int) -> float:
    """The probability that slots differ at least as much as these if position has no effect.

    The answers of each example are shifted by a random number of slots, those beyond the last slot to the first ones,
    and the variance of the slots' accuracies is compared. Shifts keep neighboring slots together, whose answers may be
    similar. A permutation within each example would not, and would reject too often for models without a best slot
    (benchmarks/statistics). With two slots both are the same exact test.
    Shifts presuppose that the correlation of two slots depends on their distance alone: false alarms at 5 % are up to
    .19 where one slot is answered independently of all others, which are alike; with the correlations of the real
    models measured there .03 to .06.
    Source: randomization within matched samples; (1 + as large) / (1 + draws) as in Phipson and Smyth 2010.
    """
    generator = derive_generator(seed, "position test")
    examples, slots = correct_ES.shape
    # [e, k]: the answers of example e, shifted by k slots.
    shifted_ESS = sliding_window_view(np.hstack([correct_ES, correct_ES]), slots, axis=1)
    # A little less than observed counts too: equal values may differ by rounding.
    observed = float(correct_ES.mean(0).var()) - 1e-12
    as_large = 0
    for _ in range(draws):
        shift_E = generator.integers(slots, size=examples)
        as_large += float(shifted_ESS[np.arange(examples), shift_E].mean(0).var()) >= observed
    return (1 + as_large) / (1 + draws)
