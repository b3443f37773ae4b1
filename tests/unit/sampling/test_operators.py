"""The functions that Ray Data runs, without Ray."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipelines.generate import Generate, PromptSpec, block_size, build_prompts
from pos2distill.config import PoolSection, Recipe
from pos2distill.errors import UserError
from pos2distill.records import ANSWER_SCHEMA, examples_to_table
from pos2distill.sampling.engines.protocol import EngineDied, SamplingParams
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.permutations import Placement

ASKED = [PromptSpec(4, {1: (Placement((0,)),)})]


@pytest.fixture
def make_batch(make_recipe: Callable[..., Recipe]) -> Callable[..., tuple[Recipe, pa.Table]]:
    """`make_batch(for_training, limit, engine, **overrides)`: a recipe and prompts, of a model with that context."""

    def make(
        for_training: bool, limit: int = 512, engine: str = "fake", **overrides: object
    ) -> tuple[Recipe, pa.Table]:
        recipe = make_recipe(model={"engine": engine, "max_length": limit}, **overrides)
        examples = list(load_split(recipe.study.data, documents=4, seed=0).train[:8])
        examples[3] = replace(examples[3], question=f"Please tell: {examples[3].question}")
        return recipe, build_prompts(examples_to_table(examples), recipe.study, ASKED, 8, for_training)

    return make


def answer(recipe: Recipe, batch: pa.Table, *, for_training: bool) -> list[dict[str, object]]:
    params = SamplingParams(0.0, 1.0, 8, (4,), recipe.study.method.teacher_topk if for_training else 0)
    table = asyncio.run(Generate(recipe, recipe.study.model, params, for_training, None)(batch))
    assert table.schema == ANSWER_SCHEMA
    return table.to_pylist()


def longest(batch: pa.Table) -> int:
    return max(len(ids) for ids in batch["prompt_ids"].to_pylist())


def test_a_prompt_that_is_too_long_is_recorded_and_passed_by(
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


def test_whole_examples_go_with_their_prompts_where_they_are_trained_on(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe()
    examples = examples_to_table(load_split(recipe.study.data, documents=4, seed=0).train[:3])
    trained, measured = (build_prompts(examples, recipe.study, ASKED, 8, training) for training in (True, False))
    assert trained["example"].to_pylist() == examples.to_pylist()
    assert measured["example"].to_pylist() == [None] * 3


def test_evaluation_refuses_a_prompt_that_is_too_long(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    with pytest.raises(UserError, match=r"^example fox-\d+: prompt of \d+ tokens .+ exceed the model's context of 20"):
        make_batch(False, 20)


def test_a_batch_without_a_single_prompt(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    rows = answer(*make_batch(True, 20, "hf"), for_training=True)
    assert {row["outcome"] for row in rows} == {"failed"}


def test_an_engines_failures_stand_beside_the_answers(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    recipe, batch = make_batch(True, runtime={"fake": {"fail_every": 2}})
    rows = answer(recipe, batch, for_training=True)
    wrong = [seed % 2 == 0 for seed in batch["seed"].to_pylist()]
    assert 0 < sum(wrong) < 8
    assert [row["outcome"] == "failed" for row in rows] == wrong
    assert {row["error"] for row in rows} == {None, "the fake engine fails at every seed that 2 divides"}
    assert [row["example_id"] for row in rows] == batch["example_id"].to_pylist()


def test_evaluation_refuses_an_engines_failure(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    recipe, batch = make_batch(False, runtime={"fake": {"fail_every": 1}})
    with pytest.raises(
        UserError, match=r"^example fox-\d+: the engine gave no answer \(the fake engine fails at every"
    ):
        answer(recipe, batch, for_training=False)


def test_a_dead_engine_ends_its_process(
    make_batch: Callable[..., tuple[Recipe, pa.Table]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe, batch = make_batch(True, runtime={"fake": {"die_at_call": 1}})

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(SystemExit) as caught:
        answer(recipe, batch, for_training=True)
    assert caught.value.code == 1
    assert "the engine died: the fake engine ends at call 1" in capfd.readouterr().err
    assert isinstance(caught.value.__context__, EngineDied)


@pytest.mark.parametrize("engine", ["hf", "fake"])
def test_what_the_sampler_tells_stands_beside_its_answers(
    make_batch: Callable[..., tuple[Recipe, pa.Table]], engine: str
) -> None:
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
    eval_specs = answer(*make_batch(False, engine=engine, method={"teacher": "topk"}), for_training=False)
    assert {row["top_ids"] for row in eval_specs} == {None}


@pytest.mark.parametrize(
    ("examples", "prompts_per_example", "size"),
    [
        (2000, 1, 128),  # four batches
        (1000, 12, 11),  # 132 prompts, the next multiple of twelve
        (400, 1, 50),  # four blocks for each of two actors
        (10, 1, 32),  # not less than a batch
        (10, 12, 3),
        (10, 50, 2),
    ],
)
def test_blocks_hold_one_to_four_batches(examples: int, prompts_per_example: int, size: int) -> None:
    assert block_size(examples, prompts_per_example, PoolSection(batch_size=32, max=2)) == size


INTERRUPTED = """
import _thread, sys, threading, time
from pipelines.generate import _prompt_builder
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


def test_a_process_whose_task_was_cancelled_while_it_loaded_is_as_good_as_new(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Ray cancels a task by an interrupt, and gives its process other tasks."""
    make_recipe()
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["interrupted", "plain"], done.stderr
