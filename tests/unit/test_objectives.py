import math

import pytest
import torch

from pos2distill.losses.objectives import r1_coefficients

KL = torch.tensor([0.2, 0.1, 0.4, 0.05, 0.15])
SLOT = torch.tensor([3, 3, 7, 0, 0])


def test_the_loss_by_hand() -> None:
    # alpha as in test_weights; the anchors' mean is .10.
    share = math.exp(0.15) / (math.exp(0.15) + math.exp(0.40))
    expected = share * 0.2 + share / 2 * 0.1 + (1 - share) * 0.4 + 0.5 * 0.10
    loss = (r1_coefficients(KL, SLOT, anchor=0, anchor_weight=0.5) * KL).sum()
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_kl_baseline_is_the_plain_mean() -> None:
    """`weights: uniform` and lambda 0 are the "+KL" ablation."""
    loss = (r1_coefficients(KL, SLOT, anchor=0, anchor_weight=0.0, variant="uniform") * KL).sum()
    assert loss.item() == pytest.approx((0.2 + 0.1 + 0.4) / 3, abs=1e-6)


def test_a_batch_of_trivial_rows_only() -> None:
    assert r1_coefficients(torch.zeros(2), torch.tensor([4, 9]), anchor=0).tolist() == [0.5, 0.5]


def test_a_batch_of_anchor_rows_only() -> None:
    coefficients = r1_coefficients(torch.tensor([0.3, 0.1, 0.0]), torch.tensor([2, 2, 2]), anchor=2, anchor_weight=0.6)
    assert coefficients.tolist() == pytest.approx([0.2, 0.2, 0.2])


def test_an_empty_part_of_a_batch() -> None:
    assert r1_coefficients(torch.zeros(0), torch.zeros(0, dtype=torch.long), anchor=0).tolist() == []
