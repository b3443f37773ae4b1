"""How much of vLLM's own speed does the pool of samplers keep? And what does the order of the prompts bring? Run:

python -m benchmarks.sampler.sampler [--device cuda] [--model FOLDER] [--examples 80]

The same prompts (every example at twelve slots), seeds and settings of the engine go through vLLM's own
`LLM.generate`, through our pool of one actor on Ray Data, and through the processor of `ray.data.llm`. The clock runs
from the first request to the last reply, so that no side pays for the start of its engine. On CPUs the engine has one
thread, so that the other core is left to everything else, as all cores are beside a GPU.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pipelines.generate import PromptSpec, blocks_of_examples, build_prompts, generate

from benchmarks.circumstances import circumstances
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.models.chat import stop_token_ids
from pos2distill.models.load import load_tokenizer
from pos2distill.records import examples_to_table
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.permutations import evaluated_placements

DOCUMENTS, SLOTS, NEW_TOKENS, TEMPERATURE = 30, 12, 32, 0.0  # greedy, as evaluation asks
SEQUENCES, BATCH = 64, 32
BATCHES, FEWER_BATCHES = 4, 2  # twice as many prompts in flight as sequences in the engine; just as many
_BLOCK = 32  # tokens; the CPU build takes multiples of it
_CACHED_PROMPTS = 48  # what the key-value cache has room for when orders are compared

ASKED = [PromptSpec(DOCUMENTS, evaluated_placements(DOCUMENTS, (1,), SLOTS))]


def load(settings: argparse.Namespace) -> Recipe:
    """The toy's questions and, if nothing else is named, the toy."""
    cuda = settings.device == "cuda"
    return load_recipe(
        "quickstart",
        [
            *(f"model.path={settings.model}", "model.engine=vllm", f"data.train_examples={settings.examples}"),
            *(f"model.dtype={'bfloat16' if cuda else 'float32'}", f"runtime.samplers.gpus={int(cuda)}"),
            *(f"runtime.vllm.enforce_eager={not cuda}", f"runtime.vllm.max_num_seqs={SEQUENCES}"),
            *(f"runtime.samplers.batch_size={BATCH}", f"runtime.samplers.concurrent_batches={settings.batches}"),
            f"runtime.samplers.threads={settings.threads}",
        ],
    )


def read(recipe: Recipe) -> pa.Table:
    """The examples."""
    return examples_to_table(load_split(recipe.study.data, documents=DOCUMENTS, seed=0).train)


def bare(recipe: Recipe) -> dict[str, float]:
    """vLLM's own `LLM.generate`, given all prompts at once."""
    prompts, seeds = _prompts(recipe)
    params, llm = _params(recipe, seeds), _engine(recipe)
    start = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return _result(time.monotonic() - start, [len(output.outputs[0].token_ids) for output in outputs])


def pool(recipe: Recipe) -> dict[str, float]:
    """Our pool, prompts made on the way."""
    import ray

    from pipelines.executors.ray.session import ray_session

    class Clock:
        """Stands in for the live tracker_actor: remembers when the first batch began."""

        start: float | None = None

        def see(self, _pool: str, _actor: str) -> None:
            self.start = self.start or time.time()

        def read(self) -> float:
            assert self.start
            return self.start

    with ray_session():
        clock = ray.remote(num_cpus=0)(Clock).remote()
        examples = blocks_of_examples(read(recipe), ASKED, recipe.runtime.samplers)
        settings = {"temperature": TEMPERATURE, "top_p": 1.0, "max_new_tokens": NEW_TOKENS}
        answers = generate(recipe, recipe.study.model, examples, ASKED, **settings, tracker_actor=clock)
        tokens = [ids for part in answers.iter_batches(batch_format="pyarrow") for ids in part["sampled_ids"]]
        return _result(time.time() - ray.get(clock.read.remote()), [len(ids) for ids in tokens])


def processor(recipe: Recipe) -> dict[str, float]:
    """The processor of `ray.data.llm` with tokens going in and out."""
    import ray.data
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    from pipelines.executors.ray.session import ray_session

    prompts, seeds = _prompts(recipe)
    gpus = int(recipe.runtime.samplers.gpus)
    _set_cpu_engine(recipe)
    config = vLLMEngineProcessorConfig(
        model_source=recipe.study.model.path,
        engine_kwargs=_engine_arguments(recipe),
        batch_size=BATCH,
        max_concurrent_batches=recipe.runtime.samplers.concurrent_batches,
        concurrency=1,
        placement_group_config={"bundle_per_worker": {"CPU": 1, **({"GPU": gpus} if gpus else {})}},
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        log_engine_metrics=False,
        runtime_env={"env_vars": {name: os.environ[name] for name in os.environ if name.startswith("VLLM_")}},
    )
    with ray_session():
        stops = stop_token_ids(recipe.study.model, load_tokenizer(recipe.study.model))
        rows = [
            {
                "tokenized_prompt": prompt["prompt_token_ids"],
                "sampling_params": {
                    "temperature": TEMPERATURE,
                    "max_tokens": NEW_TOKENS,
                    "seed": seed,
                    "stop_token_ids": stops,
                    "detokenize": False,
                },
            }
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        table = ray.data.from_items(rows, override_num_blocks=len(rows) // BATCH)
        start, tokens = None, []
        for batch in build_processor(config)(table).iter_batches(batch_size=BATCH):
            start = start or time.time() - max(batch["time_taken_llm"])
            tokens += list(batch["num_generated_tokens"])
        assert start
        return _result(time.time() - start, tokens)


def orders(recipe: Recipe) -> dict[str, Any]:
    """Bare vLLM whose cache holds few prompts: placements of one example side by side, as we ask them, or shuffled."""
    prompts, seeds = _prompts(recipe)
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
    blocks = _CACHED_PROMPTS * (longest + NEW_TOKENS) // _BLOCK
    params = _params(recipe, seeds)
    llm = _engine(recipe, block_size=_BLOCK, num_gpu_blocks_override=blocks, max_num_seqs=16)
    shuffled = random.Random(0).sample(range(len(prompts)), len(prompts))
    found = {}
    for name, order in {"warm-up": range(16), "side by side": range(len(prompts)), "shuffled": shuffled}.items():
        llm.reset_prefix_cache()
        start = time.monotonic()
        outputs = llm.generate([prompts[at] for at in order], [params[at] for at in order], use_tqdm=False)
        seconds = time.monotonic() - start
        prompt_specs = sum(len(output.prompt_token_ids) for output in outputs)
        found[name] = {
            "seconds": seconds,
            "cached_share": sum(each.num_cached_tokens for each in outputs) / prompt_specs,
        }
    del found["warm-up"]
    return found


SIDES: dict[str, Callable[[Recipe], dict[str, Any]]] = {"bare": bare, "pool": pool, "ray.data.llm": processor}


def _prompts(recipe: Recipe) -> tuple[list[dict[str, list[int]]], list[int]]:
    table = build_prompts(read(recipe), recipe.study, ASKED, NEW_TOKENS, False)
    seeds = [int(seed) & (2**31 - 1) for seed in table["seed"].to_pylist()]
    return [{"prompt_token_ids": ids} for ids in table["prompt_ids"].to_pylist()], seeds


def _engine_arguments(recipe: Recipe) -> dict[str, Any]:
    from pos2distill.models.load import context_length

    model, settings = recipe.study.model, recipe.runtime.vllm
    return {
        "dtype": model.dtype,
        "max_model_len": context_length(model),
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "max_num_seqs": settings.max_num_seqs,
        # What the pool's engine and LLM take by themselves; an engine of ray.data.llm would take a server's 2048.
        "max_num_batched_tokens": 16384 if recipe.runtime.samplers.gpus else 4096,
        "enable_chunked_prefill": None if recipe.runtime.samplers.gpus else False,
        "generation_config": "vllm",
    }


def _engine(recipe: Recipe, **changes: Any) -> Any:
    _set_cpu_engine(recipe)
    from vllm import LLM

    return LLM(recipe.study.model.path, **(_engine_arguments(recipe) | changes))


def _set_cpu_engine(recipe: Recipe) -> None:
    """As the pool's engine sets it."""
    if not recipe.runtime.samplers.gpus:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(recipe.runtime.vllm.cpu_kv_cache_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(recipe.runtime.samplers.threads)
    os.environ["VLLM_NO_USAGE_STATS"] = "1"


def _params(recipe: Recipe, seeds: list[int]) -> list[Any]:
    from vllm import SamplingParams

    stops = stop_token_ids(recipe.study.model, load_tokenizer(recipe.study.model))
    return [
        SamplingParams(
            temperature=TEMPERATURE, max_tokens=NEW_TOKENS, seed=seed, stop_token_ids=stops, detokenize=False
        )
        for seed in seeds
    ]


def _result(seconds: float, tokens: list[int]) -> dict[str, float]:
    total = int(np.sum(tokens))
    return {"seconds": seconds, "prompts_a_second": len(tokens) / seconds, "prompts": len(tokens), "tokens": total}


def _in_a_process_of_its_own(what: str, batches: int = BATCHES) -> dict[str, Any]:
    """The result of one side: engines leave processes, settings and memory behind."""
    own = ["--side", what, "--batches", str(batches)]
    command = [sys.executable, "-m", "benchmarks.sampler.sampler", *sys.argv[1:], *own]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"')))
    return result


def main() -> None:
    """Every side in turn, some times; the best round of each counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="examples/toy/base")
    parser.add_argument("--examples", type=int, default=80)
    parser.add_argument("--threads", type=int, default=1, help="of the engine, on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=BATCHES, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=[*SIDES, "orders"], help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.side:
        print(json.dumps((SIDES | {"orders": orders})[settings.side](load(settings))))
        return
    rounds = [{side: _in_a_process_of_its_own(side) for side in SIDES} for _ in range(settings.rounds)]
    best = {side: max(each[side]["prompts_a_second"] for each in rounds) for side in SIDES}
    report = {
        "rounds": rounds,
        "prompts_a_second": best,
        "of_bare_vllm": {side: rate / best["bare"] for side, rate in best.items()},
        "threads": settings.threads,
        "pool_with_fewer_batches": _in_a_process_of_its_own("pool", FEWER_BATCHES),
        "orders": _in_a_process_of_its_own("orders"),
        **circumstances("ray", "vllm-cpu" if settings.device == "cpu" else "vllm", device=settings.device),
    }
    Path(__file__).with_name(f"sampler_{settings.device}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
