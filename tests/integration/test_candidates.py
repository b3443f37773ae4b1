"""Several responses to a prompt, of which one is stored (SeaLong). The tiny model, in this process."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from pipelines.commands import run_distill, run_sample
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.models.load import load_tokenizer
from pos2distill.randomness import derive_seed
from pos2distill.sampling.consensus import most_consistent
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.engines.protocol import Completion, SamplingParams
from pos2distill.tasks.metrics import first_line
from tests.support.results import counts_of, sample_store, training_ids

pytestmark = pytest.mark.xdist_group("compute")


def test_run_sample_stores_the_most_consistent_of_several_responses(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(
        method={"name": "seqkd", "advantageous_slot": "random"},
        sampling={"candidates": 5, "temperature": 1.0, "max_new_tokens": 6},
        runtime={"executor": "local"},
    )
    run_sample(recipe)
    ids = training_ids(recipe)
    store = sample_store(recipe)
    counts = counts_of(recipe, "sample")
    # One sample of each example, however many responses were drawn.
    assert counts["sampled"] == counts["kept"] + counts["empty"]
    index = store.index(ids)
    samples = store.load(index, ids, np.flatnonzero(index.stored)).to_pylist()
    assert len(samples) == len({sample["example_id"] for sample in samples}) == counts["sampled"]
    engine, tokenizer = HfEngine(recipe.study.model), load_tokenizer(recipe.study.model)
    params = SamplingParams(1.0, 1.0, 6, (4,))
    chosen = []
    for sample in samples:
        seeds = [sample["seed"], *(derive_seed(sample["seed"], "candidate", number) for number in range(1, 5))]
        prompt = np.asarray(sample["prompt_ids"], np.int32)
        results = asyncio.run(engine.generate([prompt] * 5, params, seeds))
        ids_of = [result.token_ids.tolist() for result in results if isinstance(result, Completion)]
        texts = [first_line(str(tokenizer.decode(each, skip_special_tokens=True))) for each in ids_of]
        chosen.append(most_consistent(texts))
        assert sample["sampled_ids"] == ids_of[chosen[-1]]
    assert any(chosen)  # not always the first, so the choice matters
    run_distill(recipe)
    assert make_plan(recipe).distill.artifact.manifest() is not None
