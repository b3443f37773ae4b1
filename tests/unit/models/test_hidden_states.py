from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.hidden_states import hidden_from_bytes, hidden_to_bytes, response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import collate
from pos2distill.records import Tokens
from tests.support.models import HEADS, SMALL, draw_tokens


def reference_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None,
    dropout: float,
    is_causal: bool,
    query_length: int,
    attn_implementation: str,
) -> Tensor:
    """What flash-attn documents for packed rows: (1, S, heads, D), a row's last query at its last key."""
    assert (is_causal, dropout, attn_implementation) == (True, 0.0, "flash_attention_2")
    assert query_length == query.shape[1] == cu_seq_lens_q[-1]
    assert max_length_q == cu_seq_lens_q.diff().max()
    assert max_length_k == cu_seq_lens_k.diff().max()
    key, value = (states.repeat_interleave(query.shape[2] // key.shape[2], 2) for states in (key, value))
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seq_lens_q.tolist()), pairwise(cu_seq_lens_k.tolist()), strict=True):
        scores_hQK = torch.einsum("qhd,khd->hqk", query[0, q0:q1], key[0, k0:k1]) * softmax_scale
        if softcap:
            scores_hQK = softcap * torch.tanh(scores_hQK / softcap)
        back_QK = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        seen_QK = (back_QK >= 0) & (back_QK < (sliding_window or k1))
        weights_hQK = scores_hQK.masked_fill(~seen_QK, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights_hQK, value[0, k0:k1]))
    return torch.cat(parts)[None]


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "window": lambda: MistralForCausalLM(MistralConfig(**SMALL, **HEADS, sliding_window=8)),
    # One layer with a window and one without, and scores that are capped.
    "capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, **HEADS, head_dim=8, sliding_window=8)),
}


@pytest.fixture(
    params=[
        *((model, attention) for model in ("llama", "window") for attention in ("sdpa", "eager", "flash_attention_2")),
        ("capped", "eager"),
        ("capped", "flash_attention_2"),
    ],
    ids="-".join,
)
def lm(
    request: pytest.FixtureRequest, tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PreTrainedModel:
    """The tiny model, and some whose layers look back 8 tokens only, by every way to attend."""
    name, attention = request.param
    monkeypatch.setattr("pos2distill.models.attention._flash_attention_forward", reference_varlen)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda self, version: True)
    if name in MODELS:
        torch.manual_seed(0)
        MODELS[name]().save_pretrained(tmp_path)
    path = str(tmp_path) if name in MODELS else tiny_model_path
    return load_model(ModelSection(path=path, dtype="float32", attention=attention), packed=True)


def padded_hidden(lm: PreTrainedModel, prompts: list[Tokens], responses: list[Tokens]) -> Tensor:
    """The plain way: rows padded on the right, with a mask."""
    rows = [torch.tensor([*p.tolist(), *r.tolist()]) for p, r in zip(prompts, responses, strict=True)]
    ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_BL = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    lm.config._attn_implementation = "eager"
    hidden_BLH = lm.get_decoder()(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
    return torch.cat(
        [
            hidden_BLH[i, len(p) - 1 : len(p) + len(r) - 1]
            for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
        ]
    )


def test_response_hidden_states_of_packed_rows_equal_padded_ones(lm: PreTrainedModel) -> None:
    prompts, responses = draw_tokens((3, 40, 17), 0), draw_tokens((9, 2, 5), 1)
    with torch.no_grad():
        packed = response_hidden_states(lm, collate(prompts, responses))
        torch.testing.assert_close(packed, padded_hidden(lm, prompts, responses), rtol=0, atol=1e-5)


def with_common_beginnings() -> tuple[list[Tokens], list[Tokens]]:
    """Like rows of one example: the later the gold document, the longer the common prefix. The last row has none."""
    (documents,), (unrelated,) = draw_tokens((40,), 0), draw_tokens((11,), 3)
    prompts = [
        np.concatenate([documents[:cut], own])
        for cut, own in zip((0, 12, 31, 24), draw_tokens((9,) * 4, 2), strict=True)
    ]
    return [*prompts, unrelated], draw_tokens((4, 3, 5, 1, 2), 1)


def test_response_hidden_states_and_gradients_do_not_change_with_shared_prefixes(lm: PreTrainedModel) -> None:
    prompts, responses = with_common_beginnings()
    found = {}
    for shares_prefixes in (False, True):
        group_ids = [0] * len(prompts) if shares_prefixes else None
        batch = collate(prompts, responses, group_ids=group_ids)
        lm.zero_grad()
        hidden_TH = response_hidden_states(lm, batch)
        weight_TH = torch.randn(hidden_TH.shape, generator=torch.Generator().manual_seed(0))
        (hidden_TH * weight_TH).sum().backward()
        gradient = torch.cat([each.grad.flatten() for each in lm.parameters() if each.grad is not None])
        found[shares_prefixes] = (hidden_TH.detach(), gradient, len(batch.input_ids_S))
    assert found[True][2] == found[False][2] - 12 - 24
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=1e-5)
    assert (found[True][1] - found[False][1]).norm() < 1e-5 * found[False][1].norm()


def save_tiny(family: str, folder: Path, **settings: Any) -> ModelSection:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **HEADS, pad_token_id=0, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelSection(path=str(folder), dtype="float32", max_length=128)


def test_load_model_names_attention_that_sdpa_cannot_compute(tmp_path: Path) -> None:
    """GPT-OSS has sinks, which torch's kernels do not know."""
    model = save_tiny("gpt_oss", tmp_path, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    with pytest.raises(UserError, match=r"its attention cannot be computed by sdpa; set model\.attention to eager"):
        load_model(model, packed=True)


def test_response_hidden_states_reject_shared_rows_without_a_packed_model(tiny_model_path: str) -> None:
    prompts, responses = with_common_beginnings()
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"))
    with pytest.raises(ValueError, match="loaded with packed=True"):
        response_hidden_states(lm, collate(prompts, responses, group_ids=[0] * len(prompts)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_response_hidden_states_of_a_plain_model_keep_rows_apart_by_positions(
    tiny_model_path: str, attention: str
) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32", attention=attention))
    prompts, responses = draw_tokens((3, 40, 17), 0), draw_tokens((9, 2, 5), 1)
    with torch.no_grad():
        plain = response_hidden_states(lm, collate(prompts, responses))
        torch.testing.assert_close(plain, padded_hidden(lm, prompts, responses), rtol=0, atol=1e-5)


def test_response_hidden_states_of_a_row_do_not_depend_on_other_rows(lm: PreTrainedModel) -> None:
    """A row whose tokens are others and whose length is another leaves the states of its neighbors as they are."""
    prompts, responses = draw_tokens((20, 30, 11), 0), draw_tokens((4, 3, 5), 1)
    (other,) = draw_tokens((13,), 2)
    with torch.no_grad():
        before = response_hidden_states(lm, collate(prompts, responses))
        after = response_hidden_states(lm, collate([prompts[0], other, prompts[2]], responses))
    torch.testing.assert_close(after[:4], before[:4], rtol=0, atol=2e-6)
    torch.testing.assert_close(after[7:], before[7:], rtol=0, atol=2e-6)
    assert (after[4:7] - before[4:7]).abs().max() > 0.01


def test_response_hidden_states_depend_on_the_first_token_of_their_row(tiny_model_path: str) -> None:
    """Rows are cut from each other, and nowhere inside."""
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)
    prompts, responses = draw_tokens((20, 30), 0), draw_tokens((4, 3), 1)
    with torch.no_grad():
        before = response_hidden_states(lm, collate(prompts, responses))
        prompts[1][0] += 1
        after = response_hidden_states(lm, collate(prompts, responses))
    assert (after[-1] - before[-1]).abs().max() > 1e-4
    assert torch.equal(after[:4], before[:4])


def test_packed_rows_masks_are_freed_after_the_pass(tiny_model_path: str) -> None:
    """They grow with the square of a row, and a global batch has many."""
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)
    prompts, responses = with_common_beginnings()
    batch = collate(prompts, responses, group_ids=[0] * len(prompts))
    used = batch.to("cpu")
    response_hidden_states(lm, used)
    assert used.packed._masks
    assert not batch.packed._masks


def test_response_hidden_states_are_those_that_enter_lm_head(tiny_model_path: str) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"))
    with torch.no_grad():
        logits_BLV = lm(torch.tensor([[11, 12, 13, 14, 15]])).logits
        hidden_TH = response_hidden_states(lm, collate([np.asarray([11, 12, 13])], [np.asarray([14, 15])]))
        torch.testing.assert_close(lm.lm_head(hidden_TH), logits_BLV[0, 2:4], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_hidden_from_bytes_restores_states_exactly(dtype: str) -> None:
    hidden_TH = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    data = hidden_to_bytes(hidden_TH)
    assert len(data) == 5 * 7 * hidden_TH.element_size()
    back = hidden_from_bytes(data, dtype, 5)
    assert back.dtype == hidden_TH.dtype
    assert torch.equal(back, hidden_TH)
    # A part of a larger tensor is written row by row.
    assert torch.equal(hidden_from_bytes(hidden_to_bytes(hidden_TH[:, 2:5]), dtype, 5), hidden_TH[:, 2:5])
