"""The real vLLM engine against the reference, token by token."""

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from pipelines.plan import make_plan
from pos2distill.config import ModelSection, Recipe, VllmSection
from pos2distill.models.load import load_tokenizer, stop_token_ids
from pos2distill.recipes import load_recipe
from pos2distill.records import Tokens, example_from_row
from pos2distill.sampling.engine import Completion, Engine, SamplingParams
from pos2distill.sampling.hf_engine import HfEngine
from pos2distill.sampling.vllm_engine import VllmEngine
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.prompts import PromptBuilder

DOCUMENTS, PROMPTS = 30, 300


class OnOneLoop:
    """Calls an engine on one event loop, as an actor does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = asyncio.new_event_loop()

    def __call__(self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        return self.loop.run_until_complete(self.engine.generate(prompts, params, seeds))


@pytest.fixture(scope="module")
def toy() -> ModelSection:
    # fp32, so that ties broken by bf16 rounding are not what is compared.
    return load_recipe("quickstart", ["model.dtype=float32"]).study.model


@pytest.fixture(scope="module")
def prompts(toy: ModelSection) -> list[Tokens]:
    data = load_recipe("quickstart", [f"data.train_examples={PROMPTS}"]).study.data
    split = load_split(data, documents=DOCUMENTS, seed=0)
    build = PromptBuilder(load_tokenizer(toy), "plain", max_length=1024, reserve=16)
    return [build(example, DOCUMENTS, (index % DOCUMENTS,)) for index, example in enumerate(split.train[:PROMPTS])]


@pytest.fixture(scope="module")
def vllm(toy: ModelSection) -> Iterator[OnOneLoop]:
    engine = VllmEngine(toy, VllmSection(enforce_eager=True), threads=2)
    yield OnOneLoop(engine)
    engine.shutdown()


def params_for(model: ModelSection, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature, 1.0, 16, tuple(stop_token_ids(model, load_tokenizer(model))))


def test_greedy_tokens_agree_with_the_reference(vllm: OnOneLoop, toy: ModelSection, prompts: list[Tokens]) -> None:
    params, seeds = params_for(toy), [0] * len(prompts)
    ours = vllm(prompts, params, seeds)
    reference = OnOneLoop(HfEngine(toy, threads=2))
    expected = [
        done
        for start in range(0, len(prompts), 50)
        for done in reference(prompts[start : start + 50], params, seeds[:50])
    ]
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(ours, expected, strict=True)]
    assert np.mean(same) >= 0.99
    assert [a.finish_reason for a in ours] == [b.finish_reason for b in expected]


def test_a_seeded_sample_does_not_depend_on_its_company(
    vllm: OnOneLoop, toy: ModelSection, prompts: list[Tokens]
) -> None:
    params = params_for(toy, temperature=1.5)
    together = vllm(prompts[:8], params, list(range(8)))
    alone = [vllm([prompt], params, [seed])[0] for seed, prompt in enumerate(prompts[:8])]
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(together, alone, strict=True)]
    assert all(same)
    other = vllm(prompts[:8], params, list(range(100, 108)))
    assert [done.token_ids.tolist() for done in other] != [done.token_ids.tolist() for done in together]


def test_batches_overlap(vllm: OnOneLoop, toy: ModelSection, prompts: list[Tokens]) -> None:
    """A batch of one token, handed in after a batch of many, is ready before it."""
    params = params_for(toy)
    one_token = SamplingParams(0.0, 1.0, 1, params.stop_ids)

    async def race() -> tuple[bool, bool, list[Completion]]:
        long = asyncio.create_task(vllm.engine.generate(prompts[:40], params, [0] * 40))
        await asyncio.sleep(0)
        short = asyncio.create_task(vllm.engine.generate(prompts[40:41], one_token, [0]))
        await asyncio.wait([long, short], return_when=asyncio.FIRST_COMPLETED)
        return short.done(), long.done(), await long

    short_done, long_done, answers = vllm.loop.run_until_complete(race())
    assert short_done
    assert not long_done
    alone = vllm(prompts[:8], params, [0] * 8)
    assert [done.token_ids.tolist() for done in answers[:8]] == [done.token_ids.tolist() for done in alone]


def test_a_checkpoint_answers_in_vllm_as_in_evaluation(finished: Recipe) -> None:
    plan = make_plan(finished)
    model = finished.study.model.model_copy(update={"path": f"{plan.checkpoint.path}/model"})
    examples = {
        row["example_id"]: example_from_row(row) for row in plan.examples.read_table("evaluation.parquet").to_pylist()
    }
    predictions = plan.distilled_scores.read_table("predictions.parquet").to_pylist()
    build = PromptBuilder(load_tokenizer(model), "plain", max_length=1024, reserve=16)
    asked = [build(examples[row["example_id"]], row["documents"], tuple(row["slots"])) for row in predictions]
    engine = VllmEngine(model, VllmSection(enforce_eager=True), threads=2)
    try:
        answers = OnOneLoop(engine)(asked, params_for(model), [0] * len(asked))
    finally:
        engine.shutdown()
    same = [done.token_ids.tolist() == row["sampled_ids"] for done, row in zip(answers, predictions, strict=True)]
    assert np.mean(same) >= 0.97  # bf16: near-ties round differently in the two engines
