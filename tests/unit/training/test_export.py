"""Dtypes, names and end tokens of an exported model are those of the initial one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pos2distill.config import ModelSection, Recipe
from pos2distill.models.files import copy_other_configs
from pos2distill.models.load import load_model
from pos2distill.training.strategies.torch import TorchStrategy
from scripts.model_families import save_tiny
from tests.support.experts import KEPT, mixture_in_bfloat16, tensors_of


def export(make_recipe: Callable[..., Recipe], model: ModelSection, folder: Path, **training: Any) -> None:
    """Write the model as it is before the first step."""
    recipe = make_recipe(model=model.model_dump(), method={"name": "seqkd"}, training=training)
    strategy = TorchStrategy(recipe.study, recipe.runtime.trainers, torch.device("cpu"), recipe.study.model)
    assert strategy.save(folder) == 0.0
    copy_other_configs(model, folder)


def test_exported_model_stops_where_the_initial_one_does(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """Also if config.json alone names the end token, which an empty generation_config.json would hide."""
    model = save_tiny("llama", tmp_path / "initial", eos_token_id=2)
    (tmp_path / "initial" / "generation_config.json").unlink()
    export(make_recipe, model, tmp_path / "exported")
    for name in ("initial", "exported"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.generation_config.eos_token_id == 2


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_exported_model_holds_tied_weights_once(
    make_recipe: Callable[..., Recipe], tmp_path: Path, family: str
) -> None:
    model = save_tiny(family, tmp_path / "initial").model_copy(update={"dtype": "bfloat16"})
    export(make_recipe, model, tmp_path / "exported", precision="bfloat16")
    initial, exported = tensors_of(tmp_path / "initial"), tensors_of(tmp_path / "exported")
    assert "lm_head.weight" not in initial
    assert exported.keys() == initial.keys()
    assert all(torch.equal(exported[name], weight.bfloat16()) for name, weight in initial.items())


@pytest.mark.parametrize("lora", [None, {"targets": ["o_proj"]}], ids=["all", "lora"])
@pytest.mark.parametrize("family", sorted(KEPT))
def test_torch_strategy_exports_the_dtypes_of_the_initial_model(
    make_recipe: Callable[..., Recipe], tmp_path: Path, family: str, lora: dict[str, Any] | None
) -> None:
    """In bfloat16, corrections of routers that differ in their third digit would be equal."""
    model = mixture_in_bfloat16(family, tmp_path / "initial")
    export(make_recipe, model, tmp_path / "exported", precision="bfloat16", lora=lora)
    initial, exported = tensors_of(tmp_path / "initial"), tensors_of(tmp_path / "exported")
    assert KEPT[family] == {name for name, weight in exported.items() if weight.dtype == torch.float32}
    for name, weight in initial.items():
        assert exported[name].dtype == weight.dtype
        assert torch.equal(exported[name], weight), name
    again = load_model(model.model_copy(update={"path": str(tmp_path / "exported")})).state_dict()
    for name, weight in load_model(model).state_dict().items():
        assert torch.equal(again[name], weight), name
