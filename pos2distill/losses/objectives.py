"""The R1 objective as one coefficient a row, so that any cut of the global batch sums to the same loss.

Shapes: N rows of the global batch.
"""

from typing import Literal

from torch import Tensor

from pos2distill.losses.weights import position_weights


def r1_coefficients(
    kl_N: Tensor,
    slot_N: Tensor,
    *,
    anchor: int,
    anchor_weight: float = 1.0,
    variant: Literal["paper", "official", "uniform"] = "paper",
) -> Tensor:
    """Coefficients c such that the loss is sum(c * KL).

        L = sum_trivial alpha * KL + lambda * mean_anchor KL

    So c is alpha on a trivial row and lambda / (number of anchor rows) on an anchor row. The sum is linear in the
    rows: ranks and micro-batches add up their parts.
    Source: arXiv:2508.15709, "Training Objective".

    Args:
        kl_N: (N,) nats, of the whole global batch. slot_N: (N,) int. anchor: the advantageous slot.
        anchor_weight: lambda.
    Returns: (N,) float32, detached.
    """
    anchor_N = (slot_N == anchor).float()
    alpha_N = position_weights(kl_N, slot_N, anchor=anchor, variant=variant)
    return alpha_N + anchor_weight * anchor_N / anchor_N.sum().clamp_min(1)
