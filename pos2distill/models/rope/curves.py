"""RoPE scales of all layers from a curve over the layers, which is what LPES searches (arXiv:2606.27705).

A curve has n control points (x, y): x from the first layer (0) to the last (1), y a scale. Its genome is a flat tuple,
first the x of the n - 2 inner points (the outer ones are fixed at 0 and 1), then the y of all n.
"""

import functools
import math
from typing import Literal

import numpy as np

from pos2distill.records import Floats

Genome = tuple[float, ...]
CurveKind = Literal["bezier", "linear", "step"]

CONFIG_KEY = "pos2distill_rope_scales"
"""Where config.json of an exported model holds its scales, a list with one number for each layer."""

_BISECTIONS = 50  # halvings of [0, 1]: to the last bits of a float64
_DECIMALS = 6  # to which genomes and scales are rounded, so that JSON preserves them


def to_genome(inner_x: Floats, y: Floats, *, smallest: float, largest: float, monotone: bool) -> Genome:
    """A valid genome from any numbers: x sorted and within [0, 1], y within its limits.

    Args:
        monotone: sort y too, upwards if the last of them is not below the first, else downwards.
    """
    inner_x = np.sort(np.clip(inner_x, 0.0, 1.0))
    y = np.clip(y, smallest, largest)
    if monotone:
        falls = y[-1] < y[0]
        y = np.sort(y)[::-1] if falls else np.sort(y)
    return tuple(np.round(np.concatenate([inner_x, y]), _DECIMALS).tolist())


@functools.lru_cache(maxsize=10_000)  # a search asks for those of all candidates in each generation
def scales_of(genome: Genome, layers: int, kind: CurveKind) -> tuple[float, ...]:
    """The scale of each layer: the curve's y at x = layer / (layers - 1).

    Args:
        kind: bezier: the Bezier curve of the control points, cubic for four; linear: straight lines between them;
            step: the y of the last control point at or before the layer.
    """
    points = len(genome) // 2 + 1  # 2 n - 2 numbers
    control_x = np.concatenate([[0.0], genome[: points - 2], [1.0]])
    control_y = np.asarray(genome[points - 2 :])
    x_L = np.arange(layers) / max(1, layers - 1)
    if kind == "linear":
        scale_L = np.interp(x_L, control_x, control_y)
    elif kind == "step":
        scale_L = control_y[np.searchsorted(control_x, x_L, side="right") - 1]
    else:
        scale_L = bezier(control_y, _parameter_at(control_x, x_L))
    return tuple(np.round(scale_L, _DECIMALS).tolist())


def bezier(control: Floats, t: Floats) -> Floats:
    """One coordinate of a Bezier curve: sum over i of binomial(n-1, i) t^i (1-t)^(n-1-i) control_i."""
    degree = len(control) - 1
    value = np.zeros_like(t)
    for i, each in enumerate(control):
        value = value + math.comb(degree, i) * t**i * (1 - t) ** (degree - i) * each
    return value


def _parameter_at(control_x: Floats, x: Floats) -> Floats:
    """The t at which the curve has these x. Sorted control points make x(t) monotone, so bisection finds it."""
    low, high = np.zeros_like(x), np.ones_like(x)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_low = bezier(control_x, middle) < x
        low = np.where(is_low, middle, low)
        high = np.where(is_low, high, middle)
    return (low + high) / 2
