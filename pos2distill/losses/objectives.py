"""Every objective as one coefficient per row, so that the parts of a global batch add up to the same loss.

Shapes: N rows of the global batch.
"""

import torch
from torch import Tensor

from pos2distill.config import MethodSection
from pos2distill.losses.weights import adaptive_weights, position_weights

# Values of `slot_id_N` that are not slots: rows at the advantageous slots, and rows that only make ranks equally long.
ANCHOR, PADDING = -1, -2


def row_coefficients(method: MethodSection, loss_N: Tensor, reference_N: Tensor, slot_id_N: Tensor) -> Tensor:
    """Coefficients c such that the loss is sum(c * row loss).

        r1, r1-on-policy, kl+align, kl:  L = sum_trivial alpha * KL + lambda * mean_anchor KL
        sft, seqkd:                      L = sum_trivial w * CE + lambda * mean_anchor CE
        r2:                              the same with K * w: the paper's sum over the K prompts of an example

    alpha: `position_weights`; w: 1 / (number of trivial rows), or `adaptive_weights`; lambda: `method.anchor_weight`;
    KL: in the direction of `method.divergence`.

    So c is the row's weight on a trivial row and lambda / (number of anchor rows) on an anchor row; with `weights:
    official` it is lambda, since the authors' code adds up the anchor rows of a batch. The sum is linear in the rows:
    ranks and micro-batches add up their parts.
    Source: arXiv:2508.15709, "Training Objective".

    Args:
        method: weights and lambda.
        loss_N: (N,) nats, of the whole global batch; not used for uniform weights.
        reference_N: (N,) nats, the base model's cross-entropies; used for adaptive weights only.
        slot_id_N: (N,) int, `Row.slot_id`: that of a trivial row; or ANCHOR, or PADDING.
    Returns: (N,) float32, detached; 0 for padding.
    """
    real_N = slot_id_N != PADDING
    loss_M, slot_id_M = loss_N[real_N], slot_id_N[real_N]
    trivial_M, anchor_M = slot_id_M != ANCHOR, (slot_id_M == ANCHOR).float()
    if method.weights == "adaptive":
        weight_M = adaptive_weights(loss_M, reference_N[real_N], trivial_M)
    else:
        weight_M = position_weights(loss_M, slot_id_M, trivial_M, variant=method.weights)
    scale = method.k if method.spec.sum_over_k else 1
    # clamp_min, since a batch without anchor rows would give 0 / 0.
    anchors = 1 if method.weights == "official" else anchor_M.sum().clamp_min(1)
    coefficient_M = scale * weight_M + method.anchor_weight * anchor_M / anchors
    return torch.zeros_like(loss_N).masked_scatter(real_N, coefficient_M)
