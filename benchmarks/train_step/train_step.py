"""What does an R1 optimizer step cost, compared with a plain one, TRL's loss functions and the hardware's limit?

Every variant makes the same steps on the same rows, and their losses are compared. One process runs the variants in
turn and measures times; memory is measured in one process for each variant. Run:

  python -m benchmarks.train_step.train_step [--device cuda] [--one-pass] [--trl FOLDER]

FOLDER holds TRL 1.16, which is not a dependency of the project:
  uv pip install --target FOLDER --no-deps trl==1.16.* datasets xxhash multiprocess dill
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.circumstances import circumstances
from benchmarks.train_step.measuring import Step, free, measure_peak, run_in_own_process, run_in_turn, wall
from benchmarks.train_step.problem import SIZES, OurStep, Questions, Size, make_study, model_folder
from benchmarks.train_step.variants import PlainStep, straightforward, trl_chunked, trl_gkd
from pos2distill.models.packing import pack_rows
from pos2distill.training.rows import Row

GROUPS = (
    ("ours", "ours_in_pairs", "ours_one_pass", "ours_resident"),
    ("ours", "straightforward", "trl_chunked", "trl_gkd"),
)
"""Variants that run in turn. There are two groups because a GPU does not have enough memory for all of them."""

VARIANTS = tuple(dict.fromkeys([*GROUPS[0], *GROUPS[1]]))
LOSSES = {"straightforward": straightforward, "trl_chunked": trl_chunked, "trl_gkd": trl_gkd}
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative tolerance of losses, by precision."""


def build(name: str, size: Size, folder: Path, device: torch.device) -> Step:
    """Build a variant. Its first step is slower than the others."""
    teacher = "cached"
    if name in LOSSES or name == "ours_resident":
        teacher = "resident"
    study = make_study(size, folder, teacher=teacher)
    questions = Questions(size, study, device)
    if name in LOSSES:
        return PlainStep(size, study, questions, device, LOSSES[name])
    rows = {"ours_in_pairs": 2, "ours_one_pass": size.rows}.get(name, size.micro_batch_rows)
    return OurStep(replace(size, micro_batch_rows=rows), study, questions, device)


def matrix_rate(size: Size, device: torch.device) -> float:
    """FLOP/s of a large matrix product in the precision of training; the best of five."""
    edge = 2048
    if device.type == "cuda":
        edge = 8192
    dtype = torch.float32
    if size.precision == "bfloat16":
        dtype = torch.bfloat16
    left = torch.randn(edge, edge, device=device, dtype=dtype)
    right = torch.randn(edge, edge, device=device, dtype=dtype)
    return 2 * edge**3 / min(wall(lambda: left @ right, device) for _ in range(5))


def floor_flops(size: Size, folder: Path, device: torch.device, name: str) -> dict[str, float]:
    """FLOPs of the products with weights that no step of a variant can avoid, by purpose.

    6 FLOPs (2 forward, 4 backward) for each weight of the layers and each token, where a prefix that rows of an example
    share counts once; the same in the head, at response tokens only, and 2 more for the teacher's logits, once per
    example; the forward pass of a resident teacher, once per example. Attention itself, which grows with the square of
    the length, is not included.
    """
    rows = make_rows(size, folder, device)
    attention_weights = 2 * size.hidden + 2 * size.hidden * size.key_value_heads // size.heads
    layer_weights = size.hidden * (attention_weights + 3 * size.intermediate)
    head_weights = size.vocabulary * size.hidden
    one_row_per_example = {row.sample.example.example_id: row for row in rows}.values()
    student_tokens = sum(len(row.response_ids) for row in rows)
    teacher_tokens = sum(len(row.response_ids) for row in one_row_per_example)
    teacher_flops = 0.0
    if name == "ours_resident":
        teacher_inputs = sum(len(row.sample.teacher_prompt_ids) + len(row.response_ids) for row in one_row_per_example)
        teacher_flops = 2.0 * layer_weights * size.layers * teacher_inputs
    return {
        "layers": 6.0 * layer_weights * size.layers * count_tokens(rows)["shared_once"],
        "heads": 6.0 * head_weights * student_tokens + 2.0 * head_weights * teacher_tokens,
        "teacher": teacher_flops,
    }


def make_rows(size: Size, folder: Path, device: torch.device) -> list[Row]:
    """The rows of a step."""
    return Questions(size, make_study(size, folder, teacher="resident"), device).rows()


def count_tokens(rows: Sequence[Row]) -> dict[str, int]:
    """Tokens of all rows (`total`), and with shared prefixes counted once (`shared_once`)."""
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    example_ids = [row.sample.example.example_id for row in rows]
    packed = pack_rows([row.prompt_ids for row in rows], lengths, example_ids)
    return {"total": sum(lengths), "shared_once": sum(packed.query_lengths)}


def measure_memory(name: str, size: Size, folder: Path, device: torch.device) -> dict[str, float]:
    """`measure_peak` of a variant, after its first step."""
    step = build(name, size, folder, device)
    step()
    return measure_peak(step, device)


def measure_memory_in_own_process(name: str, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """`measure_memory` in its own process."""
    arguments = ["--device", options.device, "--memory", name, "--model", folder]
    if options.trl:
        arguments += ["--trl", options.trl]
    if options.one_pass:
        arguments.append("--one-pass")
    return run_in_own_process("benchmarks.train_step.train_step", *arguments)


def profile_step(step: Step, device: torch.device) -> list[dict[str, Any]]:
    """The operations of one step by their own time, as a fraction of the total, down to a thousandth."""
    activities, attribute = [ProfilerActivity.CPU], "self_cpu_time_total"
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        attribute = "self_device_time_total"
    with profile(activities=activities) as profiler:
        step()
    events = [(getattr(event, attribute), event) for event in profiler.key_averages()]
    events.sort(key=lambda pair: -pair[0])
    total = sum(time for time, _ in events)
    operations = []
    for time, event in events:
        if time > total / 1000:
            operations.append({"operation": event.key, "calls": event.count, "fraction": round(time / total, 4)})
    return operations


def measure_times(names: Sequence[str], size: Size, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """The report of these variants, without their memory and the circumstances."""
    device = torch.device(options.device)
    # Measured again after each group, since the speed of a machine drifts.
    rates = [matrix_rate(size, device)]
    seconds, losses = [], []
    for group in GROUPS:
        steps = {name: build(name, size, Path(folder), device) for name in group if name in names}
        group_seconds, group_losses = run_in_turn(steps, device, options.repetitions, TOLERANCE[size.precision])
        seconds.append(group_seconds)
        losses.append(group_losses)
        free(steps)
        rates.append(matrix_rate(size, device))
    rate = statistics.mean(rates)
    floors, floor_fractions = {}, {}
    for name in names:
        if name not in LOSSES:
            flops = floor_flops(size, Path(folder), device, name)
            floors[name] = {purpose: each / 1e12 for purpose, each in flops.items()}
            # Our variants are all in the first group.
            floor_fractions[name] = sum(flops.values()) / rate / statistics.median(seconds[0][name])
    return {
        "seconds": seconds,
        "losses": losses,
        "matrix_tflops": rate / 1e12,
        "size": size.as_dict(),
        "tokens": count_tokens(make_rows(size, Path(folder), device)),
        "time_over_ours": over_ours(seconds, statistics.median),
        "best_time_over_ours": over_ours(seconds, min),
        "floor_tflop": floors,
        "fraction_of_floor": floor_fractions,
        "profile_of_ours": profile_step(build("ours", size, Path(folder), device), device),
    }


def measure_memories(names: Sequence[str], folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """The memory of these variants, each in its own process."""
    memory = {name: measure_memory_in_own_process(name, folder, options) for name in names}
    over_ours = {name: each["peak_gib"] / memory["ours"]["peak_gib"] for name, each in memory.items()}
    return {"memory": memory, "memory_over_ours": over_ours}


def over_ours(
    seconds: Sequence[Mapping[str, Sequence[float]]], summarize: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """Each variant's time over that of `ours` in the same group."""
    ratios = {}
    for group in seconds:
        ours = summarize(group["ours"])
        for name, times in group.items():
            ratios[name] = summarize(times) / ours
    return ratios


def main() -> None:
    """Measure, compare, and write the report to this folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--trl", help="folder with TRL 1.16; by default, TRL's variants are left out")
    parser.add_argument("--one-pass", action="store_true", help="every variant has all rows in one micro-batch")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--memory", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        sys.path.append(options.trl)  # after the environment's own packages
    size, device = SIZES[options.device], torch.device(options.device)
    skipped: set[str] = set()
    if importlib.util.find_spec("trl") is None:
        skipped |= {"trl_chunked", "trl_gkd"}
    suffix = ""
    if options.one_pass:
        size = replace(size, micro_batch_rows=size.rows)
        # Left out: the first would have several micro-batches, the second equals `ours`, the third needs 13 GiB.
        skipped |= {"ours_in_pairs", "ours_one_pass", "trl_gkd"}
        suffix = "_one_pass"
    torch.set_num_threads(os.cpu_count() or 1)
    if options.memory:
        print(json.dumps(measure_memory(options.memory, size, Path(options.model), device)))
        return
    names = [name for name in VARIANTS if name not in skipped]
    path = Path(__file__).with_name(f"train_step_{options.device}{suffix}.json")
    with model_folder() as folder:
        report = measure_times(names, size, folder, options)
        report |= circumstances("torch", "transformers", device=options.device)
        # Written twice, so that a run that is stopped while it measures memory keeps its times.
        path.write_text(json.dumps(report, indent=2) + "\n")
        report |= measure_memories(names, folder, options)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
