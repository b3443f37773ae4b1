"""Curves of RoPE scales at points that are worked out by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.models.rope.curves import CurveKind, bezier, scales_of, to_genome


def test_cubic_bezier_at_known_points() -> None:
    """Halfway, the weights of four control points are 1, 3, 3, 1 eighths."""
    control = np.array([1.0, 1.0, 2.0, 2.0])
    assert bezier(control, np.array([0.0, 0.5, 1.0])).tolist() == [1.0, 1.5, 2.0]
    assert bezier(np.array([0.0, 4.0, 0.0, 8.0]), np.array([0.5])) == pytest.approx(12 / 8 + 8 / 8)
    # At t = 1/4 the weights are 27, 27, 9, 1 of 64.
    assert bezier(np.array([1.0, 2.0, 4.0, 8.0]), np.array([0.25])) == pytest.approx((27 + 54 + 36 + 8) / 64)


def test_bezier_with_evenly_spaced_points_on_a_line_is_that_line() -> None:
    genome = (1 / 3, 2 / 3, 1.0, 1.2, 1.4, 1.6)
    assert scales_of(genome, 4, "bezier") == pytest.approx((1.0, 1.2, 1.4, 1.6), abs=1e-6)
    assert scales_of(genome, 7, "bezier") == pytest.approx(scales_of(genome, 7, "linear"), abs=1e-6)


def test_bezier_takes_the_layer_as_x_and_not_as_parameter() -> None:
    """With both inner points at x = 0, x(t) = t^3 and y(t) = 1 + t^3 for these heights: y = 1 + x."""
    genome = (0.0, 0.0, 1.0, 1.0, 1.0, 2.0)
    assert scales_of(genome, 5, "bezier") == pytest.approx((1.0, 1.25, 1.5, 1.75, 2.0), abs=1e-5)


def test_linear_and_step_by_hand() -> None:
    genome = (0.5, 1.0, 2.0, 1.5)  # (0, 1), (0.5, 2), (1, 1.5)
    assert scales_of(genome, 5, "linear") == (1.0, 1.5, 2.0, 1.75, 1.5)
    assert scales_of(genome, 5, "step") == (1.0, 1.0, 2.0, 2.0, 1.5)


@pytest.mark.parametrize("kind", ["bezier", "linear", "step"])
def test_flat_curve_and_single_layer(kind: CurveKind) -> None:
    assert scales_of((0.2, 0.9, 1.3, 1.3, 1.3, 1.3), 6, kind) == (1.3,) * 6
    assert scales_of((1.5, 1.9), 1, kind) == (1.5,)


numbers = st.lists(st.floats(-1, 3), min_size=6, max_size=6)


@given(numbers, st.booleans(), st.sampled_from(["bezier", "linear", "step"]))
def test_any_numbers_give_scales_within_their_limits(drawn: list[float], monotone: bool, kind: CurveKind) -> None:
    genome = to_genome(np.array(drawn[:2]), np.array(drawn[2:]), smallest=1.0, largest=2.0, monotone=monotone)
    scales = np.array(scales_of(genome, 9, kind))
    assert scales.min() >= 1.0
    assert scales.max() <= 2.0
    assert to_genome(np.array(genome[:2]), np.array(genome[2:]), smallest=1.0, largest=2.0, monotone=monotone) == genome
    if monotone:
        steps = np.diff(scales)
        assert (steps >= -1e-6).all() or (steps <= 1e-6).all()


def test_monotone_keeps_the_direction() -> None:
    limits: dict[str, Any] = {"smallest": 1.0, "largest": 2.0, "monotone": True}
    assert to_genome(np.array([0.7, 0.3]), np.array([1.8, 1.1, 1.9, 1.2]), **limits)[2:] == (1.9, 1.8, 1.2, 1.1)
    assert to_genome(np.array([0.7, 0.3]), np.array([1.2, 1.9, 1.1, 1.8]), **limits) == (0.3, 0.7, 1.1, 1.2, 1.8, 1.9)
    # Upwards too if the last is as high as the first.
    assert to_genome(np.array([0.3, 0.7]), np.array([1.5, 1.2, 1.8, 1.5]), **limits)[2:] == (1.2, 1.5, 1.5, 1.8)


def test_scales_of_the_most_control_points_are_finite() -> None:
    """The powers and binomials of a Bezier curve grow with its degree; inference.search.control_points has a limit."""
    inner_x = np.linspace(0, 1, 100)[1:-1]
    genome = to_genome(inner_x, np.linspace(1, 2, 100), smallest=1, largest=2, monotone=True)
    np.testing.assert_allclose(scales_of(genome, 32, "bezier"), np.linspace(1, 2, 32), atol=1e-5)
