"""The KL divergence at each token, forward and reverse, a lower bound of it from the top K tokens, and means over rows.

Shapes: T response tokens of N rows, concatenated; V vocabulary, K of its tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def forward_kl(teacher_TV: Tensor, student_TV: Tensor) -> Tensor:
    """KL(teacher || student) in nats at each token, over the full vocabulary, in fp32.

        KL_t = sum_v p_t(v) (log p_t(v) - log q_t(v))

    Zero for equal logits, unlike the cross-entropy that some libraries call forward KL; the position weights need the
    true value. Rounding can make it -1e-7 there, so it is clamped at zero.
    Source: arXiv:2508.15709, "Activation of Trivial Positions".

    Args:
        teacher_TV, student_TV: (T, V) logits; gradients flow to the student only.
    Returns: (T,) float32, >= 0.
    """
    if teacher_TV.shape != student_TV.shape:
        raise ValueError(
            f"expected equal shapes, got teacher {tuple(teacher_TV.shape)}, student {tuple(student_TV.shape)}"
        )
    teacher_TV = teacher_TV.detach().float().log_softmax(-1)
    student_TV = student_TV.float().log_softmax(-1)
    return F.kl_div(student_TV, teacher_TV, reduction="none", log_target=True).sum(-1).clamp_min(0)


def reverse_kl(student_TV: Tensor, teacher_TV: Tensor) -> Tensor:
    """KL(student || teacher) in nats at each token, over the full vocabulary, in fp32.

        KL_t = sum_v q_t(v) (log q_t(v) - log p_t(v))

    Args:
        student_TV, teacher_TV: (T, V) logits; gradients flow to the student only.
    Returns: (T,) float32, >= 0.
    """
    student_TV = student_TV.float().log_softmax(-1)
    teacher_TV = teacher_TV.detach().float().log_softmax(-1)
    return F.kl_div(teacher_TV, student_TV, reduction="none", log_target=True).sum(-1).clamp_min(0)


def topk_kl(top_ids_TK: Tensor, top_logprobs_TK: Tensor, student_TV: Tensor) -> Tensor:
    """KL(teacher || student) in nats at each token, if all but the teacher's K most likely tokens count as one.

        KL_t = sum_k p_t(k) (log p_t(k) - log q_t(k)) + p_t(rest) (log p_t(rest) - log q_t(rest))

    Merging tokens loses information, so this is a lower bound of `forward_kl` (data-processing inequality; Cover and
    Thomas, Elements of Information Theory, 2.8), and equal to it at K = V. It is the KL of two normalized
    distributions, so it is zero if the student agrees on every one of the K tokens and on the rest.

    Args:
        top_ids_TK: (T, K) int, no token twice.
        top_logprobs_TK: (T, K), their log-probabilities.
        student_TV: (T, V) logits; gradients flow to them.
    Returns: (T,) float32, >= 0.
    """
    # Stored as int32 to save space; `gather` requires int64.
    top_ids_TK, teacher_TK = top_ids_TK.long(), top_logprobs_TK.detach().float().exp()
    student_TV = student_TV.float().log_softmax(-1)
    # Probabilities as the target, not logarithms: torch 2.13 then takes 0 log 0 as 0 instead of NaN.
    kl_T = F.kl_div(student_TV.gather(-1, top_ids_TK), teacher_TK, reduction="none").sum(-1)
    if top_ids_TK.shape[-1] < student_TV.shape[-1]:
        rest_T = (1 - teacher_TK.sum(-1)).clamp_min(0)
        # A sum over the rest and not 1 - sum over K, which rounds to 0 if the student is sure of the K tokens.
        student_rest_T = student_TV.scatter(-1, top_ids_TK, -torch.inf).logsumexp(-1)
        kl_T = kl_T + F.kl_div(student_rest_T, rest_T, reduction="none")
    return kl_T.clamp_min(0)


def mean_by_row(value_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """Mean over each row's tokens.

    Args:
        value_T: (T,).
        row_T: (T,) int, the row of each token; every row 0..rows-1 has at least one.
    Returns: (N,) with N = rows.
    """
    total_N = value_T.new_zeros(rows).index_add(0, row_T, value_T)
    # Not `bincount`, which would make the CPU wait for the GPU (torch 2.13).
    return total_N / value_T.new_zeros(rows).index_add(0, row_T, torch.ones_like(value_T))
