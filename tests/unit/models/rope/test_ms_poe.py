"""Ms-PoE: the ranking of heads by hand, and the rotation of each head against one that is written out."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from pos2distill.config import ModelSection
from pos2distill.config.inference import InferenceSection, MsPoeSection
from pos2distill.errors import UserError
from pos2distill.models.load import load_model
from pos2distill.models.rope import ms_poe
from pos2distill.models.rope.ms_poe import apply_ms_poe, choose_scales
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.engines.protocol import SamplingParams
from tests.support.engines import hf_engine
from tests.support.models import HEADS, SMALL, build_model, draw_tokens
from tests.support.rope import head_errors, rotate_by_hand

IDS_BL = torch.tensor([draw_tokens((24,), seed=1)[0].tolist()])


def attention_with_outliers(*counts: int, keys: int = 20) -> Tensor:
    """(1, G, 1, S): of each head, `counts` keys have all the attention, in equal parts."""
    rows = []
    for count in counts:
        row = torch.zeros(keys)
        row[:count] = 1 / count
        rows.append(row)
    return torch.stack(rows)[None, :, None]


ATTENDED = torch.ones(1, 20, dtype=torch.bool)
# Heads 0 to 3 have 2, 5, 1 and 4 of 20 keys above three times the mean: in descending order 1, 3, 0, 2.
FOUR_HEADS = attention_with_outliers(2, 5, 1, 4)


def test_ranking_by_hand() -> None:
    """Closed: 1.2, 1.4, 1.6, 1.8 for ranks 0 to 3; head 1 is first, head 3 second, head 0 third, head 2 last."""
    scales = choose_scales(FOUR_HEADS, ATTENDED, MsPoeSection())
    torch.testing.assert_close(scales, torch.tensor([[1.6, 1.2, 1.8, 1.4]]))


def test_released_ranking_takes_the_order_for_its_inverse() -> None:
    """Head h gets the scale of rank order[h], and the order is 1, 3, 0, 2."""
    scales = choose_scales(FOUR_HEADS, ATTENDED, MsPoeSection(ranking="released"))
    torch.testing.assert_close(scales, torch.tensor([[1.4, 1.8, 1.2, 1.6]]))


def test_released_spacing_never_reaches_the_largest_scale() -> None:
    scales = choose_scales(FOUR_HEADS, ATTENDED, MsPoeSection(spacing="released"))
    torch.testing.assert_close(scales.sort().values, torch.tensor([[1.2, 1.35, 1.5, 1.65]]))


def test_a_key_counts_if_it_has_more_than_three_times_the_mean() -> None:
    """Six of 20 keys with a sixth each have 3.33 times the mean, seven with a seventh 2.86 times."""
    scales = choose_scales(attention_with_outliers(7, 6), ATTENDED, MsPoeSection())
    torch.testing.assert_close(scales, torch.tensor([[1.8, 1.2]]))


def test_padding_is_no_part_of_the_mean() -> None:
    """Of ten keys, four with a quarter have 2.5 times the mean; of twenty they would have 5 times."""
    attended = torch.arange(20)[None] >= 10
    attention = torch.zeros(1, 2, 1, 20)
    attention[0, 0, 0, 10:14] = 1 / 4
    attention[0, 1, 0, 10:13] = 1 / 3
    torch.testing.assert_close(choose_scales(attention, attended, MsPoeSection()), torch.tensor([[1.8, 1.2]]))


def test_equal_scores_keep_the_order_of_heads() -> None:
    torch.testing.assert_close(
        choose_scales(attention_with_outliers(3, 3, 3), ATTENDED, MsPoeSection()), torch.tensor([[1.2, 1.5, 1.8]])
    )


# --- the rotation

PARAMS = SamplingParams(0.0, 1.0, 8, stop_ids=(2,))


def ms_poe_with(**settings: Any) -> InferenceSection:
    return InferenceSection.model_validate({"method": "ms_poe", "ms_poe": settings})


def answers(engine: HfEngine, prompts: list[Any]) -> list[list[int]]:
    results: list[Any] = asyncio.run(engine.generate(prompts, PARAMS, [0] * len(prompts)))
    return [result.token_ids.tolist() for result in results]


@pytest.fixture
def tiny(tiny_model_path: str) -> ModelSection:
    return ModelSection(path=tiny_model_path, dtype="float32")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_equal_scales_are_the_scale_of_all_layers(tiny: ModelSection, attention: str) -> None:
    model = tiny.model_copy(update={"attention": attention})
    prompts = draw_tokens((30, 11, 24), seed=2)
    everywhere = hf_engine(model.model_copy(update={"rope_scales": (1.5,)}))
    heads = hf_engine(model, ms_poe_with(smallest=1.5, largest=1.5, first_layer=0))
    assert answers(heads, prompts) == answers(everywhere, prompts)
    assert answers(heads, prompts) != answers(hf_engine(model), prompts)


def test_layers_before_the_first_stay_as_they_are(tiny: ModelSection) -> None:
    prompts = draw_tokens((30, 11), seed=2)
    second_layer = hf_engine(tiny.model_copy(update={"rope_scales": (1.0, 1.5)}))
    heads = hf_engine(tiny, ms_poe_with(smallest=1.5, largest=1.5, first_layer=1))
    assert answers(heads, prompts) == answers(second_layer, prompts)


def test_rows_of_a_batch_do_not_depend_on_each_other(tiny: ModelSection) -> None:
    engine = hf_engine(tiny, ms_poe_with(first_layer=0))
    prompts = draw_tokens((30, 11, 24, 60), seed=3)
    assert answers(engine, prompts) == [answers(engine, [prompt])[0] for prompt in prompts]


def test_queries_and_keys_of_every_layer_and_head_against_a_rotation_that_is_written_out(tiny: ModelSection) -> None:
    lm: Any = load_model(tiny)
    state = apply_ms_poe(lm, MsPoeSection(first_layer=0), "m")
    state.begin(torch.ones_like(IDS_BL))
    kernel, rotated, plain = state.kernel, [], []

    def record_rotated(module: Any, query: Tensor, key: Tensor, *args: Any, **settings: Any) -> tuple[Tensor, Any]:
        rotated.append((query[0], key[0]))
        return kernel(module, query, key, *args, **settings)  # type: ignore[no-any-return]

    def record_plain(module: Any, args: Any, kwargs: dict[str, Tensor]) -> None:
        states = kwargs["hidden_states"][0]
        # (heads, L, D) each
        plain.append(
            [project(states).unflatten(1, (-1, 8)).swapaxes(0, 1) for project in (module.q_proj, module.k_proj)]
        )

    state.kernel = record_rotated
    for layer in lm.model.layers:
        layer.self_attn.register_forward_pre_hook(record_plain, with_kwargs=True)
    with torch.no_grad():
        lm(IDS_BL)
    assert len(rotated) == len(plain) == 2
    for index in range(2):
        scales = state.scales[index][0].tolist()
        assert len(set(scales)) == 2  # two groups of two heads each
        for states, exact_states in zip(rotated[index], plain[index], strict=True):
            heads = len(states)
            for head in range(heads):
                exact = rotate_by_hand(exact_states[head], scales[head * 2 // heads])
                assert head_errors(states[head], exact) < 1e-6


def test_each_group_of_heads_is_rotated_by_its_own_scale(tiny: ModelSection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer of a forward pass, from its input on, head by head in float64."""
    lm: Any = load_model(tiny)
    state = apply_ms_poe(lm, MsPoeSection(first_layer=0), "m")
    state.begin(torch.ones_like(IDS_BL))
    layer = lm.model.layers[1].self_attn
    inputs, outputs = [], []

    def record(module: Any, args: Any, kwargs: dict[str, Tensor], output: tuple[Tensor, Any]) -> None:
        inputs.append(kwargs["hidden_states"])
        outputs.append(output[0])

    layer.register_forward_hook(record, with_kwargs=True)
    with torch.no_grad():
        lm(IDS_BL)
    scales = state.scales[1][0].tolist()
    assert len(set(scales)) == 2  # two groups of two heads each
    states, length = inputs[0][0].double(), IDS_BL.shape[1]
    layer = layer.double()
    query, key, value = (project(states) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    mixed = []
    for head in range(4):
        own, group = slice(head * 8, head * 8 + 8), slice(head // 2 * 8, head // 2 * 8 + 8)
        scale = scales[head // 2]
        scores = rotate_by_hand(query[:, own], scale) @ rotate_by_hand(key[:, group], scale).T / 8**0.5
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mixed.append(scores.masked_fill(~causal, float("-inf")).softmax(-1) @ value[:, group])
    expected = layer.o_proj(torch.cat(mixed, dim=1))
    torch.testing.assert_close(outputs[0][0].double(), expected, rtol=0, atol=2e-5)


def test_scales_are_chosen_by_the_last_token_with_unrotated_states(
    tiny: ModelSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention that the choice is made by, against products of the projections without positions."""
    seen = []

    def choose(attention_BGNS: Tensor, attended_BS: Tensor, settings: MsPoeSection) -> Tensor:
        seen.append(attention_BGNS)
        return choose_scales(attention_BGNS, attended_BS, settings)

    monkeypatch.setattr(ms_poe, "choose_scales", choose)
    lm: Any = load_model(tiny)
    apply_ms_poe(lm, MsPoeSection(first_layer=0), "m").begin(torch.ones_like(IDS_BL))
    layer = lm.model.layers[0].self_attn
    inputs = []
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(kwargs["hidden_states"][0]), with_kwargs=True
    )
    with torch.no_grad():
        lm(IDS_BL)
        query, key = layer.q_proj(inputs[0][-1]), layer.k_proj(inputs[0])
    for head in range(4):
        scores = key[:, head // 2 * 8 : head // 2 * 8 + 8] @ query[head * 8 : head * 8 + 8] / 8**0.5
        torch.testing.assert_close(seen[0][0, head // 2, head % 2], scores.softmax(0), rtol=0, atol=1e-5)


# --- errors


@pytest.mark.parametrize(
    "config",
    [
        lambda: Gemma3TextConfig(
            **SMALL, **HEADS, head_dim=8, layer_types=["sliding_attention", "full_attention"], pad_token_id=0
        ),
        lambda: LlamaConfig(
            **SMALL,
            **HEADS,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 512,
            },
        ),
        lambda: GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4),
    ],
)
def test_apply_ms_poe_rejects_other_position_encodings(config: Callable[[], Any]) -> None:
    with pytest.raises(
        UserError, match=r"^m: Ms-PoE needs plain RoPE \(default, .*\), the same in all layers, which \w+ does not have"
    ):
        apply_ms_poe(build_model(config()), MsPoeSection(), "m")
