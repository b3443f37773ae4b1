"""RoPE scales by layer against rotations that are written out, on random models of several families."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Cohere2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.llama import modeling_llama

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import collate
from pos2distill.models.rope.curves import CONFIG_KEY
from pos2distill.models.rope.layer_scales import resolve_scales, scale_layers
from tests.support.models import HEADS, SMALL, build_model, draw_tokens
from tests.support.rope import head_errors, rotate_by_hand

SCALES = (1.0, 1.5)
IDS_BL = torch.tensor([draw_tokens((40,), seed=1)[0].tolist()])


def scaled(model: ModelSection, scales: tuple[float, ...], **settings: Any) -> Any:
    return load_model(model.model_copy(update={"rope_scales": scales}), **settings)


@pytest.fixture
def tiny(tiny_model_path: str) -> ModelSection:
    return ModelSection(path=tiny_model_path, dtype="float32")


@contextmanager
def recorded_rotations(monkeypatch: pytest.MonkeyPatch, modeling: ModuleType) -> Iterator[list[tuple[Tensor, ...]]]:
    """Collect (q, k) before and after the rotation of every layer, in order."""
    rotate, calls = modeling.apply_rotary_pos_emb, []

    def record(query: Tensor, key: Tensor, *arguments: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        rotated = rotate(query, key, *arguments, **settings)
        calls.append((query, key, *rotated))
        return rotated

    with monkeypatch.context() as patch:
        patch.setattr(modeling, "apply_rotary_pos_emb", record)
        yield calls


def test_scaled_layers_rotate_each_head_by_its_own_scale(tiny: ModelSection, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = scaled(tiny, SCALES)
    with recorded_rotations(monkeypatch, modeling_llama) as calls, torch.no_grad():
        lm(IDS_BL)
    assert len(calls) == len(SCALES)
    for scale, (query, key, rotated_query, rotated_key) in zip(SCALES, calls, strict=True):
        assert head_errors(rotated_query, rotate_by_hand(query, scale)).max() < 1e-6
        assert head_errors(rotated_key, rotate_by_hand(key, scale)).max() < 1e-6


def test_scale_1_is_bit_identical_to_the_plain_model(tiny: ModelSection) -> None:
    with torch.no_grad():
        plain = load_model(tiny)(IDS_BL).logits
        same = scaled(tiny, (1.0,))(IDS_BL).logits
        other = scaled(tiny, (1.0, 1.5))(IDS_BL).logits
    assert torch.equal(plain, same)
    assert not torch.allclose(plain, other)


def test_uniform_scale_equals_linear_interpolation_of_transformers(tiny: ModelSection) -> None:
    lm: Any = load_model(tiny)
    lm.config.rope_parameters = {**lm.config.rope_parameters, "rope_type": "linear", "factor": 1.5}
    linear = type(lm)(lm.config).eval()
    linear.load_state_dict(lm.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(scaled(tiny, (1.5,))(IDS_BL).logits, linear(IDS_BL).logits, rtol=0, atol=1e-5)


FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, **HEADS),
    "mistral": MistralConfig(**SMALL, **HEADS, sliding_window=16),
    "qwen2": Qwen2Config(**SMALL, **HEADS),
    "qwen3": Qwen3Config(**SMALL, **HEADS, head_dim=8),
    "gemma3": Gemma3TextConfig(**SMALL, **HEADS, head_dim=8, layer_types=["sliding_attention", "full_attention"]),
    "phi3": Phi3Config(**SMALL, **HEADS, pad_token_id=0),
    "olmo2": Olmo2Config(**SMALL, **HEADS),
    "smollm3": SmolLM3Config(**SMALL, **HEADS, no_rope_layers=[1, 1], pad_token_id=0),
    # Its layers of full attention have no positions at all.
    "cohere2": Cohere2Config(**SMALL, **HEADS, layer_types=["sliding_attention"] * 2, pad_token_id=0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_model_uses_the_scale_of_each_layer(family: str) -> None:
    """Scale 1 changes no bit; a scale of either layer changes the logits; so does the order of two scales."""
    logits = {}
    for scales in ((), (1.0, 1.0), (2.0, 1.0), (1.0, 2.0)):
        lm = build_model(FAMILIES[family])
        if scales:
            scale_layers(lm, scales, family)
        with torch.no_grad():
            logits[scales] = lm(IDS_BL).logits
    assert torch.equal(logits[()], logits[1.0, 1.0])
    different = [logits[()], logits[2.0, 1.0], logits[1.0, 2.0]]
    for index, one in enumerate(different):
        assert not any(torch.allclose(one, other, atol=1e-4) for other in different[index + 1 :])


@pytest.mark.parametrize(("scales", "count"), [((1.5, 1.5), 1), ((1.0, 1.0), 1), ((1.5, 1.2), 2)])
def test_scaled_layers_of_equal_scale_share_one_rotation(
    tiny: ModelSection, scales: tuple[float, ...], count: int
) -> None:
    lm = scaled(tiny, scales)
    cos_NBLD, sin_NBLD = lm.model.rotary_emb(torch.zeros(1, 7, 32), torch.arange(7)[None])
    assert len(cos_NBLD) == len(sin_NBLD) == count


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scaled_packed_rows_equal_rows_one_by_one(tiny: ModelSection, attention: str) -> None:
    model = tiny.model_copy(update={"attention": attention})
    prompts, responses = draw_tokens((30, 17, 23), seed=2), draw_tokens((5, 3, 8), seed=3)
    packed = scaled(model, SCALES, packed=True)
    with torch.no_grad():
        together = response_hidden_states(packed, collate(prompts, responses))
        rows = zip(prompts, responses, strict=True)
        alone = torch.cat([response_hidden_states(packed, collate([prompt], [response])) for prompt, response in rows])
        lm = scaled(model, SCALES)
        ids = torch.tensor([[*prompts[0].tolist(), *responses[0].tolist()]])
        reference = lm.model(ids).last_hidden_state[0, len(prompts[0]) - 1 : -1]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(together[: len(responses[0])], reference, rtol=0, atol=1e-5)


def test_scaled_gradient_is_the_same_with_checkpointing_and_two_batches_at_once(tiny: ModelSection) -> None:
    """Checkpoints compute a layer again during the backward pass, after the forward pass of another batch."""
    gradients = []
    for checkpointing in (False, True):
        lm = scaled(tiny, SCALES).train()
        if checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        loss = sum(lm(ids).logits.logsumexp(-1).sum() for ids in (IDS_BL, IDS_BL[:, :9]))
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in lm.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_scaled_generation_equals_forward_passes_without_a_cache(tiny: ModelSection) -> None:
    lm = scaled(tiny, SCALES)
    generated = lm.generate(IDS_BL, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = IDS_BL
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, lm(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert generated.tolist() == ids.tolist()


def test_saved_model_carries_its_scales(tiny: ModelSection, copy_model: Callable[..., ModelSection]) -> None:
    lm = scaled(tiny, SCALES)
    copied = copy_model()
    lm.save_pretrained(copied.path)
    assert json.loads((Path(copied.path) / "config.json").read_text())[CONFIG_KEY] == list(SCALES)
    with torch.no_grad():
        assert torch.equal(load_model(copied)(IDS_BL).logits, lm(IDS_BL).logits)
        # The setting replaces the stored scales.
        assert torch.equal(scaled(copied, (1.0,))(IDS_BL).logits, load_model(tiny)(IDS_BL).logits)


# --- errors


def test_resolve_scales_rejects_another_number_of_layers() -> None:
    config = LlamaConfig(**SMALL, **HEADS)
    assert resolve_scales((), config, "m") == ()
    assert resolve_scales((2.0,), config, "m") == (2.0, 2.0)
    with pytest.raises(UserError, match=r"^inference.scales: 3 scales, but m has 2 layers; give one for each$"):
        resolve_scales((1.0, 1.0, 1.0), config, "m")


@pytest.mark.parametrize("stored", ["x", [1.0], [1.0, 0], [1.0, None]])
def test_resolve_scales_rejects_a_wrong_config(stored: object) -> None:
    config = LlamaConfig(**SMALL, **HEADS)
    setattr(config, CONFIG_KEY, stored)
    with pytest.raises(UserError, match=rf"^m/config.json: {CONFIG_KEY}: expected a list of 2 positive numbers$"):
        resolve_scales((), config, "m")


def test_scale_layers_rejects_rope_that_depends_on_the_prompt() -> None:
    settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    lm = build_model(LlamaConfig(**SMALL, **HEADS, rope_parameters=settings))
    with pytest.raises(UserError, match=r"^m: RoPE of type 'dynamic' depends on the longest prompt and cannot be"):
        scale_layers(lm, SCALES, "m")


def test_scale_layers_rejects_a_model_without_rope() -> None:
    from transformers import GPT2Config

    lm = build_model(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(UserError, match=r"^m: GPT2LMHeadModel has no rotary embedding that all its layers share$"):
        scale_layers(lm, SCALES, "m")
