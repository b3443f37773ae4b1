"""The published baselines SeaLong and LongFaith-SFT, from samples to the checkpoint. In this process."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.models.load import load_tokenizer
from pos2distill.randomness import derive_seed
from pos2distill.sampling.consensus import most_consistent
from pos2distill.sampling.engines.protocol import Completion, SamplingParams
from pos2distill.tasks.metrics import first_line
from tests.support.commands import run_distill, run_sample
from tests.support.engines import hf_engine
from tests.support.results import counts_of, read_steps, sample_store, training_ids
from tests.support.tiny import write_examples

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
    samples = store.load(index, np.flatnonzero(index.stored)).to_pylist()
    assert len(samples) == len({sample["example_id"] for sample in samples}) == counts["sampled"]
    engine, tokenizer = hf_engine(recipe.study.model), load_tokenizer(recipe.study.model)
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


def test_longfaith_trains_on_the_chains_with_a_right_answer(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """The fake engine repeats the last 25 tokens of its prompt, so the end of the question is the response."""
    questions = []
    rows = write_examples(tmp_path / "data.jsonl", 40, 6).read_text().splitlines()
    for number, row in enumerate(map(json.loads, rows)):
        answer = row["answers"][0] if number % 2 else "unknown"
        questions.append(json.dumps({**row, "question": f"{row['id']}? [1] The answer is: {answer}"}))
    (tmp_path / "data.jsonl").write_text("\n".join(questions) + "\n")
    recipe = make_recipe(
        model={"engine": "fake"},
        data={"prompt": "coc", "metric": "em", "documents": 2},
        method={"name": "seqkd", "k": 1},
        sampling={"keep": "correct", "max_new_tokens": 30},
        runtime={"executor": "local", "fake": {"reply_tokens": 25}},
    )
    run_sample(recipe)
    run_distill(recipe)
    ids = training_ids(recipe)
    store = sample_store(recipe)
    index = store.index(ids)
    samples = store.load(index, np.flatnonzero(index.stored)).to_pylist()
    tokenizer = load_tokenizer(recipe.study.model)
    prompts = [tokenizer.decode(sample["prompt_ids"]) for sample in samples]
    assert prompts
    assert all("name the document that supports it" in prompt for prompt in prompts)
    trained_on = {example for step in read_steps(recipe) for example in step["examples"]}
    right = {sample["example_id"] for sample, prompt in zip(samples, prompts, strict=True) if "unknown" not in prompt}
    assert trained_on == right
    assert 0 < len(right) < len(samples)
