"""What an answer costs with each inference method, on transformers with a real model: time relative to the plain model.

python -m benchmarks.methods.answer_time MODEL DATA [--documents 8] [--questions 12] [--repeats 1]

All models stay loaded and answer the same prompts as one batch, one after the other; each round begins with another
method. All answers have the same number of tokens, so that no method is faster because its answers end early. LPES's
scales rise from 1 to 1.3, since their values do not change its time; the other methods have their defaults. `reorder`
sends the model prompts of the same length and is not measured. Writes answer_time.json to this folder.
"""

import argparse
import asyncio
import json
from pathlib import Path

import numpy as np

from benchmarks.circumstances import circumstances
from benchmarks.methods.timing import (
    NEW_TOKENS,
    THREADS,
    Kind,
    answer,
    ratio,
    read_examples,
    rising_scales,
    seconds_by_round,
)
from pos2distill.config import ModelSection
from pos2distill.config.inference import InferenceSection
from pos2distill.models.load import load_tokenizer
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.tasks.prompts import PromptBuilder

# A token of SmolLM2's vocabulary that occurs in no answer, so that no answer ends early.
UNUSED_TOKEN = "<reponame>"


def load_kinds(model: ModelSection) -> list[Kind]:
    """The plain model, and one with each method."""
    scales = rising_scales(model)
    return [
        Kind("base", _engine(model, InferenceSection())),
        Kind("lpes", _engine(model.model_copy(update={"rope_scales": scales}), InferenceSection())),
        Kind("ms_poe", _engine(model, InferenceSection(method="ms_poe"))),
        Kind("attention_buckets", _engine(model, InferenceSection(method="attention_buckets"))),
    ]


def _engine(model: ModelSection, inference: InferenceSection) -> HfEngine:
    return HfEngine(model, inference, threads=THREADS, device="cpu")


def rotations(count: int) -> list[list[int]]:
    """The numbers 0 to count - 1 in cyclic order, once beginning with each of them."""
    return [[(first + step) % count for step in range(count)] for first in range(count)]


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("data", type=Path, help="a JSONL file of questions (docs/data.md)")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=12, help="all with the gold document in the middle")
    parser.add_argument("--repeats", type=int, default=1, help="of a round for each method as the first one")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="where the report is written")
    options = parser.parse_args()

    model = ModelSection(path=options.model, dtype="bfloat16", max_length=2048)
    tokenizer = load_tokenizer(model)
    build = PromptBuilder(tokenizer, "qa", max_length=model.max_length or 0, reserve=NEW_TOKENS)
    examples = read_examples(options.data, options.questions)
    prompts = [build(example, options.documents, (options.documents // 2,)) for example in examples]
    params = SamplingParams(0.0, 1.0, NEW_TOKENS, stop_ids=(tokenizer.get_vocab()[UNUSED_TOKEN],))

    kinds = load_kinds(model)
    loop = asyncio.new_event_loop()
    for kind in kinds:
        lengths = {len(each) for each in answer(loop, kind.engine, prompts[:2], params)}
        assert lengths == {NEW_TOKENS}, (kind.name, lengths)
    orders = rotations(len(kinds)) * options.repeats
    seconds_RK = seconds_by_round(loop, kinds, prompts, params, orders)

    seconds = dict(zip([kind.name for kind in kinds], seconds_RK.T, strict=True))
    report = circumstances("torch", "transformers") | {
        "model": Path(options.model).name,
        "dtype": model.dtype,
        "prompts": len(prompts),
        "prompt_tokens": float(np.mean([len(prompt) for prompt in prompts])),
        "new_tokens": NEW_TOKENS,
        "seconds": {name: seconds_R.tolist() for name, seconds_R in seconds.items()},
        "ratio": {name: ratio(seconds_R, seconds["base"]) for name, seconds_R in seconds.items() if name != "base"},
    }
    (options.output / "answer_time.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
