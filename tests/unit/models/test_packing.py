from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.load import load_model
from pos2distill.models.packing import collate, hidden_from_bytes, hidden_to_bytes, response_hidden_states
from pos2distill.records import Tokens


def tokens(*ids: int) -> Tokens:
    return np.asarray(ids, np.int32)


PROMPTS = [tokens(11, 12, 13), tokens(21), tokens(31, 32, 33, 34, 35)]
RESPONSES = [tokens(14, 15), tokens(22, 23, 24), tokens(36)]


def test_prompts_and_responses_are_laid_end_to_end_by_their_ids() -> None:
    batch = collate(PROMPTS, RESPONSES)
    assert batch.input_ids_S.tolist() == [11, 12, 13, 14, 15, 21, 22, 23, 24, 31, 32, 33, 34, 35, 36]
    assert batch.position_S.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert batch.packed.start_B1.tolist() == [0, 5, 9, 15]
    assert batch.packed.start_B1.dtype == batch.packed.key_start_B1.dtype == torch.int32  # as flash-attn takes them
    assert (batch.rows, batch.packed.longest) == (3, 6)


def test_a_prefix_that_rows_share_is_laid_down_once() -> None:
    prompts = [tokens(1, 2, 3, 4, 5, 6), tokens(1, 2, 3, 4, 7), tokens(1, 2, 3, 4, 7, 8), tokens(9, 2)]
    responses = [tokens(50), tokens(51), tokens(52, 53), tokens(54)]
    batch = collate(prompts, responses, group_ids="aaaa")
    assert batch.input_ids_S.tolist() == [1, 2, 3, 4, 5, 6, 50, 7, 51, 8, 52, 53, 9, 2, 54]
    assert batch.position_S.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 5, 6, 7, 0, 1, 2]
    packed = batch.packed
    assert packed.shared == (0, 4, 5, 0)
    assert packed.spans == (4, 3, 1, 1, 3, 3)
    assert packed.of_row == ((0, 1), (0, 2, 3), (0, 2, 4), (5,))
    assert packed.start_B1.tolist() == [0, 7, 9, 12, 15]
    assert packed.key_start_B1.tolist() == [0, 7, 13, 21, 24]
    assert (packed.longest, batch.logit_index_T.tolist()) == (8, [5, 7, 9, 10, 13])


def test_the_token_that_predicts_a_response_is_never_shared() -> None:
    batch = collate([tokens(1, 2, 3), tokens(1, 2, 3)], [tokens(50), tokens(51)], group_ids=[7, 7])
    assert batch.input_ids_S.tolist() == [1, 2, 3, 50, 3, 51]
    assert batch.logit_index_T.tolist() == [2, 4]


def test_what_opens_every_prompt_is_not_worth_sharing() -> None:
    prompts = [np.asarray([1, *range(start, start + 9)], np.int32) for start in (20, 40)]
    assert collate(prompts, [tokens(50)] * 2, group_ids=[7, 7]).packed.shared == (0, 0)


def test_rows_of_different_examples_share_nothing() -> None:
    prompts, responses = [tokens(1, 2, 3, 4, 5)] * 5, [tokens(50)] * 5
    assert collate(prompts, responses).packed.shared == (0,) * 5
    assert collate(prompts, responses, group_ids="abbac").packed.shared == (0, 0, 4, 0, 0)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 3)), min_size=1, max_size=7)
)
def test_every_row_is_whole_whatever_it_shares(rows: list[tuple[list[int], int]]) -> None:
    prompts = [np.asarray(prompt, np.int32) for prompt, _ in rows]
    responses = [np.arange(50, 50 + length, dtype=np.int32) for _, length in rows]
    batch = collate(prompts, responses, group_ids=[0] * len(rows))
    for what, expected in (
        (batch.input_ids_S, [[*p.tolist(), *r.tolist()] for p, r in zip(prompts, responses, strict=True)]),
        (batch.position_S, [list(range(len(p) + len(r))) for p, r in zip(prompts, responses, strict=True)]),
    ):
        states = what[None, None, :, None]
        assert [keys.flatten().tolist() for keys in batch.packed.keys(states)] == expected
        assert batch.packed.all_keys(states).flatten().tolist() == [each for row in expected for each in row]
    assert sum(batch.packed.own) == len(batch.input_ids_S) <= batch.packed.key_start_B1[-1]
    assert batch.input_ids_S[batch.logit_index_T + 1].tolist() == np.concatenate(responses).tolist()


@pytest.mark.parametrize(
    ("alignment", "places"),
    [("shifted", [2, 3, 5, 6, 7, 13]), ("official", [3, 4, 6, 7, 8, 14])],
)
def test_where_each_response_token_is_predicted(alignment: str, places: list[int]) -> None:
    batch = collate(PROMPTS, RESPONSES, alignment=alignment)  # type: ignore[arg-type]
    assert batch.row_T.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.logit_index_T.tolist() == places


def test_shifted_places_stand_one_before_their_tokens() -> None:
    batch = collate(PROMPTS, RESPONSES)
    assert batch.input_ids_S[batch.logit_index_T + 1].tolist() == np.concatenate(RESPONSES).tolist()


def test_prompts_and_responses_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        collate(PROMPTS, RESPONSES[:2])


def draw(sizes: tuple[int, ...], seed: int) -> list[Tokens]:
    random = np.random.default_rng(seed)
    return [random.integers(5, 250, size).astype(np.int32) for size in sizes]


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
    """What flash-attn documents of rows laid end to end: (1, S, heads, D), a row's last query at its last key."""
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


SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25}
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


def test_packed_rows_equal_padded_ones(lm: PreTrainedModel) -> None:
    prompts, responses = draw((3, 40, 17), 0), draw((9, 2, 5), 1)
    with torch.no_grad():
        packed = response_hidden_states(lm, collate(prompts, responses))
        torch.testing.assert_close(packed, padded_hidden(lm, prompts, responses), rtol=0, atol=1e-5)


def with_common_beginnings() -> tuple[list[Tokens], list[Tokens]]:
    """Rows as of one example: the longer they are alike, the later the gold document comes. One stands apart."""
    (documents,), (apart,) = draw((40,), 0), draw((11,), 3)
    prompts = [
        np.concatenate([documents[:cut], own]) for cut, own in zip((0, 12, 31, 24), draw((9,) * 4, 2), strict=True)
    ]
    return [*prompts, apart], draw((4, 3, 5, 1, 2), 1)


def test_shared_prefixes_change_neither_states_nor_gradients(lm: PreTrainedModel) -> None:
    prompts, responses = with_common_beginnings()
    found = {}
    for share in (False, True):
        batch = collate(prompts, responses, group_ids=[0] * len(prompts) if share else None)
        lm.zero_grad()
        hidden_TH = response_hidden_states(lm, batch)
        weight_TH = torch.randn(hidden_TH.shape, generator=torch.Generator().manual_seed(0))
        (hidden_TH * weight_TH).sum().backward()
        gradient = torch.cat([each.grad.flatten() for each in lm.parameters() if each.grad is not None])
        found[share] = (hidden_TH.detach(), gradient, len(batch.input_ids_S))
    assert found[True][2] == found[False][2] - 12 - 24
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=1e-5)
    assert (found[True][1] - found[False][1]).norm() < 1e-5 * found[False][1].norm()


WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in ("qwen2", "qwen3", "mistral", "gemma", "phi3", "granite", "olmo2", "smollm3", "gpt2")},
    "cohere2": WINDOW,
    "exaone4": WINDOW,
    "gemma3_text": WINDOW,
    "ministral": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "starcoder2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def save_tiny(family: str, folder: Path, **settings: Any) -> ModelSection:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **HEADS, pad_token_id=0, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelSection(path=str(folder), dtype="float32", max_length=128)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_many_families_are_as_if_each_stood_alone(family: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path, **FAMILIES[family])
    prompts, responses = with_common_beginnings()
    packed, plain = load_model(model, packed=True), load_model(model)
    with torch.no_grad():
        together = response_hidden_states(packed, collate(prompts, responses, group_ids=[0] * len(prompts)))
        alone = [
            plain.get_decoder()(torch.tensor([[*prompt, *response]])).last_hidden_state[0, len(prompt) - 1 : -1]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "layer"), [("lfm2", "conv"), ("minimax", "linear_attention"), ("qwen3_next", "linear_attention")]
)
def test_families_whose_rows_would_mix_are_refused(family: str, layer: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path, layer_types=[layer, "full_attention"])
    with pytest.raises(UserError, match=f"its layers of type '{layer}' would mix rows laid end to end"):
        load_model(model, packed=True)


def test_attention_that_sdpa_cannot_compute_is_told(tmp_path: Path) -> None:
    """GPT-OSS has sinks, which torch's kernels do not know."""
    model = save_tiny("gpt_oss", tmp_path, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    with pytest.raises(UserError, match=r"its attention cannot be computed by sdpa; set model\.attention to eager"):
        load_model(model, packed=True)


def test_rows_that_share_are_for_packed_models_alone(tiny_model_path: str) -> None:
    prompts, responses = with_common_beginnings()
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"))
    with pytest.raises(ValueError, match="loaded packed"):
        response_hidden_states(lm, collate(prompts, responses, group_ids=[0] * len(prompts)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_knows_no_packed_rows_tells_them_apart_by_their_positions(
    tiny_model_path: str, attention: str
) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32", attention=attention))
    prompts, responses = draw((3, 40, 17), 0), draw((9, 2, 5), 1)
    with torch.no_grad():
        plain = response_hidden_states(lm, collate(prompts, responses))
        torch.testing.assert_close(plain, padded_hidden(lm, prompts, responses), rtol=0, atol=1e-5)


def test_no_row_sees_another(lm: PreTrainedModel) -> None:
    """A row whose tokens are others and whose length is another leaves the states of its neighbours as they are."""
    prompts, responses = draw((20, 30, 11), 0), draw((4, 3, 5), 1)
    (other,) = draw((13,), 2)
    with torch.no_grad():
        before = response_hidden_states(lm, collate(prompts, responses))
        after = response_hidden_states(lm, collate([prompts[0], other, prompts[2]], responses))
    torch.testing.assert_close(after[:4], before[:4], rtol=0, atol=2e-6)
    torch.testing.assert_close(after[7:], before[7:], rtol=0, atol=2e-6)
    assert (after[4:7] - before[4:7]).abs().max() > 0.01


def test_the_first_token_of_a_row_moves_its_last_state(tiny_model_path: str) -> None:
    """Rows are cut from each other, and nowhere inside."""
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)
    prompts, responses = draw((20, 30), 0), draw((4, 3), 1)
    with torch.no_grad():
        before = response_hidden_states(lm, collate(prompts, responses))
        prompts[1][0] += 1
        after = response_hidden_states(lm, collate(prompts, responses))
    assert (after[-1] - before[-1]).abs().max() > 1e-4
    assert torch.equal(after[:4], before[:4])


def test_packed_attention_is_not_for_rows_of_which_nobody_says_where_they_begin(tiny_model_path: str) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)
    with pytest.raises(UserError, match="LlamaAttention is not told by its model where rows begin; a model of this"):
        lm(torch.tensor([[11, 12, 13]]))


def test_flash_attention_does_not_leave_out_sinks() -> None:
    """Of a model that transformers has not marked, which `load_model` would have refused."""
    packed = collate(*with_common_beginnings()).packed
    states = torch.zeros(1, 2, sum(packed.own), 8)
    with pytest.raises(UserError, match=r"^Linear has attention sinks, unknown to flash-attn 2; set model"):
        ALL_ATTENTION_FUNCTIONS["packed_varlen"](
            torch.nn.Linear(1, 1), states, states, states, None, packed_rows=packed, s_aux=torch.zeros(2)
        )


def test_masks_go_with_the_pass_that_made_them(tiny_model_path: str) -> None:
    """They grow with the square of a row, and a global batch has many."""
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)
    prompts, responses = with_common_beginnings()
    batch = collate(prompts, responses, group_ids=[0] * len(prompts))
    used = batch.to("cpu")
    response_hidden_states(lm, used)
    assert used.packed._masks
    assert not batch.packed._masks


def test_states_are_those_that_enter_lm_head(tiny_model_path: str) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"))
    with torch.no_grad():
        logits_BLV = lm(torch.tensor([[11, 12, 13, 14, 15]])).logits
        hidden_TH = response_hidden_states(lm, collate(PROMPTS[:1], RESPONSES[:1]))
        torch.testing.assert_close(lm.lm_head(hidden_TH), logits_BLV[0, 2:4], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_states_survive_their_bytes_exactly(dtype: str) -> None:
    hidden_TH = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    data = hidden_to_bytes(hidden_TH)
    assert len(data) == 5 * 7 * hidden_TH.element_size()
    back = hidden_from_bytes(data, dtype, 5)
    assert back.dtype == hidden_TH.dtype
    assert torch.equal(back, hidden_TH)
    # A part of a larger tensor is written row by row.
    assert torch.equal(hidden_from_bytes(hidden_to_bytes(hidden_TH[:, 2:5]), dtype, 5), hidden_TH[:, 2:5])
