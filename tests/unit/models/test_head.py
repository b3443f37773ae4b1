import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.head import FrozenHead, LogitTransform
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import collate

PROMPT, RESPONSE = torch.arange(10, 22).numpy(), torch.arange(30, 35).numpy()


def save_llama(folder: Path, **config: Any) -> ModelSection:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **config)).save_pretrained(folder)
    return ModelSection(path=str(folder), dtype="float32")


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_head_logits_equal_the_models_own(tmp_path: Path, tied: bool) -> None:
    model = save_llama(tmp_path, tie_word_embeddings=tied)
    lm = load_model(model)
    head = FrozenHead.from_checkpoint(model, torch.float32)
    with torch.no_grad():
        own_LV = lm(torch.tensor([[*PROMPT, *RESPONSE]])).logits[0]
        ours_TV = head(response_hidden_states(lm, collate([PROMPT], [RESPONSE])))
    torch.testing.assert_close(ours_TV, own_LV[len(PROMPT) - 1 : -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_head_does_not_change_with_the_students_head(tmp_path: Path, tied: bool) -> None:
    model = save_llama(tmp_path, tie_word_embeddings=tied)
    head, lm = FrozenHead.from_checkpoint(model, torch.float32), load_model(model)
    before = head(torch.ones(1, 16))
    with torch.no_grad():
        lm.get_output_embeddings().weight.add_(1.0)
    assert torch.equal(head(torch.ones(1, 16)), before)
    assert list(head.parameters()) == []  # nothing to train


def test_frozen_head_reads_a_sharded_checkpoint_and_a_bias(tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weights["lm_head.bias"] = torch.arange(64.0)
    head_names = {"lm_head.weight", "lm_head.bias"}
    files = {"a.safetensors": weights.keys() - head_names, "b.safetensors": head_names}
    for file, names in files.items():
        save_file({name: weights[name] for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    head = FrozenHead.from_checkpoint(model, torch.float32)
    hidden_TH = torch.randn(3, 16)
    expected = hidden_TH @ weights["lm_head.weight"].T + weights["lm_head.bias"]
    torch.testing.assert_close(head(hidden_TH), expected, rtol=1e-5, atol=1e-5)


def test_frozen_head_names_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"its safetensors hold none of lm_head.weight, embed_out.weight, embed_tokens"):
        FrozenHead.from_checkpoint(model, torch.float32)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [3.0, -6.0]),
        ({"logit_scale": 0.5}, [1.5, -3.0]),  # Cohere multiplies
        ({"logits_scaling": 4.0}, [0.75, -1.5]),  # Granite divides
        ({"logits_scaling": 4.0, "model_type": "hyperclovax"}, [12.0, -24.0]),  # HyperCLOVA X multiplies
        ({"final_logit_softcapping": 2.0}, [2 * math.tanh(1.5), -2 * math.tanh(3.0)]),  # Gemma caps
        ({"logit_scale": 0.5, "final_logit_softcapping": 2.0}, [2 * math.tanh(0.75), -2 * math.tanh(1.5)]),
        ({"logit_scale": None, "final_logit_softcapping": None}, [3.0, -6.0]),
    ],
)
def test_logit_transform_by_hand(config: dict[str, Any], expected: list[float]) -> None:
    text = SimpleNamespace(**config)
    transform = LogitTransform(SimpleNamespace(get_text_config=lambda: text))
    assert transform(torch.tensor([3.0, -6.0])).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2", "hyperclovax"])
def test_frozen_head_logits_equal_those_of_scaling_architectures(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    extra = {
        "cohere": {"logit_scale": 0.25},
        "granite": {"logits_scaling": 3.0},
        "hyperclovax": {"logits_scaling": 3.0},
        "gemma2": {"final_logit_softcapping": 0.01, "head_dim": 8, "num_key_value_heads": 2},
    }[family]
    config = AutoConfig.for_model(family, vocab_size=64, **sizes, **extra, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = ModelSection(path=str(tmp_path), dtype="float32", attention="eager")
    lm = load_model(model)
    head = FrozenHead.from_checkpoint(model, torch.float32)
    with torch.no_grad():
        own_LV = lm(torch.tensor([[*PROMPT, *RESPONSE]])).logits[0]
        ours_TV = head(response_hidden_states(lm, collate([PROMPT], [RESPONSE])))
    torch.testing.assert_close(ours_TV, own_LV[len(PROMPT) - 1 : -1], rtol=0, atol=1e-5)
