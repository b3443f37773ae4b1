"""Attention over rows laid end to end, in which a prefix that several rows begin with stands once.

Each row attends to itself: queries are its own tokens, keys are all of its tokens, those it shares with an earlier row
included. A causal model without dropout makes the same of a shared token in every row: only the repetition is left out.
Shapes: S tokens, B rows, D size of a head; Q own tokens of one row, K tokens of it in all.
"""

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from pos2distill.errors import UserError
from pos2distill.records import Tokens

PACKED = {"sdpa": "packed_sdpa", "eager": "packed_eager", "flash_attention_2": "packed_varlen"}
"""What transformers knows each kernel by when it works on such rows."""

_WORTH = 8
"""A prefix is shared if it is at least this part of its row: the few tokens that open every prompt are not."""

_Kernel = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Which of S tokens each of B rows is made of.

    shared, own: tokens of each row that are an earlier row's, and its other ones, which follow them. spans: sizes of
    the spans that S is cut into, such that rows are made of whole ones; of_row: each row's spans in order.
    start_B1: (B + 1,) int32, where rows' own tokens begin, and S. key_start_B1: the same, had each row been laid whole.
    """

    shared: tuple[int, ...]
    own: tuple[int, ...]
    spans: tuple[int, ...]
    of_row: tuple[tuple[int, ...], ...]
    start_B1: Tensor
    key_start_B1: Tensor
    _masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, shared ones included."""
        return max(own + shared for own, shared in zip(self.own, self.shared, strict=True))

    def to(self, device: torch.device | str) -> "PackedRows":
        """The same rows, known on a device. It has masks of its own, which go with it once a pass is done."""
        return replace(self, start_B1=self.start_B1.to(device), key_start_B1=self.key_start_B1.to(device), _masks={})

    def keys(self, states: Tensor) -> list[Tensor]:
        """Each row's keys or values, (1, heads, K, D), from those of all tokens, (1, heads, S, D).

        Split, not sliced: a slice's gradient is as large as all rows.
        """
        spans = states.split(self.spans, 2)
        return [spans[row[0]] if len(row) == 1 else torch.cat([spans[at] for at in row], 2) for row in self.of_row]

    def all_keys(self, states: Tensor) -> Tensor:
        """As `keys`, all rows end to end."""
        if not any(self.shared):
            return states
        spans = states.split(self.spans, 2)
        return torch.cat([spans[at] for row in self.of_row for at in row], 2)

    def mask(self, row: int, window: int | None, like: Tensor) -> Tensor:
        """What a row's own tokens may see, to be added to scores: (1, 1, Q, K). All layers use the same tensor."""
        key = (row, window, like.dtype, like.device)
        if key not in self._masks:
            self._masks[key] = _causal(self.own[row], self.own[row] + self.shared[row], window, like)
        return self._masks[key]


def pack_rows(
    prompts: Sequence[Tokens], lengths: Sequence[int], group_ids: Sequence[Hashable] | None = None
) -> PackedRows:
    """Lay rows end to end.

    Args:
        prompts: the tokens that rows may share; never the last one, which predicts the row's own response.
        lengths: of the whole rows.
        group_ids: neighbours with the same value share what they both begin with; without it none do.
    """
    pieces: list[list[tuple[int, int]]] = []  # of each row, as parts of S
    shared: list[int] = []
    end = 0
    for row, length in enumerate(lengths):
        common, lender = _longest_common_prefix(prompts, row, group_ids) if group_ids else (0, 0)
        if common * _WORTH < length:
            common = 0
        pieces.append([*(_cut(pieces[lender], common) if common else []), (end, end + length - common)])
        shared.append(common)
        end += length - common
    bounds = sorted({bound for row_pieces in pieces for piece in row_pieces for bound in piece})
    place = {bound: index for index, bound in enumerate(bounds)}
    own = tuple(length - common for length, common in zip(lengths, shared, strict=True))
    return PackedRows(
        shared=tuple(shared),
        own=own,
        spans=tuple(int(size) for size in np.diff(bounds)),
        of_row=tuple(
            tuple(at for first, last in row_pieces for at in range(place[first], place[last])) for row_pieces in pieces
        ),
        start_B1=_starts(own),
        key_start_B1=_starts(lengths),
    )


def _starts(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def _longest_common_prefix(prompts: Sequence[Tokens], row: int, group_ids: Sequence[Hashable]) -> tuple[int, int]:
    """How many tokens a row has in common with an earlier relative at most, short of its last, and with which."""
    own = prompts[row][:-1]
    found = (0, 0)
    for earlier in takewhile(lambda other: group_ids[other] == group_ids[row], range(row - 1, -1, -1)):
        size = min(len(own), len(prompts[earlier]))
        differs = own[:size] != prompts[earlier][:size]
        common = int(differs.argmax()) if differs.any() else size
        found = max(found, (common, earlier))
    return found


def _cut(pieces: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The first tokens of a row."""
    taken = []
    for start, end in pieces:
        if tokens > 0:
            taken.append((start, min(end, start + tokens)))
        tokens -= end - start
    return taken


def _row_by_row(kernel_of: Callable[[torch.nn.Module], _Kernel]) -> _Kernel:
    """Attention by a kernel that knows one row at a time."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_rows: PackedRows | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        """Causal attention in each row: (1, heads, S, D) each -> (1, S, heads, D).

        Raises:
            UserError: as `_handed_down`.
        """
        packed_rows = _handed_down(packed_rows, module)
        kernel = kernel_of(module)
        window = _window(attention_mask)
        knows_causal = kernel is sdpa_attention_forward
        rows = zip(query.split(packed_rows.own, 2), packed_rows.keys(key), packed_rows.keys(value), strict=True)
        parts = []
        for row, (query_own, key_own, value_own) in enumerate(rows):
            whole = not packed_rows.shared[row] and (window is None or key_own.shape[2] <= window)
            mask = None if whole and knows_causal else packed_rows.mask(row, window, query)
            parts.append(kernel(module, query_own, key_own, value_own, mask, **settings)[0])
        return torch.cat(parts, 1), None

    return attend


def _varlen(
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
    """As above by flash-attn, all rows in one call; a row's last query is at its last key.

    Raises:
        UserError: as `_handed_down`; where attention has sinks, which flash-attn 2 does not know.
    """
    packed_rows = _handed_down(packed_rows, module)
    if s_aux is not None:
        raise UserError(
            f"{type(module).__name__} has attention sinks, unknown to flash-attn 2; set model.attention to eager"
        )
    if dtype := get_target_dtype(query, module):
        query, key, value = (states.to(dtype) for states in (query, key, value))
    key, value = (packed_rows.all_keys(states) for states in (key, value))
    size = value.shape[-1]
    if size != key.shape[-1]:  # it wants values as long as keys
        value = pad(value, [0, key.shape[-1] - size])
    starts: Any = (packed_rows.start_B1, packed_rows.key_start_B1)
    output: Tensor = _flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        query_length=query.shape[2],
        is_causal=True,
        dropout=dropout,
        softmax_scale=scaling,
        sliding_window=sliding_window or _window(attention_mask),
        softcap=softcap,
        attn_implementation="flash_attention_2",
        cu_seq_lens_q=starts[0],
        cu_seq_lens_k=starts[1],
        max_length_q=max(packed_rows.own),
        max_length_k=packed_rows.longest,
    )
    return output[..., :size], None


def _handed_down(packed_rows: PackedRows | None, module: torch.nn.Module) -> PackedRows:
    """
    Raises:
        UserError: if the model does not hand down where rows begin; tokens would see other rows.
    """
    if packed_rows is None:
        raise UserError(
            f"{type(module).__name__} is not told by its model where rows begin; a model of this kind cannot be trained"
        )
    return packed_rows


def _causal(wanted: int, known: int, window: int | None, like: Tensor) -> Tensor:
    """For the last of a row's tokens: 0 where they see, the lowest number where they do not."""
    query_Q1 = torch.arange(known - wanted, known, device=like.device)[:, None]
    key_K = torch.arange(known, device=like.device)
    hidden_QK = key_K > query_Q1
    if window is not None:
        hidden_QK |= key_K <= query_Q1 - window
    scores_QK = torch.zeros(wanted, known, dtype=like.dtype, device=like.device)
    return scores_QK.masked_fill(hidden_QK, torch.finfo(like.dtype).min)[None, None]


def _mask(*, local_size: int | None = None, **_: Any) -> Tensor | None:
    """What layers get in place of a mask over all pairs of S tokens: how far back they look, where that ends."""
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)


def _window(attention_mask: Tensor | None) -> int | None:
    return None if attention_mask is None else int(attention_mask)


def _eager(module: torch.nn.Module) -> _Kernel:
    """Every model brings its own."""
    kernel: _Kernel = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    return kernel


for _name, _attend in {
    "sdpa": _row_by_row(lambda _: sdpa_attention_forward),
    "eager": _row_by_row(_eager),
    "flash_attention_2": _varlen,
}.items():
    AttentionInterface.register(PACKED[_name], _attend)
    AttentionMaskInterface.register(PACKED[_name], _mask)
