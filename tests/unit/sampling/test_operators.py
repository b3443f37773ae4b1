"""The operators, without an executor."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.records import ANSWER_SCHEMA, examples_to_table
from pos2distill.sampling.engines.protocol import EngineDied, SamplingParams
from pos2distill.sampling.operators import (
    Generate,
    PromptSpec,
    build_prompts,
    store_samples,
)
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.permutations import Placement
from tests.support.stores import make_samples

SPECS = [PromptSpec(4, {1: (Placement((0,)),)})]


@pytest.fixture
def make_batch(make_recipe: Callable[..., Recipe]) -> Callable[..., tuple[Recipe, pa.Table]]:
    """`make_batch(for_training, limit, engine, **overrides)`: a recipe and prompts, of a model with that context."""

    def make(
        for_training: bool, limit: int = 512, engine: str = "fake", **overrides: object
    ) -> tuple[Recipe, pa.Table]:
        recipe = make_recipe(model={"engine": engine, "max_length": limit}, **overrides)
        examples = list(load_split(recipe.study.data, documents=4, seed=0).train[:8])
        examples[3] = replace(examples[3], question=f"Please tell: {examples[3].question}")
        return recipe, build_prompts(examples_to_table(examples), recipe.study, SPECS, 8, for_training)

    return make


def answer(recipe: Recipe, batch: pa.Table, *, for_training: bool) -> list[dict[str, object]]:
    params = SamplingParams(0.0, 1.0, 8, (4,), recipe.study.method.teacher_topk if for_training else 0)
    table = asyncio.run(Generate(recipe.study, recipe.runtime, params, for_training)(batch))
    assert table.schema == ANSWER_SCHEMA
    return table.to_pylist()


def longest(batch: pa.Table) -> int:
    return max(len(ids) for ids in batch["prompt_ids"].to_pylist())


def test_generate_records_a_prompt_that_is_too_long(
    make_batch: Callable[..., tuple[Recipe, pa.Table]],
) -> None:
    limit = longest(make_batch(True)[1]) + 7  # one token too few for the longest
    recipe, batch = make_batch(True, limit)
    rows = answer(recipe, batch, for_training=True)
    failed = [row for row in rows if row["outcome"] == "failed"]
    assert [row["outcome"] == "failed" for row in rows] == [False] * 3 + [True] + [False] * 4
    for row in failed:
        assert str(row["error"]).startswith("prompt of ")
        assert f"exceed the model's context of {limit}" in str(row["error"])
        assert (row["prompt_ids"], row["sampled_ids"], row["response_ids"], row["finish_reason"]) == ([], [], [], None)
        assert row["example"]["example_id"] == row["example_id"]  # type: ignore[index]
    assert all(row["error"] is None and row["sampled_ids"] for row in rows if row not in failed)


def test_build_prompts_keeps_whole_examples_for_training(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe()
    examples = examples_to_table(load_split(recipe.study.data, documents=4, seed=0).train[:3])
    trained, measured = (build_prompts(examples, recipe.study, SPECS, 8, training) for training in (True, False))
    assert trained["example"].to_pylist() == examples.to_pylist()
    assert measured["example"].to_pylist() == [None] * 3


def test_build_prompts_refuses_a_long_prompt_in_evaluation(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    with pytest.raises(UserError, match=r"^example fox-\d+: prompt of \d+ tokens .+ exceed the model's context of 20"):
        make_batch(False, 20)


def test_generate_takes_a_batch_without_a_prompt(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    rows = answer(*make_batch(True, 20, "hf"), for_training=True)
    assert {row["outcome"] for row in rows} == {"failed"}


def test_generate_records_failures_of_the_engine(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    recipe, batch = make_batch(True, runtime={"fake": {"fail_every": 2}})
    rows = answer(recipe, batch, for_training=True)
    wrong = [seed % 2 == 0 for seed in batch["seed"].to_pylist()]
    assert 0 < sum(wrong) < 8
    assert [row["outcome"] == "failed" for row in rows] == wrong
    assert {row["error"] for row in rows} == {None, "the fake engine fails at every seed that 2 divides"}
    assert [row["example_id"] for row in rows] == batch["example_id"].to_pylist()


def test_generate_refuses_a_failure_in_evaluation(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    recipe, batch = make_batch(False, runtime={"fake": {"fail_every": 1}})
    with pytest.raises(
        UserError, match=r"^example fox-\d+: the engine gave no answer \(the fake engine fails at every"
    ):
        answer(recipe, batch, for_training=False)


def test_generate_raises_if_the_engine_died(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    recipe, batch = make_batch(True, runtime={"fake": {"die_at_call": 1}})
    with pytest.raises(EngineDied, match="the fake engine ends at call 1"):
        answer(recipe, batch, for_training=True)


@pytest.mark.parametrize("engine", ["hf", "fake"])
def test_generate_stores_top_k_logprobs(make_batch: Callable[..., tuple[Recipe, pa.Table]], engine: str) -> None:
    recipe, batch = make_batch(True, engine=engine, method={"teacher": "topk", "teacher_topk": 3})
    rows = answer(recipe, batch, for_training=True)
    assert {row["outcome"] for row in rows} >= {"kept"}
    for row in rows:
        if row["outcome"] != "kept":
            assert (row["top_ids"], row["top_logprobs"]) == (None, None)
            continue
        ids, logprobs = (np.asarray(row[name]).reshape(-1, 3) for name in ("top_ids", "top_logprobs"))
        assert ids.shape == logprobs.shape
        assert len(row["response_ids"]) - 1 <= len(ids) <= len(row["response_ids"])  # type: ignore[arg-type]
        assert (np.diff(logprobs) <= 0).all()
        assert (np.exp(logprobs).sum(-1) <= 1 + 1e-6).all()
    evaluated = answer(*make_batch(False, engine=engine, method={"teacher": "topk"}), for_training=False)
    assert {row["top_ids"] for row in evaluated} == {None}


class Counter:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], list[str | None], list[str]]] = []

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], example_ids: Sequence[str]) -> None:
        self.calls.append((list(outcomes), list(errors), list(example_ids)))


@pytest.mark.parametrize("return_samples", [True, False])
def test_store_samples_counts_and_fills_teacher_columns_with_nulls(tmp_path: Path, return_samples: bool) -> None:
    artifact = Artifact(str(tmp_path), "samples", "f00d")
    store = SampleStore(artifact)
    store.open()
    samples = make_samples("a", "b")
    counter = Counter()
    returned = store_samples(samples.drop_columns(["hidden", "hidden_dtype"]), artifact, counter, return_samples)
    assert counter.calls == [(["kept", "kept"], [None, None], ["a", "b"])]
    assert returned.equals(samples if return_samples else samples.select(["example_id"]))
    assert store.load(store.index(["a", "b"]), ["a", "b"], np.arange(2)).equals(samples)


INTERRUPTED = """
import _thread, sys, threading, time
from pos2distill.sampling.operators import _prompt_builder
from pos2distill.config.load import load_recipe

def interrupt():
    while "torch._C" not in sys.modules:
        time.sleep(0.001)
    _thread.interrupt_main()

study = load_recipe(sys.argv[1]).study
threading.Thread(target=interrupt).start()
try:
    _prompt_builder(study, 8)
except KeyboardInterrupt:
    print("interrupted")
print(_prompt_builder(study, 8).style)
"""


def test_prompt_builder_survives_a_cancelled_task(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """Ray cancels a task by an interrupt, and gives its process other tasks."""
    make_recipe()
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["interrupted", "plain"], done.stderr
