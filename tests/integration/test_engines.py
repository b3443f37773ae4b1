"""The real vLLM engine against the reference, token by token."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pos2distill.config import ModelSection, Recipe, VllmSection
from pos2distill.config.base import HashableMapping
from pos2distill.config.load import load_recipe
from pos2distill.errors import MachineError, UserError
from pos2distill.models.chat import stop_token_ids
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.records import Tokens, example_from_row
from pos2distill.sampling import reaper
from pos2distill.sampling.engines.protocol import Engine, Failure, SamplingParams
from pos2distill.sampling.engines.vllm import VllmEngine
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.prompts import PromptBuilder
from tests.support.engines import hf_engine
from tests.support.paths import PROJECT
from tests.support.results import artifact_of

pytestmark = pytest.mark.xdist_group("compute")

DOCUMENTS, PROMPTS = 30, 300


class OnOneLoop:
    """Calls an engine on one event loop, as an actor does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = asyncio.new_event_loop()

    def __call__(self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]) -> list[Any]:
        return self.loop.run_until_complete(self.engine.generate(prompts, params, seeds))


@pytest.fixture(scope="module")
def toy(finished: Recipe) -> ModelSection:
    """The distilled checkpoint, in fp32: near-ties that bf16 would round differently are not compared."""
    assert finished.study.model.dtype == "float32"
    return finished.study.model.model_copy(update={"path": f"{artifact_of(finished, 'distill').path}/model"})


@pytest.fixture(scope="module")
def prompts(toy: ModelSection) -> list[Tokens]:
    data = load_recipe("quickstart", [f"data.train_examples={PROMPTS}"]).study.data
    split = load_split(data, documents=DOCUMENTS, seed=0)
    build = PromptBuilder(load_tokenizer(toy), "plain", max_length=1024, reserve=16)
    return [build(example, DOCUMENTS, (index % DOCUMENTS,)) for index, example in enumerate(split.train[:PROMPTS])]


@pytest.fixture(scope="module")
def vllm(toy: ModelSection) -> Iterator[OnOneLoop]:
    engine = VllmEngine.start(toy, VllmSection(enforce_eager=True))
    yield OnOneLoop(engine)
    engine.shutdown()


def params_for(model: ModelSection, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature, 1.0, 16, tuple(stop_token_ids(model, load_tokenizer(model))))


def test_vllm_greedy_tokens_agree_with_the_reference(vllm: OnOneLoop, toy: ModelSection, prompts: list[Tokens]) -> None:
    params, seeds = params_for(toy), [0] * len(prompts)
    ours = vllm(prompts, params, seeds)
    reference = OnOneLoop(hf_engine(toy))
    expected = [
        done
        for start in range(0, len(prompts), 50)
        for done in reference(prompts[start : start + 50], params, seeds[:50])
    ]
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(ours, expected, strict=True)]
    assert np.mean(same) >= 0.99
    assert [a.finish_reason for a in ours] == [b.finish_reason for b in expected]


def test_vllm_top_k_tokens_agree_with_the_reference(vllm: OnOneLoop, toy: ModelSection, prompts: list[Tokens]) -> None:
    """At a temperature and a narrow nucleus, which must not change them: they are the model's own."""
    params = replace(params_for(toy, temperature=0.7), top_p=0.5, stored_top_k=40)
    first_prompts = prompts[:4]
    ours = vllm(first_prompts, params, list(range(4)))
    lm = load_model(toy)
    for prompt, reply in zip(first_prompts, ours, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *reply.token_ids.tolist()]])
        with torch.no_grad():
            logits_SV = lm(ids).logits[0, len(prompt) - 1 : -1]
        logprobs_SV = logits_SV.log_softmax(-1)
        assert reply.top.ids_SK.shape == (len(reply.token_ids), 40)
        top_SK = torch.from_numpy(reply.top.logprobs_SK)
        # Near-ties may change places, so each token is compared with itself and the ranks by their values.
        chosen_SK = logprobs_SV.gather(-1, torch.from_numpy(reply.top.ids_SK).long())
        torch.testing.assert_close(top_SK, chosen_SK, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(top_SK, logprobs_SV.topk(40).values, rtol=1e-4, atol=1e-3)


def test_vllm_seeded_sample_does_not_depend_on_other_prompts(
    vllm: OnOneLoop, toy: ModelSection, prompts: list[Tokens]
) -> None:
    params = params_for(toy, temperature=1.5)
    together = vllm(prompts[:8], params, list(range(8)))
    alone = [vllm([prompt], params, [seed])[0] for seed, prompt in enumerate(prompts[:8])]
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(together, alone, strict=True)]
    assert all(same)
    other = vllm(prompts[:8], params, list(range(100, 108)))
    assert [done.token_ids.tolist() for done in other] != [done.token_ids.tolist() for done in together]


def test_vllm_with_more_seeded_prompts_than_fit_into_one_step(
    vllm: OnOneLoop, toy: ModelSection, prompts: list[Tokens]
) -> None:
    params = params_for(toy, temperature=0.7)
    together = vllm(prompts[:40], params, list(range(40)))
    assert sum(map(len, prompts[:40])) > 2 * 2048
    alone = vllm(prompts[39:40], params, [39])
    assert together[39].token_ids.tolist() == alone[0].token_ids.tolist()


def test_vllm_batches_overlap(vllm: OnOneLoop, toy: ModelSection, prompts: list[Tokens]) -> None:
    """A batch of one token, submitted after a batch of many, is finished before it."""
    params = params_for(toy)
    one_token = SamplingParams(0.0, 1.0, 1, params.stop_ids)

    async def race() -> tuple[bool, bool, list[Any]]:
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


def test_vllm_fails_only_the_bad_prompt(vllm: OnOneLoop, toy: ModelSection, prompts: list[Tokens]) -> None:
    """It is longer than the context; the results of the others do not change."""
    params = params_for(toy)
    results = vllm([prompts[0], np.full(5000, 7, np.int32), prompts[1]], params, [0] * 3)
    assert isinstance(results[1], Failure)
    assert re.match(r"VLLMValidationError: .*\b(5000|5001)\b", results[1].error)
    good = vllm(prompts[:2], params, [0] * 2)
    assert [results[row].token_ids.tolist() for row in (0, 2)] == [each.token_ids.tolist() for each in good]


@pytest.mark.slow
def test_vllm_engine_says_what_to_do_where_its_cache_is_too_small(toy: ModelSection, tmp_path: Path) -> None:
    """A token of the toy takes 3 layers * 2 * 4 heads * 32 numbers, 3 KiB in float32; the cache has 1 GiB."""
    shutil.copytree(toy.path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 400_000}))
    message = r"^vLLM could not start; if .* \(400000 tokens\), lower model.max_length or raise runtime.vllm.cpu_kv_"
    with pytest.raises(MachineError, match=message):
        VllmEngine.start(toy.model_copy(update={"path": str(tmp_path)}), VllmSection(enforce_eager=True))


@pytest.mark.slow
def test_vllm_engine_names_arguments_with_which_it_could_not_start(toy: ModelSection) -> None:
    """vLLM itself finds out in its process, whose log alone has the reason."""
    model = toy.model_copy(update={"engine_args": HashableMapping({"block_size": 7})})
    with pytest.raises(MachineError, match=r"^vLLM could not start; correct model.engine_args; or, if its cache"):
        VllmEngine.start(model, VllmSection(enforce_eager=True))


def test_vllm_engine_says_why_vllm_refuses_its_settings(toy: ModelSection) -> None:
    message = rf"^{toy.path}: vLLM rejects these settings \(User-specified max_model_len \(2000\) is greater than "
    with pytest.raises(UserError, match=message):
        VllmEngine.start(toy.model_copy(update={"max_length": 2000}), VllmSection(enforce_eager=True))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("max_num_batched_tokens", 8, r"max_num_batched_tokens \(8\) .*"),
        ("block_size", "many", r"block_size: Input should be a valid integer.*"),
        ("compilation_config", 3, r".*"),
        ("kv_transfer_config", {"foo": 1}, r".*foo.*"),
    ],
)
def test_vllm_engine_says_why_vllm_refuses_its_arguments(
    toy: ModelSection, argument: str, value: Any, message: str
) -> None:
    model = toy.model_copy(update={"engine_args": HashableMapping({argument: value})})
    with pytest.raises(
        UserError, match=rf"^{toy.path}: vLLM rejects these settings \({message}\); correct model.engine_args$"
    ):
        VllmEngine.start(model, VllmSection(enforce_eager=True))


# An engine in a separate process. It prints the pids of the engine's processes, waits for a line, kills them, and
# prints what two more requests raise.
ACTOR = """
import asyncio, os, signal, sys
import numpy as np
from pos2distill.config import VllmSection
from pos2distill.config.load import load_recipe
from pos2distill.sampling import reaper
from pos2distill.sampling.engines.protocol import EngineDied, SamplingParams
from pos2distill.sampling.engines.vllm import VllmEngine

def generate():
    return engine.generate([np.arange(5, 25, dtype=np.int32)], SamplingParams(0.0, 1.0, 4, (2,)), [0])

async def work():
    await generate()
    helper = reaper.start_reaper().pid
    pids = reaper.descendants([os.getpid()], reaper.read_processes(), ignored=[helper])
    print("UP", *pids, flush=True)
    sys.stdin.readline()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        try:
            await generate()
        except EngineDied as error:
            os.write(1, f"DIED {error}\\n".encode())  # whole, between lines of vLLM's own

if __name__ == "__main__":
    model = load_recipe("quickstart", ["model.dtype=float32"]).study.model
    engine = VllmEngine.start(model, VllmSection(enforce_eager=True))
    asyncio.run(work())
"""


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The process above, up, and the pids of its engine."""
    script = tmp_path / "actor.py"
    script.write_text(ACTOR)
    with subprocess.Popen(
        [sys.executable, str(script)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("UP ")), "")
        yield process, [int(pid) for pid in line.split()[1:]]
        process.kill()


@pytest.mark.slow
def test_reaper_ends_engine_processes_of_a_killed_actor(actor: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = actor
    table = reaper.read_processes()
    assert pids
    assert all(pid in table for pid in pids)
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while (left := alive(pids)) and time.monotonic() < end:
        time.sleep(0.2)
    assert left == []


@pytest.mark.slow
def test_vllm_engine_is_dead_after_its_core_was_killed(actor: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = actor
    out, _ = process.communicate("go\n", timeout=120)
    assert out.count("DIED EngineCore encountered an issue") == 2
    assert alive(pids) == []


def alive(pids: list[int]) -> list[int]:
    table = reaper.read_processes()
    return [pid for pid in pids if pid in table and not table[pid].dead]


def test_vllm_generates_from_a_checkpoint_as_in_evaluation(
    vllm: OnOneLoop, toy: ModelSection, finished: Recipe
) -> None:
    table = artifact_of(finished, "prepare").read_table("evaluation.parquet")
    examples = {row["example_id"]: example_from_row(row) for row in table.to_pylist()}
    predictions = artifact_of(finished, "evaluate distilled").read_table("predictions.parquet").to_pylist()
    build = PromptBuilder(load_tokenizer(toy), "plain", max_length=1024, reserve=16)
    prompts = [build(examples[row["example_id"]], row["documents"], tuple(row["slots"])) for row in predictions]
    results = vllm(prompts, params_for(toy), [0] * len(prompts))
    same = [done.token_ids.tolist() == row["sampled_ids"] for done, row in zip(results, predictions, strict=True)]
    assert np.mean(same) >= 0.97
