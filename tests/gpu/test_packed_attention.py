"""Packed rows, by flash-attn and by torch's kernels, against plain attention in fp32."""

import importlib.util
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from pos2distill.config import ModelSection
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import ResponseBatch, collate
from tests.support.models import HEADS, SMALL, draw_tokens

needs_flash = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="no flash-attn here")
KERNELS = [pytest.param("flash_attention_2", marks=needs_flash), "sdpa"]


@pytest.fixture(params=["llama", "window"])
def model_path(request: pytest.FixtureRequest, tiny_model_path: str, tmp_path: Path) -> str:
    """The tiny model, and one whose layers look back 64 tokens only."""
    if request.param == "llama":
        return tiny_model_path
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**SMALL, **HEADS, sliding_window=64)).save_pretrained(tmp_path)
    return str(tmp_path)


def states_and_gradient(
    path: str, attention: str, dtype: torch.dtype, batch: ResponseBatch, *, packed: bool = True
) -> tuple[Tensor, Tensor]:
    """The states that predict the responses, and the gradient of their weighted sum by the embeddings; both fp32."""
    model = ModelSection(path=path, dtype="float32", attention=attention)
    lm = load_model(model, dtype=dtype, device="cuda", packed=packed)
    hidden_TH = response_hidden_states(lm, batch.to("cuda")).float()
    weight_TH = torch.randn(hidden_TH.shape, generator=torch.Generator().manual_seed(3)).to("cuda")
    (hidden_TH * weight_TH).sum().backward()
    gradient = lm.get_input_embeddings().weight.grad
    assert isinstance(gradient, Tensor)
    return hidden_TH.detach(), gradient.float()


@pytest.mark.parametrize("attention", KERNELS)
def test_packed_kernels_in_bfloat16_err_at_most_twice_as_much_as_plain_attention(
    tiny_model_path: str, attention: str
) -> None:
    batch = collate(draw_tokens((300, 41, 170), 0), draw_tokens((30, 20, 9), 1))
    exact = states_and_gradient(tiny_model_path, "eager", torch.float32, batch, packed=False)
    plain = states_and_gradient(tiny_model_path, "eager", torch.bfloat16, batch, packed=False)
    ours = states_and_gradient(tiny_model_path, attention, torch.bfloat16, batch)
    for own, reference, truth in zip(ours, plain, exact, strict=True):
        assert 0 < (own - truth).norm() <= 2 * (reference - truth).norm()


def test_packed_sdpa_in_float32_equals_plain_attention(tiny_model_path: str) -> None:
    batch = collate(draw_tokens((300, 41, 170), 0), draw_tokens((30, 20, 9), 1))
    exact = states_and_gradient(tiny_model_path, "eager", torch.float32, batch, packed=False)
    ours = states_and_gradient(tiny_model_path, "sdpa", torch.float32, batch)
    for own, truth in zip(ours, exact, strict=True):
        assert (own - truth).norm() < 1e-5 * truth.norm()


@pytest.mark.parametrize("attention", KERNELS)
def test_packed_kernels_with_shared_prefixes_err_at_most_twice_as_much(model_path: str, attention: str) -> None:
    (documents,) = draw_tokens((300,), 0)
    cuts, endings = (0, 120, 290, 200), draw_tokens((60, 50, 40, 30), 1)
    prompts = [np.concatenate([documents[:cut], own]) for cut, own in zip(cuts, endings, strict=True)]
    responses = draw_tokens((14, 9, 5, 7), 2)
    together = collate(prompts, responses, group_ids=[0] * 4)
    assert together.packed.shared_lengths == (0, 0, 120, 200)
    exact = states_and_gradient(model_path, "eager", torch.float32, collate(prompts, responses))
    apart = states_and_gradient(model_path, attention, torch.bfloat16, collate(prompts, responses))
    ours = states_and_gradient(model_path, attention, torch.bfloat16, together)
    for own, reference, truth in zip(ours, apart, exact, strict=True):
        assert 0 < (own - truth).norm() <= 2 * (reference - truth).norm()


@pytest.mark.parametrize("attention", KERNELS)
def test_packed_kernels_keep_rows_apart(tiny_model_path: str, attention: str) -> None:
    """A row of the same length with other tokens leaves its neighbors' states exactly as they are."""
    prompts, responses = draw_tokens((200, 130, 77), 0), draw_tokens((14, 9, 5), 1)
    (other,) = draw_tokens((130,), 2)
    before, _ = states_and_gradient(tiny_model_path, attention, torch.bfloat16, collate(prompts, responses))
    changed = collate([prompts[0], other, prompts[2]], responses)
    after, _ = states_and_gradient(tiny_model_path, attention, torch.bfloat16, changed)
    assert torch.equal(after[:14], before[:14])
    assert torch.equal(after[23:], before[23:])
    assert not torch.equal(after[14:23], before[14:23])


@pytest.mark.parametrize("attention", KERNELS)
def test_packed_kernels_give_a_row_alone_the_same_states(tiny_model_path: str, attention: str) -> None:
    """Within the rounding of bfloat16: products of other shapes are summed in another order."""
    prompts, responses = draw_tokens((200, 130, 77), 0), draw_tokens((14, 9, 5), 1)
    together, _ = states_and_gradient(tiny_model_path, attention, torch.bfloat16, collate(prompts, responses))
    alone, _ = states_and_gradient(tiny_model_path, attention, torch.bfloat16, collate(prompts[1:2], responses[1:2]))
    assert (together[14:23] - alone).norm() < 0.02 * alone.norm()


def test_rows_of_new_lengths_take_little_longer_than_known_ones(tiny_model_path: str) -> None:
    """A kernel that prepared itself for each length would take a hundred times as long the first time."""
    lm = load_model(ModelSection(path=tiny_model_path, dtype="bfloat16", attention="sdpa"), device="cuda", packed=True)

    def seconds(lengths: range) -> float:
        prompts, responses = draw_tokens(tuple(lengths), 0), draw_tokens((9,) * len(lengths), 1)
        batch = collate(prompts, responses).to("cuda")
        torch.cuda.synchronize()
        start = time.monotonic()
        response_hidden_states(lm, batch).float().sum().backward()
        torch.cuda.synchronize()
        return time.monotonic() - start

    seconds(range(100, 140))  # loads the kernels
    assert seconds(range(200, 240)) < 5 * seconds(range(200, 240)) + 0.1
