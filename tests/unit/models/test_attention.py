import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.attention import PACKED, packed_varlen, register_kernels
from pos2distill.models.load import load_model
from pos2distill.models.packing import collate


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


def test_packed_varlen_refuses_attention_sinks() -> None:
    """Of a model that transformers has not marked, which `load_model` would have refused."""
    packed = collate([np.asarray([11, 12, 13])], [np.asarray([14, 15])]).packed
    states = torch.zeros(1, 2, sum(packed.query_lengths), 8)
    with pytest.raises(UserError, match=r"^Linear has attention sinks, which flash-attn 2 does not support; set model"):
        packed_varlen(torch.nn.Linear(1, 1), states, states, states, None, packed_rows=packed, s_aux=torch.zeros(2))


def test_loaded_models_never_use_cudnn(tiny_model_path: str) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_model(ModelSection(path=tiny_model_path, dtype="float32"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
