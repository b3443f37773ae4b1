"""What does an R1 optimizer step cost, against a straightforward one, TRL's loss functions and the hardware's floor?

Every variant makes the same steps on the same rows; their losses are held to each other. Times come from steps made in
turn by one process, memory from one process a variant. Run:

  python -m benchmarks.train_step.train_step [--device cuda] [--one-pass] [--trl FOLDER]

FOLDER holds TRL 1.16, which no lock of the project brings:
  uv pip install --target FOLDER --no-deps trl==1.16.* datasets xxhash multiprocess dill
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.circumstances import circumstances
from benchmarks.train_step.measuring import Step, free, make_in_turn, measure_peak, run_apart, wall
from benchmarks.train_step.problem import SIZES, OurStep, Questions, Size, make_study, model_folder
from benchmarks.train_step.variants import PlainStep, straightforward, trl_chunked, trl_gkd
from pos2distill.models.packing import pack_rows
from pos2distill.training.rows import Row

GROUPS = (
    ("ours", "ours_in_pairs", "ours_one_pass", "ours_resident"),
    ("ours", "straightforward", "trl_chunked", "trl_gkd"),
)
"""Variants made in turn; two groups, since a GPU has no room for all of them at once."""

VARIANTS = tuple(dict.fromkeys(name for group in GROUPS for name in group))
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Of losses, as a share."""


def build(name: str, size: Size, folder: Path, device: torch.device) -> Step:
    """A variant, ready for its first step."""
    ours = name.startswith("ours")
    study = make_study(size, folder, teacher="cached" if ours and name != "ours_resident" else "resident")
    questions = Questions(size, study, device)
    if ours:
        rows = {"ours_in_pairs": 2, "ours_one_pass": size.rows}.get(name, size.micro_batch_rows)
        return OurStep(replace(size, micro_batch_rows=rows), study, questions, device)
    losses = {"straightforward": straightforward, "trl_chunked": trl_chunked, "trl_gkd": trl_gkd}[name]
    return PlainStep(size, study, questions, device, losses)


def matrix_rate(size: Size, device: torch.device) -> float:
    """FLOP/s of a large matrix product in the precision trained in; the best of five."""
    edge = 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if size.precision == "bfloat16" else torch.float32
    one, other = (torch.randn(edge, edge, device=device, dtype=dtype) for _ in range(2))
    return 2 * edge**3 / min(wall(lambda: one @ other, device) for _ in range(5))


def floor_flops(size: Size, folder: Path, device: torch.device, name: str) -> dict[str, float]:
    """Products with weights that a step cannot do without, by what they are for.

    Six a weight and token (two forward, four backward) in the layers, of tokens that rows of an example share once; in
    the head at response tokens alone, with two more for the teacher's, once an example; a resident teacher's forward
    pass, once an example. Attention itself, which grows with the square of the length, is not among them.
    """
    rows = Questions(size, make_study(size, folder, teacher="resident"), device).rows()
    layer = size.hidden * (
        2 * size.hidden + 2 * size.hidden * size.key_value_heads // size.heads + 3 * size.intermediate
    )
    head = size.vocabulary * size.hidden
    examples = {row.sample.example.example_id: row for row in rows}.values()
    teacher_tokens = sum(len(row.sample.prompt_ids) + len(row.response_ids) for row in examples)
    response, distinct = (sum(len(row.response_ids) for row in some) for some in (rows, examples))
    return {
        "layers": 6.0 * layer * size.layers * tokens_of(rows)["once"],
        "heads": 6.0 * head * response + 2.0 * head * distinct,
        "teacher": 0.0 if name != "ours_resident" else 2.0 * layer * size.layers * teacher_tokens,
    }


def tokens_of(rows: Sequence[Row]) -> dict[str, int]:
    """Tokens of the rows one by one, and with what rows of an example share counted once."""
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    examples = [row.sample.example.example_id for row in rows]
    packed = pack_rows([row.prompt_ids for row in rows], lengths, examples)
    return {"in_all": sum(lengths), "once": sum(packed.query_lengths)}


def measure_memory(name: str, size: Size, folder: Path, device: torch.device) -> dict[str, float]:
    """A variant's `measure_peak`, after its first step."""
    step = build(name, size, folder, device)
    step()
    return measure_peak(step, device)


def measure_apart(name: str, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """`measure_memory` in a process of its own."""
    arguments = ["--device", options.device, "--memory", name, "--model", folder]
    arguments += ["--trl", options.trl] if options.trl else []
    arguments += ["--one-pass"] if options.one_pass else []
    return run_apart("benchmarks.train_step.train_step", *arguments)


def profile_step(step: Step, device: torch.device) -> list[dict[str, Any]]:
    """Where one step's time goes: operations by their own time, as a share of all, down to a thousandth."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        step()
    attribute = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, attribute))
    total = sum(getattr(event, attribute) for event in events)
    return [
        {"operation": event.key, "calls": event.count, "share": round(getattr(event, attribute) / total, 4)}
        for event in events
        if getattr(event, attribute) > total / 1000
    ]


def main() -> None:
    """Measure, compare, write the report beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--trl", help="folder with TRL 1.16; without it, TRL's variants are left out")
    parser.add_argument("--one-pass", action="store_true", help="every variant takes all rows in one micro-batch")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--memory", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        sys.path.append(options.trl)  # behind the environment's own packages
    names = [name for name in VARIANTS if not name.startswith("trl") or importlib.util.find_spec("trl")]
    size, device = SIZES[options.device], torch.device(options.device)
    if options.one_pass:
        size = replace(size, micro_batch_rows=size.rows)
        # Two that would be the same or would not, and 13 GiB of logits.
        names = [name for name in names if name not in ("ours_in_pairs", "ours_one_pass", "trl_gkd")]
    torch.set_num_threads(os.cpu_count() or 1)
    if options.memory:
        print(json.dumps(measure_memory(options.memory, size, Path(options.model), device)))
        return
    with model_folder() as folder:
        rates, seconds, losses = [matrix_rate(size, device)], [], []
        for group in GROUPS:
            steps = {name: build(name, size, Path(folder), device) for name in group if name in names}
            own_seconds, own_losses = make_in_turn(steps, device, options.repetitions, TOLERANCE[size.precision])
            seconds.append(own_seconds)
            losses.append(own_losses)
            free(steps)
            rates.append(matrix_rate(size, device))
        rate = statistics.mean(rates)  # of a machine whose speed drifts
        over_ours, best_over_ours = (
            {name: of(each) / of(group["ours"]) for group in seconds for name, each in group.items()}
            for of in (statistics.median, min)
        )
        median = {name: statistics.median(each) for group in seconds[::-1] for name, each in group.items()}
        tokens = tokens_of(Questions(size, make_study(size, Path(folder), teacher="resident"), device).rows())
        floors = {name: floor_flops(size, Path(folder), device, name) for name in names if name.startswith("ours")}
        memory = {name: measure_apart(name, folder, options) for name in names}
        profiled = profile_step(build("ours", size, Path(folder), device), device)
    report = {
        "seconds": seconds,
        "losses": losses,
        "matrix_tflops": rate / 1e12,
        "size": {field: getattr(size, field) for field in size.__slots__},
        "tokens": tokens,
        "time_over_ours": over_ours,
        "best_time_over_ours": best_over_ours,
        "memory": memory,
        "memory_over_ours": {name: gib["peak_gib"] / memory["ours"]["peak_gib"] for name, gib in memory.items()},
        "floor_tflop": {name: {kind: flops / 1e12 for kind, flops in each.items()} for name, each in floors.items()},
        "share_of_floor": {name: sum(each.values()) / rate / median[name] for name, each in floors.items()},
        "profile_of_ours": profiled,
        **circumstances("torch", "transformers", device=options.device),
    }
    Path(__file__).with_name(f"train_step_{options.device}{'_one_pass' * options.one_pass}.json").write_text(
        json.dumps(report, indent=2) + "\n"
    )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
