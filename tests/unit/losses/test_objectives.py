import math

import pytest
import torch
from torch import Tensor

from pos2distill.config import MethodSection
from pos2distill.losses.objectives import ANCHOR, PADDING, row_coefficients

LOSS = torch.tensor([0.2, 0.1, 0.4, 0.05, 0.15])
SLOT = torch.tensor([3, 3, 7, ANCHOR, ANCHOR])
NONE = torch.zeros(5)


def coefficients(loss_N: Tensor, slot_id_N: Tensor, reference_N: Tensor | None = None, **settings: object) -> Tensor:
    reference_N = torch.zeros_like(loss_N) if reference_N is None else reference_N
    return row_coefficients(MethodSection(**settings), loss_N, reference_N, slot_id_N)  # type: ignore[arg-type]


def test_row_coefficients_of_r1_by_hand() -> None:
    # alpha as in test_weights; the anchors' mean is .10.
    fraction = math.exp(0.15) / (math.exp(0.15) + math.exp(0.40))
    expected = fraction * 0.2 + fraction / 2 * 0.1 + (1 - fraction) * 0.4 + 0.5 * 0.10
    loss = (coefficients(LOSS, SLOT, anchor_weight=0.5) * LOSS).sum()
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_row_coefficients_of_official_weights_add_up_the_anchors() -> None:
    """As the authors' code: every anchor row has the weight lambda, not a share of it."""
    assert coefficients(LOSS, SLOT, weights="official", anchor_weight=0.5).tolist()[3:] == [0.5, 0.5]


def test_row_coefficients_of_ablations_leave_out_parts_of_r1() -> None:
    r1, align, kl = (coefficients(LOSS, SLOT, name=name) for name in ("r1", "kl+align", "kl"))
    assert align.tolist() == pytest.approx([*r1[:3].tolist(), 0, 0])
    assert (kl * LOSS).sum().item() == pytest.approx((0.2 + 0.1 + 0.4) / 3, abs=1e-6)


def test_row_coefficients_follow_explicit_settings() -> None:
    assert torch.equal(coefficients(LOSS, SLOT, name="kl", weights="paper", anchor_weight=1), coefficients(LOSS, SLOT))


@pytest.mark.parametrize("name", ["sft", "seqkd"])
def test_row_coefficients_of_cross_entropy_baselines_are_the_plain_mean(name: str) -> None:
    assert coefficients(LOSS, SLOT, name=name).tolist() == pytest.approx([1 / 3] * 3 + [0, 0])


def test_row_coefficients_of_r2_sum_over_an_examples_prompts() -> None:
    """Two examples of K = 2: the mean over examples of the sum over prompts."""
    slot = torch.tensor([ANCHOR, 3, 5, ANCHOR, 2, 9])
    loss = torch.tensor([9.0, 0.1, 0.2, 9.0, 0.3, 0.8])
    total = (coefficients(loss, slot, name="r2", k=2) * loss).sum()
    assert total.item() == pytest.approx(((0.1 + 0.2) + (0.3 + 0.8)) / 2)


def test_row_coefficients_of_adaptive_r2_by_hand() -> None:
    # Excess over the reference: .3, 0 (easier than the reference), .6; their mean .3; so shares 1, 0, 2.
    loss, reference = torch.tensor([0.5, 0.1, 0.7]), torch.tensor([0.2, 0.4, 0.1])
    weights = coefficients(loss, torch.tensor([1, 2, 3]), reference, name="r2", k=1, weights="adaptive")
    assert weights.tolist() == pytest.approx([(0.5 + 0.5) / 3, 0.5 / 3, (0.5 + 1.0) / 3])


def test_row_coefficients_of_adaptive_r2_leave_anchors_out_of_the_mean() -> None:
    """As above with an anchor row of 8 nats of excess, whose coefficient is lambda."""
    loss, reference = torch.tensor([0.5, 0.1, 0.7, 9.0]), torch.tensor([0.2, 0.4, 0.1, 1.0])
    slot = torch.tensor([1, 2, 3, ANCHOR])
    weights = coefficients(loss, slot, reference, name="r2", k=1, weights="adaptive", anchor_weight=0.5)
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 2, 0.5])


def test_row_coefficients_of_r2_multiply_only_trivial_rows_by_k() -> None:
    weights = coefficients(torch.zeros(3), torch.tensor([ANCHOR, 3, 5]), name="r2", k=2, anchor_weight=0.5)
    assert weights.tolist() == pytest.approx([0.5, 1.0, 1.0])


@pytest.mark.parametrize("excess", [0.0, 1e-6])
def test_adaptive_weights_of_a_solved_batch_are_uniform(excess: float) -> None:
    """Also where rounding leaves one row above its reference."""
    loss = torch.tensor([0.1, 0.2]) + torch.tensor([excess, 0.0])
    reference = torch.tensor([0.1, 0.3])
    weights = coefficients(loss, torch.tensor([4, 6]), reference, name="r2", weights="adaptive")
    assert weights.tolist() == pytest.approx([2.0, 2.0], abs=1e-3)  # K / M with K = 4


@pytest.mark.parametrize("name", ["r1", "r2"])
def test_row_coefficients_reject_a_loss_that_is_not_finite(name: str) -> None:
    weights = "adaptive" if name == "r2" else "paper"
    with pytest.raises(ValueError, match=r"must be finite.*rows \[1\]"):
        coefficients(torch.tensor([0.1, math.nan]), torch.tensor([4, 6]), name=name, weights=weights)


def test_row_coefficients_of_padding_are_zero() -> None:
    filled = torch.cat([SLOT, torch.tensor([PADDING, PADDING])])
    loss = torch.cat([LOSS, torch.tensor([7.0, 7.0])])
    for name in ("r1", "sft"):
        assert coefficients(loss, filled, name=name).tolist() == [*coefficients(LOSS, SLOT, name=name).tolist(), 0, 0]


def test_row_coefficients_of_trivial_rows_only() -> None:
    assert coefficients(torch.zeros(2), torch.tensor([4, 9])).tolist() == [0.5, 0.5]


def test_row_coefficients_of_anchor_rows_only() -> None:
    anchors = coefficients(torch.tensor([0.3, 0.1, 0.0]), torch.tensor([ANCHOR] * 3), anchor_weight=0.6)
    assert anchors.tolist() == pytest.approx([0.2, 0.2, 0.2])


def test_row_coefficients_of_no_rows() -> None:
    assert coefficients(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []
