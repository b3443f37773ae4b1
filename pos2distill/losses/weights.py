"""Weights of trivial rows: the paper's position-aware weights, those of its code, and ours for cross-entropies.

Shapes: N rows of the global batch, M trivial rows, P trivial slots present.
"""

from typing import Literal

import torch
from torch import Tensor

# Nats. Smaller differences between rows are rounding and not difficulty.
_SMALLEST_EXCESS = 0.01


def position_weights(
    kl_N: Tensor, slot_id_N: Tensor, trivial_N: Tensor, *, variant: Literal["paper", "official", "uniform"]
) -> Tensor:
    """Weight each activation KL by how hard its gold slot is.

        paper:    alpha_ij = softmax_i(mean_j KL_ij) * KL_ij / max_k KL_ik
        official: alpha_ij * P / (rows at slot i), as the authors' code does
        uniform:  1 / M, the "+KL" ablation

    i: trivial slots present; j: rows at slot i. N is the *global* batch, gathered over ranks and micro-batches:
    on a micro-batch of one, every alpha is 1 and the method has no effect. If every KL of a slot is 0, the ratio is 1.
    Source: arXiv:2508.15709, "Position-Aware Alignment".

    Args:
        kl_N: (N,) nats, the method's KL (the paper's: teacher || student), averaged over response tokens; finite, >= 0.
        slot_id_N: (N,) int, `Row.slot_id`: equal for rows with the gold documents at the same slots; for one gold
            document its 0-based slot. Values of anchor rows are not used.
        trivial_N: (N,) bool; anchor rows get 0, since lambda weighs them instead.
        variant: which of the three above.
    Returns: (N,) float32, detached.
    Raises: ValueError naming the shapes, or the rows, at fault.
    """
    if kl_N.ndim != 1 or not kl_N.shape == slot_id_N.shape == trivial_N.shape:
        shapes = ", ".join(str(tuple(each.shape)) for each in (kl_N, slot_id_N, trivial_N))
        raise ValueError(f"expected three tensors of shape (N,), got {shapes}")
    kl_N = kl_N.detach().float()
    bad = (~torch.isfinite(kl_N) | (kl_N < 0)).nonzero().flatten().tolist()[:5]
    if bad:
        raise ValueError(f"KL must be finite and >= 0: rows {bad} are {kl_N[bad].tolist()}")
    if variant == "uniform":
        return trivial_N.float() / trivial_N.sum().clamp_min(1)
    # Slots that have no row in this batch take no part in the softmax.
    slots, bin_M = slot_id_N[trivial_N].unique(return_inverse=True)
    kl_M, zeros_P = kl_N[trivial_N], kl_N.new_zeros(len(slots))
    mean_P = zeros_P.scatter_reduce(0, bin_M, kl_M, "mean", include_self=False)
    peak_M = zeros_P.scatter_reduce(0, bin_M, kl_M, "amax")[bin_M]
    ratio_M = torch.where(peak_M > 0, kl_M / peak_M, 1.0)  # 0/0: this slot is solved
    alpha_M = mean_P.softmax(0)[bin_M] * ratio_M
    if variant == "official":
        alpha_M = alpha_M * len(slots) / bin_M.bincount(minlength=len(slots))[bin_M]
    return torch.zeros_like(kl_N).masked_scatter(trivial_N, alpha_M)


def adaptive_weights(ce_N: Tensor, reference_N: Tensor, trivial_N: Tensor) -> Tensor:
    """Weight each trivial cross-entropy by how much harder its slots are than the advantageous ones.

        excess_i = max(0, CE_i - CE_i^adv),   e = mean_trivial(excess),   s = max(e, 0.01 nats)
        w_i      = (1 - e / 2s + excess_i / 2s) / M

    CE_i^adv is the base model's loss on the same response at the advantageous slots, so that a response that is hard
    at any slot does not make its slot look hard. The weights sum to 1. At least half of each is the same for every row,
    so that no row is neglected. As the excess vanishes they become equal instead of following rounding errors. N is the
    global batch and the mean is over all of it, so that, as with the paper's alpha, no cut changes the weights.
    Ours; the paper leaves weights for R2 as future work (arXiv:2508.15709, "Limitations").

    Args:
        ce_N, reference_N: (N,) nats, mean over response tokens; finite.
        trivial_N: (N,) bool.
    Returns: (N,) float32, detached; 0 where not trivial.
    Raises: ValueError naming the rows at fault.
    """
    trivial_N = trivial_N.float()
    excess_N = (ce_N - reference_N).detach().float()
    bad = (~torch.isfinite(excess_N)).nonzero().flatten().tolist()[:5]
    if bad:
        raise ValueError(f"cross-entropies must be finite: rows {bad} are {ce_N[bad].tolist()}")
    excess_N = excess_N.clamp_min(0) * trivial_N
    count = trivial_N.sum().clamp_min(1)
    mean = excess_N.sum() / count
    scale = mean.clamp_min(_SMALLEST_EXCESS)
    return trivial_N * (1 + (excess_N - mean) / (2 * scale)) / count
