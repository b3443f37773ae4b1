"""RoPE written out, in float64, to compare rotated queries and keys with."""

import torch
from torch import Tensor


def rotate_by_hand(state: Tensor, scale: float, theta: float = 10_000.0) -> Tensor:
    """Each pair (i, i + D/2) of a head is turned by position / scale * theta^(-2i/D), in float64."""
    size = state.shape[-1]
    turned = state.double().clone()
    for position in range(state.shape[-2]):
        for i in range(size // 2):
            angle = torch.tensor(position / scale * theta ** (-2 * i / size), dtype=torch.float64)
            one, other = state[..., position, i].double(), state[..., position, i + size // 2].double()
            turned[..., position, i] = one * angle.cos() - other * angle.sin()
            turned[..., position, i + size // 2] = other * angle.cos() + one * angle.sin()
    return turned


def head_errors(state: Tensor, exact: Tensor) -> Tensor:
    """Of every head (of shape L, D): the norm of the error relative to the norm of the head."""
    return (state.double() - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
