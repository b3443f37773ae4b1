"""The search of RoPE scales, on a tiny model and a handful of candidates."""

import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from pipelines.plan import make_plan
from pos2distill.config import Recipe
from tests.support.commands import run_evaluate

SEARCH = {"generations": 1, "population": 2, "parents": 1, "mutations": 1, "crossovers": 0, "examples": 2}


def search(recipe: Recipe) -> list[float]:
    """The scales that are found."""
    run_evaluate(recipe)
    stage = make_plan(recipe).search_scales
    assert stage is not None
    manifest = stage.artifact.manifest()
    assert manifest is not None
    scales: list[float] = manifest.details["scales"]
    return scales


def test_search_finds_a_scale_for_each_layer_of_a_model_that_was_replaced_in_this_process(
    make_recipe: Callable[..., Recipe], tiny_model_path: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    recipe = make_recipe(
        model={"path": str(folder)},
        evaluation={"other_documents": []},
        inference={"method": "lpes", "search": SEARCH},
        runtime={"executor": "local"},
    )
    assert len(search(recipe)) == 2
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 3
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    assert len(search(recipe)) == 3
