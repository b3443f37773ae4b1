"""The true forward KL divergence, token by token and row by row.

Shapes: T response tokens of N rows laid end to end, V vocabulary.
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
        raise ValueError(f"want equal shapes, got teacher {tuple(teacher_TV.shape)}, student {tuple(student_TV.shape)}")
    teacher_TV = teacher_TV.detach().float().log_softmax(-1)
    student_TV = student_TV.float().log_softmax(-1)
    return F.kl_div(student_TV, teacher_TV, reduction="none", log_target=True).sum(-1).clamp_min(0)


def mean_by_row(value_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """Mean over each row's tokens.

    Args:
        value_T: (T,). row_T: (T,) int, the row of each token; every row 0..rows-1 has at least one.
    Returns: (N,) with N = rows.
    """
    total_N = value_T.new_zeros(rows).index_add(0, row_T, value_T)
    return total_N / torch.bincount(row_T, minlength=rows)
