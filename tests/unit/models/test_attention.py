import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.attention import PACKED, packed_sdpa, packed_varlen, register_kernels
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import collate
from pos2distill.sampling.engines.protocol import SamplingParams
from tests.support.engines import hf_engine


def test_register_kernels_adds_every_packed_implementation_once() -> None:
    register_kernels()
    registered = {name: ALL_ATTENTION_FUNCTIONS[name] for name in PACKED.values()}
    register_kernels()
    assert registered["packed_varlen"] is packed_varlen
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in PACKED.values()} == registered


def test_packed_kernels_require_packed_rows(tiny_model_path: str) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)
    with pytest.raises(
        UserError, match=r"^LlamaAttention received no packed_rows from its model, .* cannot be trained"
    ):
        lm(torch.tensor([[11, 12, 13]]))


def test_packed_varlen_rejects_attention_sinks() -> None:
    """Of a model that transformers has not marked, which `load_model` would have rejected."""
    packed = collate([np.asarray([11, 12, 13])], [np.asarray([14, 15])]).packed
    states = torch.zeros(1, 2, sum(packed.query_lengths), 8)
    with pytest.raises(UserError, match=r"^Linear has attention sinks, which flash-attn 2 does not support; set model"):
        packed_varlen(torch.nn.Linear(1, 1), states, states, states, None, packed_rows=packed, s_aux=torch.zeros(2))


def test_packed_sdpa_masks_only_rows_that_share_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask, torch's kernels leave out the keys that no query sees."""
    documents = np.arange(30)
    prompts = [documents, np.concatenate([documents[:10], [50] * 20]), np.concatenate([documents[:20], [60] * 20])]
    packed = collate(prompts, [np.asarray([40, 41])] * 3, group_ids=[0] * 3).packed
    assert (packed.shared_lengths, packed.query_lengths) == ((0, 10, 20), (32, 22, 22))
    calls = []

    def record(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, **settings: Any) -> Tensor:
        calls.append((query.shape[2], key.shape[2], attn_mask is not None, settings["is_causal"]))
        return torch.zeros_like(query)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    states = torch.zeros(1, 2, 32 + 22 + 22, 8)
    output, _ = packed_sdpa(torch.nn.Linear(1, 1), states, states, states, None, packed_rows=packed)
    assert calls == [(32, 32, False, True), (32, 32, False, True), (22, 42, True, False)]
    assert output.shape == (1, 76, 2, 8)


@pytest.fixture
def cudnn_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each call of torch's attention, whether it might have chosen cuDNN's kernel. The flag is put back."""
    allowed = []
    original = F.scaled_dot_product_attention

    def record(*arguments: Any, **settings: Any) -> Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return original(*arguments, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield allowed
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_packed_rows_never_use_cudnn(tiny_model_path: str, cudnn_allowed: list[bool]) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32", attention="sdpa"), packed=True)
    response_hidden_states(lm, collate([np.asarray([11, 12, 13])] * 2, [np.asarray([14, 15]), np.asarray([16])]))
    assert cudnn_allowed == [False] * 2 * lm.config.num_hidden_layers


def test_generation_by_transformers_never_uses_cudnn(tiny_model_path: str, cudnn_allowed: list[bool]) -> None:
    engine = hf_engine(ModelSection(path=tiny_model_path, dtype="float32", engine="hf", attention="sdpa"))
    params = SamplingParams(0.0, 1.0, 3, (299,))
    asyncio.run(engine.generate([np.asarray([11, 12, 13], np.int32)], params, [0]))
    assert cudnn_allowed == [False] * 3 * engine.model.config.num_hidden_layers
