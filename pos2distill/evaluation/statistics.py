"""Intervals for means, differences and ratios. All resample or count whole examples, whose answers are not independent.

benchmarks/statistics measures how often each interval covers the truth.

Shapes: E examples, S slots, R resamples.
"""

from statistics import NormalDist

import numpy as np

from pos2distill.proportions import wilson_interval
from pos2distill.randomness import derive_generator
from pos2distill.records import Floats

Interval = tuple[float, float]

Z = NormalDist().inv_cdf(0.975)
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776)

# Lower ends n p of n answers of which 0 to 4 are right. Up to 3 they are those of Poisson's distribution,
# P(X >= x) = .05; Wilson's are too high there, and are met at 4.
_FEW_RIGHT = (0.0, 0.0513, 0.3554, 0.8177, 1.5553)

_POWER_80 = NormalDist().inv_cdf(0.8)
_FEW = 10  # examples; too few to estimate how much examples differ


def accuracy_interval(value_E: Floats, answers: float = 1) -> Interval:
    """A 95 % interval for the mean of values between 0 and 1: Wilson's, with the effective number of examples.

        n = m (1 - m) / (variance of the mean) * (z / t)^2,   center = (m + z^2 / 2n) / (1 + z^2 / n)

    For values of 0 and 1, n is their number, and this is Wilson's interval for a proportion. For examples that are
    scored at several slots, n is the number of independent answers with the same information; t is Student's, since the
    variance is estimated. Where all examples are equal, n is their number, so that 100 of 100 give [.963, 1].
    With one to three right or wrong answers (n m, n (1 - m)), Wilson's end is too far from 0 or 1, and Poisson's is
    used instead.
    Source: Wilson 1927; Poisson's end from Brown, Cai and DasGupta 2001, section 4.1.1, here also for two and three of
    few answers; effective number as in surveys (Korn and Graubard 1998).

    Args:
        value_E: mean of each example's answers.
        answers: the most independent answers that one example can count as, which is its number of answers if they have
            equal weights; n is at most E * answers.
    """
    # Weighted sums of answers that are all right differ from 1, and from one another, by rounding.
    value_E = np.clip(value_E.round(12), 0.0, 1.0)
    examples = len(value_E)
    mean = float(value_E.mean())
    effective = float(examples)
    is_proportion = bool(np.isin(value_E, (0.0, 1.0)).all())
    if not is_proportion and np.ptp(value_E) > 0:
        variance = float(value_E.var(ddof=1)) / examples
        effective = mean * (1 - mean) / variance / student_factor(examples) ** 2
    count = min(effective, float(examples * answers))
    low, high = wilson_interval(mean, count, Z)
    return min(low, _few_right(mean, count)), max(high, 1 - _few_right(1 - mean, count))


def difference_interval(difference_E: Floats) -> Interval:
    """A 95 % interval for the mean of paired differences between -1 and 1: mean +- t * standard error.

        se^2 = (sum (d_e - d)^2 + k^2) / (E (E - 1)),   k = mean of d_e^2 / mean of |d_e|

    k^2, the square of one more difference of the usual size, matters if few examples differ, since these alone
    underestimate the variance. If all differences are equal, the interval is as wide as Wilson's bound for 0 of E
    examples. With any variation that bound would be too wide, since means over many slots vary little.
    Source: Student's; an added difference as in Bonett and Price 2012, who add one in each direction.
    """
    examples = len(difference_E)
    if examples == 1:
        return -1.0, 1.0
    mean = float(difference_E.mean())
    if np.ptp(difference_E) == 0:
        margin = bound_for_none(examples)
    else:
        size = float((difference_E**2).mean() / np.abs(difference_E).mean())
        squares = float(((difference_E - mean) ** 2).sum()) + size**2
        margin = student_t(examples - 1) * (squares / (examples * (examples - 1))) ** 0.5
    return max(-1.0, mean - margin), min(1.0, mean + margin)


def ratio_interval(part_E: Floats, total_E: Floats, *, bootstrap_samples: int, seed: int) -> Interval:
    """A 95 % interval for a ratio of means of values >= 0, such as nats: the bootstrap-t of its logarithm.

        t* = (log r* - log r) / se*,   [r exp(-t*_.975 se), r exp(-t*_.025 se)],   r = sum part / sum total

    se: standard error of log r, linearised. Values that few examples dominate make the percentiles of r* too narrow;
    the logarithm and the division by se* allow for their skewness. The interval stays within the ratios of the single
    examples, so with fewer than about ten it is too narrow, and of one example it is a point.
    Source: Efron and Tibshirani 1993, chapter 12 (bootstrap-t, transformations).

    Args:
        part_E, total_E: part and total of each example; the sum of the totals is above 0, and a part is 0 where its
            total is. With totals of 1, the ratio is the mean of the parts.
    """
    ratio = float(part_E.sum() / total_E.sum())
    error = float(_log_ratio_errors(part_E, total_E, np.ones((1, len(part_E))))[0])
    if ratio == 0 or error == 0:
        return ratio, ratio
    count_RE = resample_counts(len(part_E), bootstrap_samples, seed)
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
    # If all examples are equal, the ratio may differ from theirs by rounding.
    return min(ratio, max(float(low), float(single_E.min()))), max(ratio, min(float(high), float(single_E.max())))


def fraction_interval(
    part_E: Floats, total_E: Floats, *, answers: float, bootstrap_samples: int, seed: int
) -> Interval:
    """A 95 % interval for a ratio of sums that is at most 1, such as the fraction of tokens that a model recovers.

    It is `ratio_interval` of the smaller one of the fraction and its complement. That interval is skewed, as it must be
    near 0 and 1, where a symmetric one is too narrow (benchmarks/statistics). At most as wide as Wilson's for examples
    that are right or wrong as a whole, which vary most, and equal to it for fewer than ten examples. If all examples
    have the same fraction, or one answer each, it is `accuracy_interval`.

    Args:
        part_E, total_E: part and total of each example; 0 <= part <= total, total > 0.
        answers: as in `accuracy_interval`.
    """
    fraction_E = part_E / total_E
    if answers == 1 or np.ptp(fraction_E.round(12)) == 0:
        return accuracy_interval(fraction_E, answers)
    # Examples of different sizes count as fewer examples of one size.
    fraction, effective = float(part_E.sum() / total_E.sum()), float(total_E.sum() ** 2 / (total_E**2).sum())
    lowest, highest = wilson_interval(fraction, effective, Z)
    if len(part_E) < _FEW:
        return lowest, highest
    left_E = np.where(total_E - part_E > 1e-9, total_E - part_E, 0.0)
    is_small = part_E.sum() <= left_E.sum()
    low, high = ratio_interval(part_E if is_small else left_E, total_E, bootstrap_samples=bootstrap_samples, seed=seed)
    if not is_small:
        low, high = 1 - high, 1 - low
    return max(low, lowest), min(high, highest)


def _log_ratio_errors(part_E: Floats, total_E: Floats, count_RE: Floats) -> Floats:
    """(R,) standard errors of log(sum part / sum total) with these counts of the examples; 0 for a ratio of 0.

    Without Bessel's correction, which cancels in a studentised bootstrap.
    """
    part_R, total_R = count_RE @ part_E, count_RE @ total_E
    ratio_R = part_R / total_R
    residual_RE = part_E - ratio_R[:, None] * total_E
    error_R = np.sqrt((count_RE * residual_RE**2).sum(1))
    errors_R: Floats = np.divide(error_R, part_R, out=np.zeros(len(part_R)), where=part_R > 0)
    return errors_R


def student_factor(examples: int) -> float:
    """Student's quantile divided by the normal one, for a standard error estimated from so many examples."""
    return student_t(examples - 1) / Z if examples > 1 else 1.0


def questions_needed(difference: float, deviation: float) -> int:
    """How many questions a two-sided test at 5 % needs to detect a true mean difference with a power of 80 %.

        n = ((z_.975 + z_.8) deviation / difference)^2

    Args:
        difference: the difference to detect, > 0.
        deviation: standard deviation of the examples' differences.
    """
    factor = Z + _POWER_80
    return max(2, int(np.ceil((factor * deviation / difference) ** 2)))


def resample_counts(examples: int, bootstrap_samples: int, seed: int) -> Floats:
    """(R, E) how often each example is in each resample of the bootstrap."""
    # The generator depends on the seed alone, so models with the same examples are resampled in the same way.
    generator = derive_generator(seed, "bootstrap")
    return generator.multinomial(examples, np.full(examples, 1 / examples), bootstrap_samples).astype(np.float64)


def bound_for_none(examples: int) -> float:
    """The uncertainty if so many examples are all equal: Wilson's upper 95 % bound for 0 of them."""
    return wilson_interval(0.0, examples, Z)[1]


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
    z = Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    quantile: float = z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
    return quantile


def _few_right(mean: float, count: float) -> float:
    """A lower end if few of `count` answers are right, and at most half of them; else 1."""
    right = round(mean * count, 9)
    is_few = right < len(_FEW_RIGHT) - 1 and mean <= 0.5
    return float(np.interp(right, range(len(_FEW_RIGHT)), _FEW_RIGHT)) / count if is_few else 1.0
