"""The measurement of candidates, with an engine that has no model."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.records import EXAMPLE_SCHEMA, example_tables
from pos2distill.sampling.prompting import PromptSpec
from pos2distill.sampling.scale_search import ScaledAccuracy
from pos2distill.store.artifacts import Artifact
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.permutations import Placement


@pytest.mark.parametrize("fail_every", [0, 2])
def test_scaled_accuracy_rejects_a_failure(make_recipe: Callable[..., Recipe], tmp_path: Path, fail_every: int) -> None:
    recipe = make_recipe(model={"engine": "fake"}, runtime={"fake": {"fail_every": fail_every}})
    artifact = Artifact(str(tmp_path), "examples", "f00d")
    with artifact.writing():
        examples = load_split(recipe.study.data, documents=4, seed=0).train[:8]
        artifact.write_tables("train.parquet", EXAMPLE_SCHEMA, example_tables(examples))
        artifact.publish(counts={}, seconds={})
    spec = PromptSpec(4, {1: (Placement((0,)), Placement((3,)))})
    measure = ScaledAccuracy(recipe.study, recipe.runtime, artifact, "train.parquet", 8, spec)
    if not fail_every:
        assert len(asyncio.run(measure((1.0,)))) == 2
        return
    with pytest.raises(UserError, match=r"^example fox-\d+: the engine gave no answer \(the fake engine fails at "):
        asyncio.run(measure((1.0,)))
