"""Intervals and tests for accuracies by slot. All resample or count whole examples, whose answers are not independent.

benchmarks/statistics measures how often each interval covers the truth.

Shapes: E examples, S slots, R resamples.
"""

from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from pos2distill.randomness import derive_generator

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]

_Z = NormalDist().inv_cdf(0.975)
_Z_POWER = NormalDist().inv_cdf(0.8)
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776)

# Of `gap_interval`, chosen by simulation (benchmarks/statistics), so that both ends together err in about 5 %: where
# slots are equal, all errors are those of the test of position; elsewhere each end errs in 0 to 3.5 %.
_LOWEST_ERROR = 0.025
_HIGHEST_ERROR = 0.015
_CONTENDING = 1.5  # standard errors by which a pair may be behind the largest difference, and ahead of its own
_ABOVE_ZERO = 1e-6
_FEW = 10  # examples, which do not tell how much examples differ
# Examples that tell two slots apart. If there are fewer, more than 1.5 % of the resamples have none of them (e^-4), and
# the bootstrap's errors cannot be as large as those of new examples.
_FEW_TELLING = 5

# Lower ends n p, with 1, 2 and 3 of n, near which Wilson's are too high: P(X >= x) = .05 of Poisson's distribution.
_POISSON_LOWER = (0.0513, 0.3554, 0.8177)


def accuracy_interval(value_E: Floats, answers: float = 1) -> Interval:
    """A 95 % interval for the mean of values between 0 and 1: Wilson's, with the effective number of examples.

        n = m (1 - m) / (variance of the mean) * (z / t)^2,   center = (m + z^2 / 2n) / (1 + z^2 / n)

    For values of 0 and 1, n is their number, and this is Wilson's interval for a proportion; with one to three right or
    wrong, of ten times as many or more, the near end is Poisson's, since Wilson's is too far from 0 or 1 there.
    For examples that are scored at several slots, n says how many independent answers tell as much; Student's t, since
    their variance is estimated. Where all examples are equal, n is their number, so that 100 of 100 give [.963, 1].
    Source: Wilson 1927; near 0 and 1 Brown, Cai and DasGupta 2001, section 4.1.1; effective number as in surveys (Korn
    and Graubard 1998).

    Args:
        value_E: mean of each example's answers. answers: how many independent answers an example can tell as much as,
            which is their number if they have equal weights; n is at most E * answers.
    """
    # Weighted sums of answers that are all right differ from 1, and from one another, by rounding.
    value_E = np.clip(value_E.round(12), 0.0, 1.0)
    examples = len(value_E)
    mean = float(value_E.mean())
    effective = float(examples)
    is_proportion = bool(np.isin(value_E, (0.0, 1.0)).all())
    if not is_proportion and np.ptp(value_E) > 0:
        variance = float(value_E.var(ddof=1)) / examples
        effective = mean * (1 - mean) / variance / _tail(examples) ** 2
    low, high = _wilson(mean, min(effective, examples * answers))
    if is_proportion:
        right = int(value_E.sum())
        low = min(low, _poisson_lower(right, examples))
        high = max(high, 1 - _poisson_lower(examples - right, examples))
    return low, high


def difference_interval(difference_E: Floats) -> Interval:
    """A 95 % interval for the mean of paired differences between -1 and 1: mean +- t * standard error.

    Where all examples differ by the same, the standard error is 0. Then it is as wide as what 0 of E examples leave
    open, Wilson's bound, which would be too wide with any variation: means over many slots vary little.
    """
    examples = len(difference_E)
    if examples == 1:
        return -1.0, 1.0
    mean = float(difference_E.mean())
    margin = student_t(examples - 1) * float(difference_E.std(ddof=1)) / examples**0.5
    if np.ptp(difference_E) == 0:
        margin = bound_for_none(examples)
    return max(-1.0, mean - margin), min(1.0, mean + margin)


def ratio_interval(part_E: Floats, total_E: Floats, *, resamples: int, seed: int) -> Interval:
    """A 95 % interval for a ratio of means of values >= 0, such as nats: the bootstrap-t of its logarithm.

        t* = (log r* - log r) / se*,   [r exp(-t*_.975 se), r exp(-t*_.025 se)],   r = sum part / sum total

    se: of log r, linearised. Values that few examples dominate make the percentiles of r* too narrow; the logarithm and
    the division by se* allow for their skewness. The interval stays within the ratios of the single examples, so with
    fewer than about ten it is too narrow, and of one example it is a point.
    Source: Efron and Tibshirani 1993, chapter 12 (bootstrap-t, transformations).

    Args:
        part_E, total_E: of each example; the sum of the second is above 0, and the first is 0 where the second is. All
            ones for the mean of the first.
    """
    ratio = float(part_E.sum() / total_E.sum())
    error = float(_log_ratio_errors(part_E, total_E, np.ones((1, len(part_E))))[0])
    if ratio == 0 or error == 0:
        return ratio, ratio
    count_RE = resample_counts(len(part_E), resamples, seed)
    count_RE = count_RE[count_RE @ total_E > 0]
    ratio_R = (count_RE @ part_E) / (count_RE @ total_E)
    difference_R = np.log(np.maximum(ratio_R, np.finfo(float).tiny)) - np.log(ratio)
    error_R = _log_ratio_errors(part_E, total_E, count_RE)
    # A resample of equal examples has no error, and counts as extreme.
    extreme_R = np.where(difference_R == 0, 0.0, np.copysign(np.inf, difference_R))
    t_R = np.divide(difference_R, error_R, out=extreme_R, where=error_R > 0)
    highest = float(np.quantile(t_R, 0.975, method="higher"))
    lowest = float(np.quantile(t_R, 0.025, method="lower"))
    single_E = part_E[total_E > 0] / total_E[total_E > 0]
    with np.errstate(over="ignore"):
        low, high = ratio * np.exp(-highest * error), ratio * np.exp(-lowest * error)
    # Of equal examples, the ratio may differ from theirs by rounding.
    return min(ratio, max(float(low), float(single_E.min()))), max(ratio, min(float(high), float(single_E.max())))


def share_interval(part_E: Floats, total_E: Floats, *, answers: float, resamples: int, seed: int) -> Interval:
    """A 95 % interval for a ratio of sums that is at most 1, such as the fraction of tokens that a model recovers.

    `ratio_interval` of the smaller one of the share and what it leaves: that one is skewed, and an interval that is
    not is too narrow for shares near 0 or 1 (benchmarks/statistics). At most as wide as Wilson's for examples that are
    right or wrong as a whole, which vary most, and equal to it for fewer than ten examples. Where all examples have the
    same share, and for examples with one answer each, `accuracy_interval`.

    Args:
        part_E, total_E: of each example; 0 <= part <= total, total > 0. answers: as of `accuracy_interval`.
    """
    share_E = part_E / total_E
    if answers == 1 or np.ptp(share_E.round(12)) == 0:
        return accuracy_interval(share_E, answers)
    # Examples of different sizes tell as much as fewer of one size.
    lowest, highest = _wilson(float(part_E.sum() / total_E.sum()), float(total_E.sum() ** 2 / (total_E**2).sum()))
    if len(part_E) < _FEW:
        return lowest, highest
    left_E = np.where(total_E - part_E > 1e-9, total_E - part_E, 0.0)
    is_small = part_E.sum() <= left_E.sum()
    low, high = ratio_interval(part_E if is_small else left_E, total_E, resamples=resamples, seed=seed)
    if not is_small:
        low, high = 1 - high, 1 - low
    return max(low, lowest), min(high, highest)


def _log_ratio_errors(part_E: Floats, total_E: Floats, count_RE: Floats) -> Floats:
    """(R,) standard errors of log(sum part / sum total) for examples that are counted so often; 0 for a ratio of 0."""
    part_R, total_R = count_RE @ part_E, count_RE @ total_E
    ratio_R = part_R / total_R
    residual_RE = part_E - ratio_R[:, None] * total_E
    error_R = np.sqrt((count_RE * residual_RE**2).sum(1))
    few = len(part_E) / max(len(part_E) - 1, 1)
    errors_R: Floats = np.divide(few**0.5 * error_R, part_R, out=np.zeros(len(part_R)), where=part_R > 0)
    return errors_R


def gap_interval(correct_ES: Floats, *, position_p: float, resamples: int, seed: int) -> Interval:
    """A 95 % interval for the true GAP. It contains max - min always, and 0 where position has no effect at 5 %.

        low  = max over contending i, j of (d_ij - q se_ij), above 0 if position_p <= .05; else 0
        high = the largest g with P(max_i (g c_i + e_i) - min_i (g c_i + e_i) <= max - min) >= .015, or max - min

    d_ij: difference of slots i and j, with its standard error. A pair contends if its difference may be the largest:
    d_ij + 1.5 se_ij is at least the largest d - 1.5 se. q: 97.5 % quantile of max (d*_ij - d_ij) / se_ij over these
    pairs, by the bootstrap; e: the bootstrap's errors of the accuracies, enlarged for few examples as Student's t is;
    c: the accuracies' differences, divided by max - min. So `high` allows for max - min being above the true GAP on
    average, since noise adds to it.
    Where all accuracies are equal there is no shape c, and `high` is 2.17 of the largest se, enlarged as e is.
    Where one to four examples tell the best slot from the worst, it is at least the end of `pair_interval`.
    `low` is at most, and `high` at least, what E equal examples leave open: Wilson's bounds for E and 0 of E.
    Source: selection of contending pairs as in Chernozhukov, Lee and Rosen 2013 (intersection bounds).

    Args:
        position_p: the result of `position_p_value`.
    """
    if correct_ES.shape[1] == 1:
        return 0.0, 0.0
    accuracy_S, error_SS = correct_ES.mean(0), _difference_errors(correct_ES)
    noise_RS = _noise(correct_ES, resamples, seed)
    low = 0.0
    if position_p <= 0.05:
        difference_SS = accuracy_S[:, None] - accuracy_S[None, :]
        contends_SS = _contending(difference_SS, error_SS)
        quantile = _quantile_of_largest(contends_SS, error_SS, noise_RS)
        low = max(float((difference_SS - quantile * error_SS)[contends_SS].max()), _ABOVE_ZERO)
    if np.ptp(accuracy_S) > 0:
        high = max(_gap_with(_HIGHEST_ERROR, accuracy_S, noise_RS), float(np.ptp(accuracy_S)))
        if few_tell(correct_ES):
            high = max(high, pair_interval(correct_ES)[1])
    else:  # there is no shape to scale
        quantile = -NormalDist().inv_cdf(_HIGHEST_ERROR) * _tail(len(correct_ES))
        high = min(1.0, quantile * float(error_SS.max()))
    open_end = bound_for_none(len(correct_ES))
    return min(low, 1 - open_end), max(high, open_end)


def pair_interval(correct_ES: Floats) -> Interval:
    """The 95 % score interval of the difference between the slots with the highest and the lowest accuracy.

        the g with (g - d)^2 = z^2 v(g) / n,   v(g) = v + g (1 - g) - d (1 - d)

    d, v: mean and variance of the examples' differences. A difference g has the variance of d and that of the errors
    that it has beyond d; the bootstrap knows only v. If the worst slot is never right alone, this is Wilson's interval.
    It is of one pair, and does not allow for the choice of it.
    Source: score intervals of paired proportions, as in Tango 1998, with a simpler v.
    """
    difference_E = _best_less_worst(correct_ES)
    examples, difference = len(difference_E), float(difference_E.mean())
    variance = float(difference_E.var())
    beyond = variance - difference * (1 - difference)
    root = _Z**2 + 4 * examples * variance + 4 * _Z**2 * beyond
    margin = _Z * max(root, 0.0) ** 0.5
    center = 2 * examples * difference + _Z**2
    divisor = 2 * (examples + _Z**2)
    return max(-1.0, float(center - margin) / divisor), min(1.0, float(center + margin) / divisor)


def few_tell(correct_ES: Floats) -> bool:
    """Whether so few examples differ at the best and the worst slot that the bootstrap knows too little of both.

    Where none does, nothing is resampled, and `bound_for_none` says what is left open.
    """
    return 0 < int(np.count_nonzero(_best_less_worst(correct_ES))) < _FEW_TELLING


def _best_less_worst(correct_ES: Floats) -> Floats:
    accuracy_S = correct_ES.mean(0)
    return correct_ES[:, accuracy_S.argmax()] - correct_ES[:, accuracy_S.argmin()]


def questions_above(correct_ES: Floats, limit: float, *, resamples: int, seed: int) -> int | None:
    """Questions with which the lower end of `gap_interval` would be above `limit` with a power of 80 %.

        n = E ((q + z_.8) se / (g - limit))^2, and so many that the bound for E of E is above the limit

    q, se: as of `gap_interval`, for the best and the worst slot. g: the GAP with which max - min is as likely above the
    measured one as below. None if it is not above the limit. That position has an effect at 5 % is presupposed.
    """
    accuracy_S, error_SS = correct_ES.mean(0), _difference_errors(correct_ES)
    if np.ptp(accuracy_S) == 0:
        return None
    noise_RS = _noise(correct_ES, resamples, seed)
    excess = _gap_with(0.5, accuracy_S, noise_RS) - limit
    if excess <= 0:
        return None
    contends_SS = _contending(accuracy_S[:, None] - accuracy_S[None, :], error_SS)
    quantile = _quantile_of_largest(contends_SS, error_SS, noise_RS)
    margin = (quantile + _Z_POWER) * float(error_SS[accuracy_S.argmax(), accuracy_S.argmin()])
    # Wilson's lower bound for n of n is n / (n + z^2).
    fewest = np.floor(_Z**2 * limit / (1 - limit)) + 1
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


def _noise(correct_ES: Floats, resamples: int, seed: int) -> Floats:
    """(R, S) the bootstrap's errors of the accuracies. Those of few examples are too small, and are enlarged."""
    examples = len(correct_ES)
    mean_RS = resample_counts(examples, resamples, seed) @ correct_ES / examples
    noise_RS: Floats = (mean_RS - correct_ES.mean(0)) * _enlargement(examples)
    return noise_RS


def _enlargement(examples: int) -> float:
    """By how much an error of the bootstrap is too small, as a normal one, for so many examples."""
    return float((examples / max(examples - 1, 1)) ** 0.5 * _tail(examples))


def _tail(examples: int) -> float:
    """Student's quantile over the normal one, for an error that so many examples estimate."""
    return student_t(examples - 1) / _Z if examples > 1 else 1.0


def _contending(difference_SS: Floats, error_SS: Floats) -> npt.NDArray[np.bool_]:
    """(S, S) whether a pair of slots may have the largest difference."""
    margin_SS = _CONTENDING * error_SS
    contends_SS: npt.NDArray[np.bool_] = difference_SS + margin_SS >= (difference_SS - margin_SS).max()
    return contends_SS


def _quantile_of_largest(contends_SS: npt.NDArray[np.bool_], error_SS: Floats, noise_RS: Floats) -> float:
    """The quantile of the largest error of the contending differences, each divided by its standard error."""
    # A pair that agrees in every example has no error, and takes no part.
    divisor_SS = np.where(contends_SS & (error_SS > 1e-12), error_SS, np.inf)
    largest_R = np.zeros(len(noise_RS))
    for slot, divisor_S in enumerate(divisor_SS):
        studentised_RS = (noise_RS[:, [slot]] - noise_RS) / divisor_S
        largest_R = np.maximum(largest_R, studentised_RS.max(1))
    return float(np.quantile(largest_R, 1 - _LOWEST_ERROR))


def _gap_with(probability: float, accuracy_S: Floats, noise_RS: Floats) -> float:
    """The largest GAP of this shape with which max - min is, with this probability, at most the measured one; or 0."""
    gap = float(np.ptp(accuracy_S))
    shape_S = (accuracy_S - accuracy_S.mean()) / gap
    low, high = 0.0, 1.0
    for _ in range(20):  # to a millionth
        middle = (low + high) / 2
        as_small = float((np.ptp(middle * shape_S + noise_RS, axis=1) <= gap).mean())
        low, high = (middle, high) if as_small >= probability else (low, middle)
    return low


def position_p_value(correct_ES: Floats, *, draws: int, seed: int) -> float:
    """The probability of slots that differ as much as these, if position had no effect.

    The answers of each example are shifted by a random number of slots, those beyond the last slot to the first ones,
    and the variance of the slots' accuracies is compared. Shifts keep neighbours together, whose answers may be alike;
    a permutation within each example would not, and would raise an alarm too often on models that have no best slot
    (benchmarks/statistics). With two slots both are the same exact test.
    Source: randomisation within matched samples; (1 + as large) / (1 + draws) as in Phipson and Smyth 2010.
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


def questions_needed(difference: float, deviation: float, *, power: float = 0.8) -> int:
    """Questions that a two-sided test at 5 % needs to see a true mean difference with this power.

        n = ((z_.975 + z_power) deviation / difference)^2

    Args:
        difference: that should be seen, > 0. deviation: standard deviation of the examples' differences.
    """
    factor = _Z + NormalDist().inv_cdf(power)
    return max(2, int(np.ceil((factor * deviation / difference) ** 2)))


def resample_counts(examples: int, resamples: int, seed: int) -> Floats:
    """(R, E) how often each example is in each resample of the bootstrap."""
    # The generator depends on the seed alone, so models with the same examples are resampled in the same way.
    generator = derive_generator(seed, "bootstrap")
    return generator.multinomial(examples, np.full(examples, 1 / examples), resamples).astype(np.float64)


def bound_for_none(examples: int) -> float:
    """What is left open by so many examples that are all equal: Wilson's upper 95 % bound for 0 of them."""
    return _wilson(0.0, examples)[1]


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to 0.001: tabulated up to 4 degrees of freedom, then its expansion.

    Source: Abramowitz and Stegun, table 26.10 and 26.7.5.

    Raises:
        ValueError: without a degree of freedom.
    """
    if freedom < 1:
        raise ValueError(f"expected at least one degree of freedom, got {freedom}")
    if freedom <= len(_STUDENT_T):
        return _STUDENT_T[freedom - 1]
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    quantile: float = z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
    return quantile


def _poisson_lower(right: int, examples: int) -> float:
    """A lower end for one to three right answers that are at most a tenth of all; 1 for other numbers."""
    return _POISSON_LOWER[right - 1] / examples if 0 < right <= min(len(_POISSON_LOWER), examples / 10) else 1.0


def _wilson(mean: float, count: float) -> Interval:
    """Wilson's 95 % interval for a proportion among `count` trials."""
    share = _Z**2 / count
    center = (mean + share / 2) / (1 + share)
    margin = np.sqrt(mean * (1 - mean) * share + share**2 / 4) / (1 + share)
    return max(0.0, float(center - margin)), min(1.0, float(center + margin))
