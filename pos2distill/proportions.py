"""Intervals for proportions."""

import math


def wilson_interval(fraction: float, count: float, standard_errors: float) -> tuple[float, float]:
    """Wilson's interval for a proportion (Wilson 1927), within [0, 1].

        center = (p + z^2 / 2n) / (1 + z^2 / n),  margin = sqrt(p (1 - p) z^2 / n + z^4 / 4n^2) / (1 + z^2 / n)

    Args:
        fraction: p, the observed fraction.
        count: n, the number of trials; that of an effective sample size may be no whole number.
        standard_errors: z, 1.96 for an interval of 95 %.
    """
    correction = standard_errors**2 / count
    center = (fraction + correction / 2) / (1 + correction)
    margin = math.sqrt(fraction * (1 - fraction) * correction + correction**2 / 4) / (1 + correction)
    return max(0.0, center - margin), min(1.0, center + margin)
