"""Products of the output head in float32, and a loss at each token without the logits of all tokens.

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
"""The losses (t,) of some tokens, float32, from the head's product (t, V) for them and their indices among the T."""

CHUNK_LOGITS = 2**24
"""Logits that exist at once: 64 MiB in float32. A divergence and its gradient need several times that."""

_BLOCK_WEIGHTS = 2**20
"""Weights of the head that a CPU converts to float32 at once: 4 MiB, which stay in its cache."""


def float32_product(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """hidden @ weight.T + bias, (T, V) float32, of equal dtypes; without a gradient.

    With 16 bits, a GPU sums and returns float32 (torch 2.13: `out_dtype`, on CUDA only); a CPU multiplies blocks of the
    head that it converts, so that the whole head never exists in float32.
    """
    with torch.no_grad(), torch.autocast(hidden_TH.device.type, enabled=False):
        if hidden_TH.dtype == torch.float32:
            product_TV = hidden_TH @ weight_VH.T
        elif hidden_TH.is_cuda:
            product_TV = torch.mm(hidden_TH, weight_VH.T, out_dtype=torch.float32)
        else:
            product_TV = hidden_TH.new_empty(len(hidden_TH), len(weight_VH), dtype=torch.float32)
            hidden_TH = hidden_TH.float()
            for block in _blocks(weight_VH):
                torch.mm(hidden_TH, weight_VH[block].float().T, out=product_TV[:, block])
        return product_TV if bias_V is None else product_TV + bias_V.float()


def computing_dtype(hidden_TH: Tensor) -> torch.dtype:
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

        For each chunk of tokens, the head's product is computed and passed to `token_losses`. It is not stored, but
        computed again in the backward pass. Under autocast, states and weights are rounded to its dtype first, as a
        linear layer's are.

        Args:
            hidden_TH: the states that enter the head.
            token_losses: called for each chunk, in both passes. Passed by name, since DeepSpeed warns of positional
                arguments that are not tensors.
        """
        losses_T: Tensor = _ChunkedLosses.apply(hidden_TH, self.weight, self.bias, token_losses)
        return losses_T

    def product(self, hidden_TH: Tensor) -> Tensor:
        """The head's product (T, V), float32, without a gradient. Only inside `token_losses`, as ZeRO-3 requires.

        Args:
            hidden_TH: of `computing_dtype`; the weights are rounded to it.
        """
        return float32_product(hidden_TH, self.weight.to(hidden_TH.dtype), self.bias)


class _ChunkedLosses(torch.autograd.Function):
    """The losses of `LossHead`. Gradients of both parameters are summed over all tokens in float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, token_losses: TokenLosses
    ) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V)
        ctx.token_losses, ctx.dtype = token_losses, computing_dtype(hidden_TH)
        hidden_TH, weight_VH = hidden_TH.to(ctx.dtype), weight_VH.to(ctx.dtype)
        losses = []
        for chunk in _chunks(hidden_TH, weight_VH):
            losses.append(token_losses(float32_product(hidden_TH[chunk], weight_VH, bias_V), chunk))
        return torch.cat(losses)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor | None, ...]:
        stored_TH, stored_VH, bias_V = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        hidden_TH, weight_VH = stored_TH.to(ctx.dtype), stored_VH.to(ctx.dtype)
        to_hidden_TH = torch.zeros_like(hidden_TH, dtype=torch.float32) if wants_hidden else None
        to_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        to_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias and bias_V is not None else None
        for chunk in _chunks(hidden_TH, weight_VH):
            product_tV = float32_product(hidden_TH[chunk], weight_VH, bias_V).requires_grad_()
            with torch.enable_grad():
                losses_t = ctx.token_losses(product_tV, chunk)
            (to_product_tV,) = torch.autograd.grad(losses_t, product_tV, gradient_T[chunk])
            if to_hidden_TH is not None:
                _add_product(to_hidden_TH[chunk], to_product_tV, weight_VH)
            if to_weight_VH is not None:
                _add_transposed_product(to_weight_VH, to_product_tV, hidden_TH[chunk])
            if to_bias_V is not None:
                to_bias_V += to_product_tV.sum(0)
        return to_hidden_TH, to_weight_VH, to_bias_V, None


def _add_product(total_tH: Tensor, to_product_tV: Tensor, weight_VH: Tensor) -> None:
    """total += to_product @ weight, in place, in float32."""
    if weight_VH.is_cuda and weight_VH.dtype != torch.float32:
        rounded_tV = to_product_tV.to(weight_VH.dtype)
        torch.addmm(total_tH, rounded_tV, weight_VH, out_dtype=torch.float32, out=total_tH)
        return
    for block in _blocks(weight_VH):
        total_tH.addmm_(to_product_tV[:, block], weight_VH[block].float())


def _add_transposed_product(total_VH: Tensor, to_product_tV: Tensor, hidden_tH: Tensor) -> None:
    """total += to_product.T @ hidden, in place, in float32."""
    if hidden_tH.is_cuda and hidden_tH.dtype != torch.float32:
        rounded_tV = to_product_tV.to(hidden_tH.dtype)
        torch.addmm(total_VH, rounded_tV.T, hidden_tH, out_dtype=torch.float32, out=total_VH)
        return
    total_VH.addmm_(to_product_tV.T, hidden_tH.float())


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
