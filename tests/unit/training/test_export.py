"""The dtypes of an exported model are those of the initial one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pos2distill.config import Recipe
from pos2distill.models.load import load_model
from pos2distill.training.strategies.torch import TorchStrategy
from tests.support.experts import KEPT, mixture_in_bfloat16, tensors_of


@pytest.mark.parametrize("lora", [None, {"targets": ["o_proj"]}], ids=["all", "lora"])
@pytest.mark.parametrize("family", sorted(KEPT))
def test_torch_strategy_exports_the_dtypes_of_the_initial_model(
    make_recipe: Callable[..., Recipe], tmp_path: Path, family: str, lora: dict[str, Any] | None
) -> None:
    """In bfloat16, corrections of routers that differ in their third digit would be equal."""
    model = mixture_in_bfloat16(family, tmp_path / "initial")
    training = {"precision": "bfloat16", "lora": lora}
    recipe = make_recipe(model=model.model_dump(), method={"name": "seqkd"}, training=training)
    strategy = TorchStrategy(recipe.study, recipe.runtime.trainers, torch.device("cpu"), recipe.study.model)
    assert strategy.save(tmp_path / "exported") == 0.0
    initial, exported = tensors_of(tmp_path / "initial"), tensors_of(tmp_path / "exported")
    assert KEPT[family] == {name for name, weight in exported.items() if weight.dtype == torch.float32}
    for name, weight in initial.items():
        assert exported[name].dtype == weight.dtype
        assert torch.equal(exported[name], weight), name
    again = load_model(model.model_copy(update={"path": str(tmp_path / "exported")})).state_dict()
    for name, weight in load_model(model).state_dict().items():
        assert torch.equal(again[name], weight), name
