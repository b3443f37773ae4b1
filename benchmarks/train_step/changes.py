"""What does each optimization of the training step save? Run:

  python -m benchmarks.train_step.changes [--device cuda] [--repetitions 5]

Each optimization is removed alone from the step that has all of them. The same is measured for torch.compile, which the
step does not use. One process runs all steps in turn and compares their losses; memory is measured in one process for
each step. The model has fewer layers than that of `train_step`, since all steps are in memory together.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.circumstances import circumstances
from benchmarks.train_step.measuring import Step, free, measure_peak, run_in_own_process, run_in_turn
from benchmarks.train_step.problem import SIZES, OurStep, Questions, Size, make_study, model_folder
from pos2distill.config import Study
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.training.rows import Row

LAYERS = {"cpu": 4, "cuda": 8}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative tolerance of losses, by precision."""


def with_everything(size: Size, folder: Path, device: torch.device) -> OurStep:
    """The step as it is, with all rows in one micro-batch."""
    study = make_study(size, folder)
    return OurStep(replace(size, micro_batch_rows=size.rows), study, Questions(size, study, device), device)


def without_shared_prefixes(size: Size, folder: Path, device: torch.device) -> Step:
    """Packs every row whole, without sharing the prefixes that rows of one sample have in common."""

    def pack(rows: Sequence[Row], _: Study) -> ResponseBatch:
        return collate([row.prompt_ids for row in rows], [row.response_ids for row in rows])

    step = with_everything(size, folder, device)

    def patched() -> float:
        with patch("pos2distill.training.micro_batches.pack", pack):
            return step()

    return patched


def in_micro_batches(size: Size, folder: Path, device: torch.device) -> Step:
    """Several micro-batches: one more forward pass computes the losses that the row weights depend on."""
    study = make_study(size, folder)
    return OurStep(size, study, Questions(size, study, device), device)


def without_chunked_losses(size: Size, folder: Path, device: torch.device) -> Step:
    """Computes the logits of all response tokens, and the divergences from them, at once."""
    step = with_everything(size, folder, device)

    def patched() -> float:
        with patch("pos2distill.models.loss_head.CHUNK_LOGITS", 2**40):
            return step()

    return patched


def without_fused_adamw(size: Size, folder: Path, device: torch.device) -> Step:
    """AdamW as separate operations."""
    step = with_everything(size, folder, device)
    for group in step.strategy.optimizer.param_groups:  # type: ignore[attr-defined]
        group["fused"] = False
    return step


def without_gradient_checkpointing(size: Size, folder: Path, device: torch.device) -> Step:
    """Stores activations: the setting `gradient_checkpointing: false`."""
    return with_everything(replace(size, gradient_checkpointing=False), folder, device)


def with_compiled_parts(size: Size, folder: Path, device: torch.device) -> Step:
    """Compiles norms and MLPs (torch.compile): most of what is neither attention nor a product with weights."""
    step = with_everything(size, folder, device)
    for name, module in step.strategy.student.lm.named_modules():
        if name.endswith(("norm", "mlp")):
            module.compile(dynamic=True)
    return step


UNCHANGED = "unchanged"
STEPS: dict[str, Callable[[Size, Path, torch.device], Step]] = {
    UNCHANGED: with_everything,
    "no shared prefixes": without_shared_prefixes,
    "several micro-batches": in_micro_batches,
    "no chunked losses": without_chunked_losses,
    "no fused AdamW": without_fused_adamw,
    "no gradient checkpointing": without_gradient_checkpointing,
    "norms and MLPs compiled": with_compiled_parts,
}


def measure(size: Size, folder: str, device: torch.device, repetitions: int) -> dict[str, Any]:
    """Seconds of all steps, run in turn by this process."""
    steps = {name: build(size, Path(folder), device) for name, build in STEPS.items()}
    seconds, _ = run_in_turn(steps, device, repetitions, TOLERANCE[size.precision])
    free(steps)
    fastest = {name: min(times) for name, times in seconds.items()}
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "seconds": seconds,
        "fastest_over_unchanged": {name: each / fastest[UNCHANGED] for name, each in fastest.items()},
        "median_over_unchanged": {name: each / median[UNCHANGED] for name, each in median.items()},
    }


def main() -> None:
    """Measure, compare, and write the report to this folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--memory", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    size = replace(SIZES[options.device], layers=LAYERS[options.device])
    if options.memory:
        step = STEPS[options.memory](size, Path(options.model), device)
        step()
        print(json.dumps(measure_peak(step, device)))
        return
    with model_folder() as folder:
        times = measure(size, folder, device, options.repetitions)
        peaks = {}
        for name in STEPS:
            arguments = ("--device", options.device, "--model", folder, "--memory", name)
            peaks[name] = run_in_own_process("benchmarks.train_step.changes", *arguments)["peak_gib"]
    report = {
        "size": size.as_dict(),
        **times,
        "peak_gib": peaks,
        **circumstances("torch", "transformers", device=options.device),
    }
    Path(__file__).with_name(f"changes_{options.device}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
