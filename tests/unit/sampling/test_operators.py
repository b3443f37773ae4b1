"""The operators, without an executor."""

import asyncio
import errno
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pos2distill.config import Recipe
from pos2distill.errors import TransientError, UserError
from pos2distill.models.load import load_tokenizer
from pos2distill.records import EXAMPLE_SCHEMA, RESPONSE_SCHEMA, Tokens, example_tables
from pos2distill.sampling import operators
from pos2distill.sampling.engines.protocol import Completion, EngineDied, Failure, GenerationResult, SamplingParams
from pos2distill.sampling.generate import GenerationOperator, require_responses
from pos2distill.sampling.operators import fetch_examples, store_samples, to_predictions
from pos2distill.sampling.prompting import (
    PromptSpec,
    build_evaluation_prompts,
    build_sample_prompts,
    cached_prompt_builder,
    replace_with_teacher_prompts,
)
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.permutations import Placement, trivial_slots
from pos2distill.tasks.prompts import PromptBuilder
from tests.support.stores import make_samples
from tests.support.tables import examples_to_table

SPECS = [PromptSpec(4, {1: (Placement((0,)),)})]


@pytest.fixture
def make_batch(make_recipe: Callable[..., Recipe]) -> Callable[..., tuple[Recipe, pa.Table]]:
    """`make_batch(limit, engine, **overrides)`: a recipe and prompts of samples, of a model with that context."""

    def make(limit: int = 512, engine: str = "fake", **overrides: object) -> tuple[Recipe, pa.Table]:
        recipe = make_recipe(model={"engine": engine, "max_length": limit}, **overrides)
        examples = list(load_split(recipe.study.data, documents=4, seed=0).train[:8])
        examples[3] = replace(examples[3], question=f"Please tell: {examples[3].question}")
        return recipe, build_sample_prompts(examples_to_table(examples), recipe.study, 8)

    return make


def test_a_storage_that_does_not_answer_is_a_transient_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray Data keeps of an error is its text, in which a plain OSError would be a bug."""
    artifact = Artifact(str(tmp_path), "samples", "f")
    busy = OSError(errno.EBUSY, "Service Unavailable")
    monkeypatch.setattr(SampleStore, "append", Mock(side_effect=busy))
    with pytest.raises(TransientError, match=r"samples-f: cannot be used \(Service Unavailable\) \(runtime.storage\)"):
        store_samples(make_samples("a"), artifact, Mock(), return_samples=False)
    monkeypatch.setattr(operators, "_open_parquet", Mock(side_effect=busy))
    with pytest.raises(TransientError, match=r"samples-f: cannot be used \(Service Unavailable\) \(runtime.storage\)"):
        fetch_examples(pa.table({"index": [0]}), artifact, "train.parquet")


def answer(recipe: Recipe, batch: pa.Table, *, stored_top_k: int = 0) -> list[dict[str, object]]:
    params = SamplingParams(0.0, 1.0, 8, (4,), stored_top_k)
    generate = GenerationOperator(recipe.study, recipe.runtime, params, candidates=recipe.study.sampling.candidates)
    table = asyncio.run(generate(batch))
    assert table.schema == RESPONSE_SCHEMA
    return table.to_pylist()


def longest(batch: pa.Table) -> int:
    return max(len(ids) for ids in batch["prompt_ids"].to_pylist())


def test_generate_records_a_prompt_that_is_too_long(
    make_batch: Callable[..., tuple[Recipe, pa.Table]],
) -> None:
    limit = longest(make_batch()[1]) + 7  # one token too few for the longest
    recipe, batch = make_batch(limit)
    rows = answer(recipe, batch)
    failed = [row for row in rows if row["outcome"] == "failed"]
    assert [row["outcome"] == "failed" for row in rows] == [False] * 3 + [True] + [False] * 4
    for row in failed:
        assert str(row["error"]).startswith("prompt of ")
        assert f"exceed the model's context of {limit}" in str(row["error"])
        assert (row["prompt_ids"], row["sampled_ids"], row["response_ids"], row["finish_reason"]) == ([], [], [], None)
        assert row["example"]["example_id"] == row["example_id"]  # type: ignore[index]
    assert all(row["error"] is None and row["sampled_ids"] for row in rows if row not in failed)


def test_build_evaluation_prompts_in_several_orders_of_the_distractors(make_recipe: Callable[..., Recipe]) -> None:
    """Per placement: first as without orders, then the same documents in others, whatever the study's seed."""
    placements = {1: (Placement((0,)), Placement((2,)))}
    one, three = PromptSpec(4, placements), PromptSpec(4, placements, orders=3)
    assert (one.prompts_per_example, three.prompts_per_example) == (2, 6)
    recipe, other_seed = make_recipe(), make_recipe(seed=5)
    examples = examples_to_table(load_split(recipe.study.data, documents=4, seed=0).train[:3])
    plain = build_evaluation_prompts(examples, recipe.study, [one], 8)
    rows = build_evaluation_prompts(examples, recipe.study, [three], 8)
    assert rows["placement"].to_pylist() == [0, 0, 0, 1, 1, 1] * 3
    assert rows["order"].to_pylist() == [0, 1, 2] * 6
    assert rows["slots"].to_pylist() == [[0]] * 3 + [[2]] * 3 + [[0]] * 3 + [[2]] * 3 + [[0]] * 3 + [[2]] * 3
    ids = rows["prompt_ids"].to_pylist()
    assert ids[::3] == plain["prompt_ids"].to_pylist()
    for first in range(0, 18, 3):
        assert sorted(ids[first]) == sorted(ids[first + 1]) == sorted(ids[first + 2])
    assert any(ids[first] != ids[first + 1] for first in range(0, 18, 3))
    assert build_evaluation_prompts(examples, other_seed.study, [three], 8)["prompt_ids"].to_pylist() == ids


def test_prompts_of_samples_have_their_id_and_example_and_those_of_evaluations_neither(
    make_recipe: Callable[..., Recipe],
) -> None:
    """An evaluated example has several prompts, and an example is long. Both are the same prompt otherwise."""
    recipe = make_recipe()
    examples = examples_to_table(load_split(recipe.study.data, documents=4, seed=0).train[:3])
    samples = build_sample_prompts(examples, recipe.study, 8)
    assert samples["sample_id"].to_pylist() == samples["example_id"].to_pylist() == examples["example_id"].to_pylist()
    assert samples["example"].to_pylist() == examples.to_pylist()
    evaluated = build_evaluation_prompts(examples, recipe.study, SPECS, 8)
    assert evaluated["sample_id"].null_count == evaluated["example"].null_count == len(evaluated)
    own = ["sample_id", "example"]
    assert evaluated.drop_columns(own).equals(samples.drop_columns(own))


def test_build_evaluation_prompts_rejects_a_long_prompt(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(model={"engine": "fake", "max_length": 20})
    examples = examples_to_table(load_split(recipe.study.data, documents=4, seed=0).train[:3])
    with pytest.raises(UserError, match=r"^example fox-\d+: prompt of \d+ tokens .+ exceed the model's context of 20"):
        build_evaluation_prompts(examples, recipe.study, SPECS, 8)


def test_generate_takes_a_batch_without_a_prompt(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    rows = answer(*make_batch(20, "hf"))
    assert {row["outcome"] for row in rows} == {"failed"}


def test_generate_records_failures_of_the_engine(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    recipe, batch = make_batch(runtime={"fake": {"fail_every": 2}})
    rows = answer(recipe, batch)
    wrong = [seed % 2 == 0 for seed in batch["seed"].to_pylist()]
    assert 0 < sum(wrong) < 8
    assert [row["outcome"] == "failed" for row in rows] == wrong
    assert {row["error"] for row in rows} == {None, "the fake engine fails at every seed that 2 divides"}
    assert [row["example_id"] for row in rows] == batch["example_id"].to_pylist()


def test_require_responses_rejects_a_failure(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    recipe, batch = make_batch(runtime={"fake": {"fail_every": 2}})
    rows = answer(recipe, batch)
    failed = [row["example_id"] for row in rows if row["outcome"] == "failed"]
    assert 0 < len(failed) < len(rows)
    responses = pa.Table.from_pylist(rows, schema=RESPONSE_SCHEMA)
    message = f"^example {failed[0]}: the engine gave no answer \\(the fake engine fails at every"
    with pytest.raises(UserError, match=message):
        require_responses(responses)
    # Of a server that may answer another time.
    passing = [{**row, "outcome": "unanswered"} if row["outcome"] == "failed" else row for row in rows]
    with pytest.raises(TransientError, match=message):
        require_responses(pa.Table.from_pylist(passing, schema=RESPONSE_SCHEMA))
    one_lasts = pa.Table.from_pylist([*passing, *rows], schema=RESPONSE_SCHEMA)
    with pytest.raises(UserError, match=message) as caught:
        require_responses(one_lasts)
    assert not isinstance(caught.value, TransientError)
    kept = to_predictions(responses)
    assert kept["example_id"].to_pylist() == [row["example_id"] for row in rows if row["outcome"] != "failed"]
    require_responses(responses.filter(pc.field("outcome") != "failed"))


def test_build_evaluation_prompts_leaves_out_answered_prompts(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe()
    examples = examples_to_table(load_split(recipe.study.data, documents=4, seed=0).train[:2])
    first, second = examples["example_id"].to_pylist()
    specs = [PromptSpec(4, {1: (Placement((0,)), Placement((2,)))}, orders=2), PromptSpec("gold", SPECS[0].placements)]
    answered = frozenset({(4, first, 0, 1), (4, first, 1, 0), (1, second, 0, 0), (3, second, 0, 1)})
    prompts = build_evaluation_prompts(examples, recipe.study, specs, 8, answered=answered)
    shown = [(row["documents"], row["example_id"], row["placement"], row["order"]) for row in prompts.to_pylist()]
    both = [(4, second, placement, order) for placement in (0, 1) for order in (0, 1)]
    assert shown == [(4, first, 0, 0), (4, first, 1, 1), *both, (1, first, 0, 0)]


def test_generate_raises_if_the_engine_died(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    recipe, batch = make_batch(runtime={"fake": {"die_at_call": 1}})
    with pytest.raises(EngineDied, match="the fake engine ends at call 1"):
        answer(recipe, batch)


@pytest.mark.parametrize("engine", ["hf", "fake"])
def test_generate_stores_top_k_logprobs(make_batch: Callable[..., tuple[Recipe, pa.Table]], engine: str) -> None:
    recipe, batch = make_batch(engine=engine, method={"teacher": "topk", "teacher_topk": 3})
    rows = answer(recipe, batch, stored_top_k=3)
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
    evaluated = answer(*make_batch(engine=engine, method={"teacher": "topk"}))
    assert {row["top_ids"] for row in evaluated} == {None}


class Scripted:
    """An engine whose response is the number of the call, but for calls that fail."""

    def __init__(self, texts: Sequence[str | None], tokenizer: Any) -> None:
        self.texts = list(texts)
        self.tokenizer = tokenizer
        self.seeds: list[list[int]] = []

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        text = self.texts[len(self.seeds)]
        self.seeds.append(list(seeds))
        if text is None:
            return [Failure("no luck") for _ in prompts]
        ids = np.asarray(self.tokenizer(text)["input_ids"], np.int32)
        return [Completion(ids, "length") for _ in prompts]

    def shutdown(self) -> None:
        """Nothing."""


def scripted(recipe: Recipe, texts: Sequence[str | None], candidates: int = 3) -> tuple[GenerationOperator, Scripted]:
    generate = GenerationOperator(
        recipe.study, recipe.runtime, SamplingParams(0.7, 1.0, 8, (4,)), candidates=candidates
    )
    engine = Scripted(texts, load_tokenizer(recipe.study.model))
    generate.engine = engine
    return generate, engine


@pytest.mark.parametrize(
    ("texts", "chosen"),
    [
        (["owl", "red fox", "a red fox"], "red fox"),
        (["owl", None, "fox"], "owl"),
        ([None, "owl", None], "owl"),
        (["", "owl", "fox"], "owl"),
        # Thoughts do not count: by them the first two would agree more.
        (["<think>a b c</think>owl", "<think>a b c</think>bear", "<think>d</think>bear"], "<think>a b c</think>bear"),
        # A thought that does not end has no answer.
        (["<think>x y z", "<think>a</think>owl", "<think>b</think>bear"], "<think>a</think>owl"),
        ([None, None, None], None),
    ],
)
def test_generate_takes_the_most_consistent_candidate(
    make_batch: Callable[..., tuple[Recipe, pa.Table]], texts: list[str | None], chosen: str | None
) -> None:
    recipe, batch = make_batch(sampling={"candidates": 3, "temperature": 0.7})
    generate, engine = scripted(recipe, texts)
    rows = asyncio.run(generate(batch)).to_pylist()
    assert [row["example_id"] for row in rows] == batch["example_id"].to_pylist()
    assert {row["text"] for row in rows} == {chosen or ""}
    assert {row["outcome"] for row in rows} == {"kept" if chosen else "failed"}
    assert {row["error"] for row in rows} == {None if chosen else "no luck"}
    # Each candidate has seeds of its own, the first those of a single response.
    assert engine.seeds[0] == batch["seed"].to_pylist()
    assert len({seed for seeds in engine.seeds for seed in seeds}) == 3 * len(batch)


def test_generate_of_empty_candidates_is_empty(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    recipe, batch = make_batch(sampling={"candidates": 3, "temperature": 0.7})
    generate, _ = scripted(recipe, ["", None, ""])
    assert {row["outcome"] for row in asyncio.run(generate(batch)).to_pylist()} == {"empty"}


def test_generate_draws_one_response_of_one_candidate(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    """The study's candidates are those of samples; whoever evaluates passes none."""
    recipe, batch = make_batch(sampling={"candidates": 3, "temperature": 0.7})
    generate, engine = scripted(recipe, ["fox"], candidates=1)
    asyncio.run(generate(batch))
    assert len(engine.seeds) == 1


def test_generate_candidates_do_not_depend_on_the_batch(make_batch: Callable[..., tuple[Recipe, pa.Table]]) -> None:
    sampling = {"candidates": 4, "temperature": 1.0}
    recipe, batch = make_batch(engine="hf", sampling=sampling)
    whole = answer(recipe, batch)
    parts = answer(recipe, batch.slice(0, 3)) + answer(recipe, batch.slice(3))
    assert [row["sampled_ids"] for row in parts] == [row["sampled_ids"] for row in whole]


def test_fetch_examples_numbers_the_samples_of_an_example(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    examples = load_split(make_recipe().study.data, documents=4, seed=0).train[:8]
    artifact = Artifact(str(tmp_path), "examples", "f00d")
    with artifact.writing():
        artifact.write_tables("train.parquet", EXAMPLE_SCHEMA, example_tables(examples))
        artifact.publish(counts={}, seconds={})
    read = fetch_examples(pa.table({"index": [5, 0, 23]}), artifact, "train.parquet", 3)
    assert read["example_id"].to_pylist() == [examples[index].example_id for index in (1, 0, 7)]
    assert read["number"].to_pylist() == [2, 0, 2]
    single = fetch_examples(pa.table({"index": [5]}), artifact, "train.parquet")
    assert single.to_pylist() == examples_to_table([examples[5]]).to_pylist()


def test_build_sample_prompts_on_policy_shows_each_sample_at_its_slots(make_recipe: Callable[..., Recipe]) -> None:
    study = make_recipe(method={"name": "r1-on-policy", "k": 2, "advantageous_slot": "last"}).study
    examples = load_split(study.data, documents=4, seed=0).train[:2]
    table = examples_to_table([examples[0], examples[0], examples[1], examples[1]])
    numbered = table.append_column("number", [[0, 2, 1, 0]])
    prompts = build_sample_prompts(numbered, study, 8)
    names = [example.example_id for example in examples]
    assert prompts["sample_id"].to_pylist() == [f"{names[0]}@0", f"{names[0]}@2", f"{names[1]}@1", f"{names[1]}@0"]
    assert prompts["example_id"].to_pylist() == [names[0], names[0], names[1], names[1]]
    slots = [trivial_slots(study, example) for example in examples]
    assert prompts["slots"].to_pylist() == [[3], list(slots[0][1]), list(slots[1][0]), [3]]
    assert prompts["example"].to_pylist() == table.to_pylist()
    # The advantageous prompt of the same example, whatever was answered; nothing where there was no answer.
    responses = RESPONSE_SCHEMA.empty_table().to_pylist()
    for row, outcome in zip(prompts.to_pylist(), ("kept", "wrong", "failed", "kept"), strict=True):
        responses.append({name: row.get(name) for name in RESPONSE_SCHEMA.names} | {"outcome": outcome})
    shown = replace_with_teacher_prompts(pa.Table.from_pylist(responses, schema=RESPONSE_SCHEMA), study, "")
    first, _, _, last = prompts["prompt_ids"].to_pylist()
    assert shown["prompt_ids"].to_pylist() == [first, first, [], last]
    assert shown["slots"].to_pylist() == prompts["slots"].to_pylist()
    assert shown.schema == RESPONSE_SCHEMA


class Counter:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], list[str | None], list[str]]] = []

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], sample_ids: Sequence[str]) -> None:
        self.calls.append((list(outcomes), list(errors), list(sample_ids)))


@pytest.mark.parametrize("return_samples", [True, False])
def test_store_samples_counts_and_fills_teacher_columns_with_nulls(tmp_path: Path, return_samples: bool) -> None:
    artifact = Artifact(str(tmp_path), "samples", "f00d")
    store = SampleStore(artifact)
    samples = make_samples("a", "b")
    counter = Counter()
    returned = store_samples(samples.drop_columns(["hidden", "hidden_dtype"]), artifact, counter, return_samples)
    assert counter.calls == [(["kept", "kept"], [None, None], ["a", "b"])]
    assert returned.equals(samples if return_samples else samples.select(["sample_id"]))
    assert store.load(store.index(["a", "b"]), np.arange(2)).equals(samples)


def test_prompt_builder_is_created_again_only_for_changed_files(
    make_recipe: Callable[..., Recipe], tiny_model_path: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    study = make_recipe(model={"path": str(folder)}).study
    builder = cached_prompt_builder(study, 8)
    (folder / "README.md").write_text("a note")
    assert cached_prompt_builder(study, 8) is builder
    assert isinstance(builder, PromptBuilder)
    assert builder.chat_frame() == ("<s><|user|>", "<|end|><|assistant|>")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|end|>", "[|end|]"))  # as long as before
    changed = cached_prompt_builder(study, 8)
    assert isinstance(changed, PromptBuilder)
    assert changed.chat_frame() == ("<s><|user|>", "[|end|]<|assistant|>")


INTERRUPTED = """
import _thread, sys, threading, time
from pos2distill.sampling.prompting import cached_prompt_builder
from pos2distill.config.load import load_recipe

def interrupt():
    while "torch._C" not in sys.modules:
        time.sleep(0.001)
    _thread.interrupt_main()

study = load_recipe(sys.argv[1]).study
threading.Thread(target=interrupt).start()
try:
    cached_prompt_builder(study, 8)
except KeyboardInterrupt:
    print("interrupted")
print(cached_prompt_builder(study, 8).reserve)
"""


def test_prompt_builder_survives_a_canceled_task(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """Ray cancels a task by an interrupt, and gives its process other tasks."""
    make_recipe()
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["interrupted", "8"], done.stderr
