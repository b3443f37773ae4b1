"""Attention kernels for packed rows, registered with transformers.

Each row attends to itself only: its queries are the tokens it added itself, its keys are all of its tokens, including
the prefix that it shares with an earlier row. See `pos2distill.models.packing` for how rows are packed.

Shapes: S tokens of the packed sequence, B rows, D size of an attention head.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from pos2distill.errors import UserError
from pos2distill.models.packing import PackedRows

PACKED = {"sdpa": "packed_sdpa", "eager": "packed_eager", "flash_attention_2": "packed_varlen"}
"""For each attention implementation of transformers, the name under which its packed version is registered."""

_MAX_RECOMPUTED_FRACTION = 0.4
"""A row behind a shared prefix is computed whole, without a mask, if the prefix is at most this fraction of it.

For L own and P shared tokens, a kernel computes (L + P)^2 / 2 scores without a mask and L (L + P) with one, which are
equal for P = L. The queries of the prefix are copied too, so that on a CPU both ways take the same time at 40 % of a
row of 1,640 tokens (torch 2.13, forward and backward). On a GPU only calls without a mask reach a flash kernel."""

_Kernel = Callable[..., tuple[Tensor, Any]]


def disable_cudnn_attention() -> None:
    """Disable cuDNN's kernel for torch's `scaled_dot_product_attention`, from now on and in the whole process.

    cuDNN's builds a plan for every new shape, which takes up to half a second, forward and backward each, and here
    nearly every row has a length of its own. torch 2.11 prefers it in 16 bits on GPUs of compute capability 9.0 and
    10.0, such as the H100 (`check_prefer_cudnn_attention` in its sdp_utils.cpp). There is no context that restores
    torch's flags, since it would restore wrong ones where threads overlap.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def register_kernels() -> None:
    """Register the packed kernels with transformers, under the names in `PACKED`. Calling it again changes nothing."""
    kernels = {"sdpa": packed_sdpa, "eager": packed_eager, "flash_attention_2": packed_varlen}
    for implementation, kernel in kernels.items():
        AttentionInterface.register(PACKED[implementation], kernel)
        AttentionMaskInterface.register(PACKED[implementation], window_as_mask)


def packed_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row by torch's kernels: (1, heads, S, D) each -> (1, S, heads, D).

    Raises:
        UserError: if the model does not pass `packed_rows` on to its attention layers.
    """
    packed_rows = _require_packed(packed_rows, module)
    return _attend_row_by_row(
        sdpa_attention_forward,
        module,
        query,
        key,
        value,
        attention_mask,
        packed_rows,
        causal_without_mask=True,
        **settings,
    )


def packed_eager(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Like `packed_sdpa`, by the model's own plain attention, which knows its soft caps and sinks."""
    packed_rows = _require_packed(packed_rows, module)
    return _attend_row_by_row(
        eager_kernel(module),
        module,
        query,
        key,
        value,
        attention_mask,
        packed_rows,
        causal_without_mask=False,
        **settings,
    )


def packed_varlen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Like `packed_sdpa`, by flash-attn's variable-length kernel: all rows in one call.

    The kernel aligns a row's last query with its last key (flash-attn 2.1 and later), which is where they are here.

    Raises:
        UserError: see `packed_sdpa`; also if attention has sinks, which flash-attn 2 does not support.
    """
    packed_rows = _require_packed(packed_rows, module)
    if s_aux is not None:
        raise UserError(
            f"{type(module).__name__} has attention sinks, which flash-attn 2 does not support; "
            f"set model.attention to eager"
        )
    target_dtype = get_target_dtype(query, module)
    # flash-attn computes in half precision; transformers 5.19 names the dtype to use for float32 states.
    if target_dtype is not None:
        query, key, value = query.to(target_dtype), key.to(target_dtype), value.to(target_dtype)
    key, value = packed_rows.concatenated_rows(key), packed_rows.concatenated_rows(value)
    value_size = value.shape[-1]
    if value_size != key.shape[-1]:
        # flash-attn 2 requires values of the keys' head size; some models have smaller values.
        value = pad(value, [0, key.shape[-1] - value_size])
    query_starts: Any = packed_rows.start_B1
    key_starts: Any = packed_rows.key_start_B1
    output: Tensor = _flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        query_length=query.shape[2],
        is_causal=True,
        dropout=dropout,
        softmax_scale=scaling,
        sliding_window=sliding_window or window_of(attention_mask),
        softcap=softcap,
        attn_implementation="flash_attention_2",
        cu_seq_lens_q=query_starts,
        cu_seq_lens_k=key_starts,
        max_length_q=max(packed_rows.query_lengths),
        max_length_k=packed_rows.longest,
    )
    return output[..., :value_size], None


def eager_kernel(module: torch.nn.Module) -> _Kernel:
    """The plain attention of a model's family, which is `eager_attention_forward` of its modeling file.

    transformers 5.19 does not list it in `ALL_ATTENTION_FUNCTIONS`: each modeling file defines its own and passes it
    as the default of `get_interface`. So it is looked up in the module that defines the attention layer.
    """
    modeling_file = importlib.import_module(type(module).__module__)
    kernel: _Kernel = modeling_file.eager_attention_forward
    return kernel


def _attend_row_by_row(
    kernel: _Kernel,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_rows: PackedRows,
    *,
    causal_without_mask: bool,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention by a kernel that computes one row at a time.

    Args:
        causal_without_mask: whether the kernel is causal, and faster, where it gets no mask.
    """
    window = window_of(attention_mask)
    own_queries = query.split(packed_rows.query_lengths, 2)
    query_spans = packed_rows.spans(query)
    keys = packed_rows.whole_rows(key)
    values = packed_rows.whole_rows(value)
    outputs = []
    for row, shared in enumerate(packed_rows.shared_lengths):
        window_covers_row = window is None or packed_rows.row_length(row) <= window
        is_faster_whole = shared <= _MAX_RECOMPUTED_FRACTION * packed_rows.row_length(row)
        if causal_without_mask and window_covers_row and is_faster_whole:
            # torch's `is_causal` aligns the first query with the first key, so the queries of the prefix are included.
            whole_query = packed_rows.whole_row(query_spans, row)
            output, _ = kernel(module, whole_query, keys[row], values[row], None, **settings)
            outputs.append(output[:, shared:])
        else:
            mask = packed_rows.mask(row, window, query)
            output, _ = kernel(module, own_queries[row], keys[row], values[row], mask, **settings)
            outputs.append(output)
    return torch.cat(outputs, 1), None


def _require_packed(packed_rows: PackedRows | None, module: torch.nn.Module) -> PackedRows:
    """Reject a model that did not pass `packed_rows` on.

    Raises:
        UserError: if the model did not pass `packed_rows` on; tokens would see other rows.
    """
    if packed_rows is None:
        raise UserError(
            f"{type(module).__name__} received no packed_rows from its model, which drops unknown arguments; "
            f"a model of this kind cannot be trained"
        )
    return packed_rows


def window_as_mask(*, local_size: int | None = None, **_: Any) -> Tensor | None:
    """The "mask" that transformers passes to a layer: the size of its sliding window, None where it has none.

    Registered as the mask function of the packed kernels, so that no (S, S) mask is ever built. transformers 5.19
    passes a layer's window as `local_size`; a mask must be a 4-dimensional tensor.
    """
    if local_size is None:
        return None
    return torch.full((1, 1, 1, 1), local_size)


def window_of(attention_mask: Tensor | None) -> int | None:
    """The window that `window_as_mask` encoded."""
    if attention_mask is None:
        return None
    return int(attention_mask)
