"""What does an R1 step of a real model cost on CPUs? SmolLM2-135M-Instruct, one example of ten documents, K = 2.

The same step is made in several ways: with recomputed activations and one row at a time, so that one pass computes the
losses and another the gradient; without recomputation; and with all rows in one pass. Each way runs in float32 and, if
the CPU can multiply bfloat16, in bfloat16. Each variant runs in its own process, one after the other, and makes two
steps; the time of the second counts. Each runs once more for its memory. With several rounds the variants run in turn,
the median of a variant's times counts, and the report has the interval over rounds of its speed relative to the first
variant. Tokens per second count every row's tokens, including those that rows share and that are computed once.

  python -m examples.smollm2.make_model
  python -m benchmarks.real.step --output benchmarks/real/step_NAME.json
  python -m benchmarks.real.step --rounds 3 --only "float32, row by row, recomputed" "bfloat16, one pass" --output FILE
  python -m benchmarks.real.step --profile "bfloat16, one pass" --output benchmarks/real/step_profile.json
  python -m benchmarks.real.step --rates --output benchmarks/real/step_rates.json
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.circumstances import circumstances
from benchmarks.methods.timing import ratio
from benchmarks.train_step.measuring import measure_peak, run_in_own_process, wall
from benchmarks.train_step.problem import SIZES, OurStep, Questions, Size, make_study
from benchmarks.train_step.train_step import TOLERANCE, count_tokens, profile_step
from examples.smollm2.make_model import DEFAULT_FOLDER, check_folder
from pos2distill.errors import UserError
from pos2distill.hardware import cpu_is_faster_in_bfloat16
from pos2distill.models.architecture import torch_dtype

CPU = torch.device("cpu")
PROBLEM: dict[str, Any] = {"documents": 10, "document_tokens": 150, "examples": 1, "k": 2}
# The made-up tokens are drawn from this vocabulary. The other sizes are not used, since the model has its own.
SIZE = replace(SIZES["cpu"], vocabulary=49152, **PROBLEM)


@dataclass(frozen=True)
class Variant:
    """How a step is computed. one_pass: all rows are in one micro-batch; otherwise each row is one."""

    precision: str
    gradient_checkpointing: bool
    one_pass: bool

    def size(self) -> Size:
        """The problem in this variant."""
        return replace(
            SIZE,
            precision=self.precision,
            gradient_checkpointing=self.gradient_checkpointing,
            micro_batch_rows=SIZE.rows if self.one_pass else 1,
        )


VARIANTS = {
    "float32, row by row, recomputed": Variant("float32", True, False),
    "float32, row by row": Variant("float32", False, False),
    "float32, one pass, recomputed": Variant("float32", True, True),
    "float32, one pass": Variant("float32", False, True),
}
if cpu_is_faster_in_bfloat16():
    VARIANTS["bfloat16, row by row, recomputed"] = Variant("bfloat16", True, False)
    VARIANTS["bfloat16, one pass"] = Variant("bfloat16", False, True)


def measure(variant: Variant, model: Path) -> dict[str, float]:
    """Loss of the first step of a variant; seconds and memory of the second.

    The loss is that of the first step, before any update. Adam's first update moves nearly every weight by the learning
    rate. After it, the losses of two precisions differ by a factor of two, although their gradients agree to a cosine
    above 0.99.
    """
    step, questions = build_step(variant, model)
    loss = step()
    seconds: list[float] = []

    def second() -> float:
        seconds.append(wall(step, CPU))
        return loss

    memory = measure_peak(second, CPU)
    return {"loss": loss, "seconds": seconds[0], **memory, **count_tokens(questions.rows())}


def build_step(variant: Variant, model: Path) -> tuple[OurStep, Questions]:
    """The step of a variant, and what it trains on."""
    size = variant.size()
    study = make_study(size, model)
    questions = Questions(size, study, CPU)
    return OurStep(size, study, questions, CPU), questions


def profile_variant(name: str, model: Path) -> dict[str, Any]:
    """The operations on which the second step of a variant spends its time."""
    step, _ = build_step(VARIANTS[name], model)
    step()
    return {"problem": PROBLEM, "variant": name, "operations": profile_step(step, CPU)}


def product_rates() -> dict[str, float]:
    """GFLOP/s of the largest product of one layer, 1,600 tokens with the MLP's weights, by precision; best of three."""
    rates = {}
    for name in ("float32", "bfloat16"):
        tokens, hidden, intermediate = 1600, 576, 1536
        states = torch.randn(tokens, hidden).to(torch_dtype(name))
        weights = torch.randn(hidden, intermediate).to(torch_dtype(name))
        seconds = min(wall(partial(torch.matmul, states, weights), CPU) for _ in range(3))
        rates[name] = 2 * tokens * hidden * intermediate / seconds / 1e9
    return rates


def attention_rates() -> dict[str, dict[str, float]]:
    """GFLOP/s of torch's causal attention in one layer, 1,640 tokens, by precision and direction; best of three.

    With L tokens and H heads of D dimensions, the two products of the forward pass need 2 L^2 H D operations where half
    of the pairs of tokens are masked, the five of the backward pass 5 L^2 H D.
    """
    tokens, heads, dimensions = 1640, 9, 64
    operations = 2 * tokens**2 * heads * dimensions
    rates = {}
    for name in ("float32", "bfloat16"):
        shape = (1, heads, tokens, dimensions)
        query, key, value = (torch.randn(shape, dtype=torch_dtype(name), requires_grad=True) for _ in range(3))
        forward = partial(scaled_dot_product_attention, query, key, value, is_causal=True)
        attended = forward()
        backward = partial(attended.backward, torch.ones_like(attended), retain_graph=True)
        rates[name] = {
            "forward": operations / min(wall(forward, CPU) for _ in range(3)) / 1e9,
            "backward": 2.5 * operations / min(wall(backward, CPU) for _ in range(3)) / 1e9,
        }
    return rates


def measure_in_turn(names: Sequence[str], rounds: int, arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """All variants in each round, each in its own process; then each once more for its memory.

    The times are those of training, which does not return memory to the system at once; the peaks are of processes that
    do (`run_in_own_process`). Of a variant's times the median counts, and all are kept.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        for name in names:
            timed = _measure_in_own_process(name, arguments, returns_memory=False)
            seconds[name].append(timed["seconds"])
            print(f"round {number}, {name}: {timed['seconds']:.1f} s", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        result = _measure_in_own_process(name, arguments, returns_memory=True)
        slower = {"seconds_returning_memory": result["seconds"]}
        result |= {"seconds": statistics.median(seconds[name]), "seconds_by_round": seconds[name]} | slower
        results[name] = result
    return results


def _measure_in_own_process(name: str, arguments: Sequence[str], *, returns_memory: bool) -> dict[str, Any]:
    own = ("--variant", name, *arguments)
    return run_in_own_process("benchmarks.real.step", *own, returns_memory=returns_memory)


def check_losses(results: Mapping[str, Mapping[str, float]]) -> None:
    """All variants make the same step, so the losses of those of one precision agree up to rounding.

    Raises:
        AssertionError: a variant differs from the first one of its precision; names it.
    """
    first: dict[str, float] = {}
    for name, result in results.items():
        precision = VARIANTS[name].precision
        expected = first.setdefault(precision, result["loss"])
        tolerance = TOLERANCE[precision]
        if abs(result["loss"] - expected) > tolerance * expected:
            raise AssertionError(f"{name}: expected a loss of {expected}, got {result['loss']}")


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tokens per second of each variant, and its time and memory as ratios to the first."""
    first = next(iter(results.values()))
    first_R = np.asarray(first["seconds_by_round"])
    summary: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        summary[name] = {
            "tokens_per_second": result["total"] / result["seconds"],
            "speed_over_first": first["seconds"] / result["seconds"],
            "peak_over_first": result["peak_gib"] / first["peak_gib"],
        }
        if len(first_R) > 1:
            summary[name]["speed_ratio"] = ratio(first_R, np.asarray(result["seconds_by_round"]))
    return summary


def main() -> None:
    """Measure all variants, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="model folder (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="report to write, a JSON file")
    parser.add_argument("--profile", choices=VARIANTS, metavar="VARIANT", help="profile a step of it, and time none")
    parser.add_argument("--rates", action="store_true", help="measure products and attention by themselves, no step")
    parser.add_argument("--rounds", type=int, default=1, help="how often each variant is timed (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help="of all variants, time these")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    torch.set_num_threads(os.cpu_count() or 1)
    if options.variant:
        print(json.dumps(measure(VARIANTS[options.variant], options.model)))
        return
    if not options.output.parent.is_dir():
        parser.error(f"--output: {options.output.parent}: no such folder")
    if options.rates:
        rates = {"product_gflops": product_rates(), "attention_gflops": attention_rates()} | circumstances("torch")
        options.output.write_text(json.dumps(rates, indent=2) + "\n")
        return
    try:
        # Without a model in the folder, the helpers of `train_step` would make a random one there.
        check_folder(options.model)
    except UserError as error:
        parser.error(str(error))
    if options.profile:
        profiled = profile_variant(options.profile, options.model) | circumstances("torch", "transformers")
        options.output.write_text(json.dumps(profiled, indent=2) + "\n")
        print(json.dumps(profiled["operations"][:12], indent=2))
        return
    arguments = ("--model", str(options.model), "--output", str(options.output))
    # A variant that is named twice is measured once.
    names = list(dict.fromkeys(options.only or VARIANTS))
    results = measure_in_turn(names, options.rounds, arguments)
    check_losses(results)
    report: dict[str, Any] = {
        "problem": PROBLEM,
        "product_gflops": product_rates(),
        "results": results,
        "summary": summarize(results),
    }
    report |= circumstances("torch", "transformers")
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["summary"], indent=2))


if __name__ == "__main__":
    main()
