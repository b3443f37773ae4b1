"""The output head's raw logits in float32, and a loss at each token without the logits of all tokens.

Raw logits are the head's product, to which a model may still apply a scale or a soft cap (`head.LogitTransform`).

A product of bfloat16 states and weights is rounded to bfloat16 by default: 8 bits, an error of up to 0.06 in a logit of
20. A KL of 1e-3 nats cannot be computed from such logits. Products of two bfloat16 numbers are exact in float32, so
here they are summed in float32 and never rounded.

Shapes: T tokens, t of them at once, H hidden size, V vocabulary, v rows of the head at once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TokenLosses = Callable[[Tensor, slice], Tensor]
"""The losses (t,) of some tokens, float32, from the head's raw logits (t, V) of them and their indices among the T."""

CHUNK_LOGITS = 2**24
"""Logits that exist at once: 64 MiB in float32. A divergence and its gradient need several times that."""

_BLOCK_WEIGHTS = 2**20
"""Weights of the head that a CPU converts to float32 at once: 4 MiB, which stay in its cache."""


def float32_logits(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """hidden @ weight.T + bias, (T, V) float32, of equal dtypes; without a gradient.

    With 16 bits, a GPU sums and returns float32 (torch 2.13: `out_dtype`, on CUDA only); a CPU multiplies blocks of the
    head that it converts, so that the whole head never exists in float32.
    """
    with torch.no_grad(), torch.autocast(hidden_TH.device.type, enabled=False):
        if hidden_TH.dtype == torch.float32:
            raw_logits_TV = hidden_TH @ weight_VH.T
        elif hidden_TH.is_cuda:
            raw_logits_TV = torch.mm(hidden_TH, weight_VH.T, out_dtype=torch.float32)
        else:
            raw_logits_TV = hidden_TH.new_empty(len(hidden_TH), len(weight_VH), dtype=torch.float32)
            hidden_TH = hidden_TH.float()
            for block in _blocks(weight_VH):
                torch.mm(hidden_TH, weight_VH[block].float().T, out=raw_logits_TV[:, block])
        return raw_logits_TV if bias_V is None else raw_logits_TV + bias_V.float()


def compute_dtype(hidden_TH: Tensor) -> torch.dtype:
    """The dtype in which a linear layer would take these states."""
    device = hidden_TH.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TH.dtype


class LossHead(nn.Module):
    """The output head of a model with a loss at each token; it shares the head's parameters.

    A module of its own, and not a function of the parameters, because ZeRO-3 gathers a module's parameters while the
    module is called, and again before its backward pass.
    """

    def __init__(self, lm_head: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = lm_head.weight
        self.bias: nn.Parameter | None = getattr(lm_head, "bias", None)

    def forward(self, hidden_TH: Tensor, *, token_losses: TokenLosses) -> Tensor:
        """The loss of each token, (T,) float32; gradients flow to the states and to the head.

        For each chunk of tokens, the raw logits are computed and passed to `token_losses`. They are not stored, but
        computed again in the backward pass. Under autocast, states and weights are rounded to its dtype first, as a
        linear layer's are.

        Args:
            hidden_TH: the states that enter the head.
            token_losses: called for each chunk, in both passes. Passed by name, since DeepSpeed warns of positional
                arguments that are not tensors.
        """
        losses_T: Tensor = _ChunkedLosses.apply(hidden_TH, self.weight, self.bias, token_losses)
        return losses_T

    def raw_logits(self, hidden_TH: Tensor) -> Tensor:
        """The raw logits (T, V), float32, without a gradient. Only inside `token_losses`, as ZeRO-3 requires.

        Args:
            hidden_TH: states in `compute_dtype`; the weights are rounded to it.
        """
        return float32_logits(hidden_TH, self.weight.to(hidden_TH.dtype), self.bias)


class _ChunkedLosses(torch.autograd.Function):
    """The losses of `LossHead`. Gradients of both parameters are summed over all tokens in float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, token_losses: TokenLosses
    ) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V)
        ctx.token_losses, ctx.dtype = token_losses, compute_dtype(hidden_TH)
        hidden_TH, weight_VH = hidden_TH.to(ctx.dtype), weight_VH.to(ctx.dtype)
        losses = []
        for chunk in _chunks(hidden_TH, weight_VH):
            losses.append(token_losses(float32_logits(hidden_TH[chunk], weight_VH, bias_V), chunk))
        return torch.cat(losses)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_losses_T: Tensor) -> tuple[Tensor | None, ...]:
        stored_TH, stored_VH, bias_V = ctx.saved_tensors
        needs_grad_hidden, needs_grad_weight, needs_grad_bias, _ = ctx.needs_input_grad
        hidden_TH, weight_VH = stored_TH.to(ctx.dtype), stored_VH.to(ctx.dtype)
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=torch.float32) if needs_grad_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_grad_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_grad_bias and bias_V is not None else None
        for chunk in _chunks(hidden_TH, weight_VH):
            raw_logits_tV = float32_logits(hidden_TH[chunk], weight_VH, bias_V).requires_grad_()
            with torch.enable_grad():
                losses_t = ctx.token_losses(raw_logits_tV, chunk)
            (grad_logits_tV,) = torch.autograd.grad(losses_t, raw_logits_tV, grad_losses_T[chunk])
            if grad_hidden_TH is not None:
                _add_product(grad_hidden_TH[chunk], grad_logits_tV, weight_VH)
            if grad_weight_VH is not None:
                _add_transposed_product(grad_weight_VH, grad_logits_tV, hidden_TH[chunk])
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_tV.sum(0)
        return grad_hidden_TH, grad_weight_VH, grad_bias_V, None


def _add_product(total_tH: Tensor, grad_logits_tV: Tensor, weight_VH: Tensor) -> None:
    """total += grad_logits @ weight, in place, in float32."""
    if weight_VH.is_cuda and weight_VH.dtype != torch.float32:
        rounded_tV = grad_logits_tV.to(weight_VH.dtype)
        torch.addmm(total_tH, rounded_tV, weight_VH, out_dtype=torch.float32, out=total_tH)
        return
    for block in _blocks(weight_VH):
        total_tH.addmm_(grad_logits_tV[:, block], weight_VH[block].float())


def _add_transposed_product(total_VH: Tensor, grad_logits_tV: Tensor, hidden_tH: Tensor) -> None:
    """total += grad_logits.T @ hidden, in place, in float32."""
    if hidden_tH.is_cuda and hidden_tH.dtype != torch.float32:
        rounded_tV = grad_logits_tV.to(hidden_tH.dtype)
        torch.addmm(total_VH, rounded_tV.T, hidden_tH, out_dtype=torch.float32, out=total_VH)
        return
    total_VH.addmm_(grad_logits_tV.T, hidden_tH.float())


def _chunks(hidden_TH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    """The indices of tokens whose logits exist at once."""
    size = max(1, CHUNK_LOGITS // len(weight_VH))
    return (slice(start, start + size) for start in range(0, len(hidden_TH), size))


def _blocks(weight_VH: Tensor) -> Iterator[slice]:
    """The rows of the head to convert at once; all, if they are float32 already."""
    size = len(weight_VH)
    if weight_VH.dtype != torch.float32:
        size = max(1, _BLOCK_WEIGHTS // weight_VH.shape[1])
    return (slice(start, start + size) for start in range(0, len(weight_VH), size))
