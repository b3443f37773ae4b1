"""What does each change to the training step bring? Each is taken away by itself from the step that has them all; and
what compiling would bring, which it has not. Run:

  python -m benchmarks.train_step.changes [--device cuda] [--repetitions 5]

The steps are made in turn by one process, and their losses held to each other; memory comes from a process for each.
On a CPU the model has fewer layers than `train_step`'s, so that all is done in minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.circumstances import circumstances
from benchmarks.train_step.problem import SIZES, OurStep, Questions, Size, make_study, model_folder
from benchmarks.train_step.train_step import Step, measure_peak, wall
from pos2distill.config import Study
from pos2distill.models.responses import ResponseBatch, collate
from pos2distill.training.rows import Row

LAYERS = 4  # on a CPU
TOLERANCE = 1e-5  # of losses, in float32


def with_everything(size: Size, folder: Path, device: torch.device) -> OurStep:
    """All rows in one micro-batch, which share their beginnings."""
    study = make_study(size, folder)
    return OurStep(size, study, Questions(size, study, device), device, one_pass=True)


def without_sharing(size: Size, folder: Path, device: torch.device) -> Step:
    """Every row laid down whole."""

    def lay(rows: Sequence[Row], _: Study) -> ResponseBatch:
        return collate([row.prompt_ids for row in rows], [row.response_ids for row in rows])

    step = with_everything(size, folder, device)

    def patched() -> float:
        with patch("pos2distill.training.trainer._lay", lay):
            return step()

    return patched


def in_micro_batches(size: Size, folder: Path, device: torch.device) -> Step:
    """Several micro-batches: one more forward pass tells the losses that the weights depend on."""
    study = make_study(size, folder)
    return OurStep(size, study, Questions(size, study, device), device)


def with_all_losses_at_once(size: Size, folder: Path, device: torch.device) -> Step:
    """The logits of all response tokens in float32, and what a divergence makes of them, kept for the gradient."""
    step = with_everything(size, folder, device)

    def patched() -> float:
        with (
            patch("pos2distill.training.student._LOGITS", 2**40),
            patch("pos2distill.training.student.checkpoint", lambda function, *given, **_: function(*given)),
        ):
            return step()

    return patched


def with_plain_adamw(size: Size, folder: Path, device: torch.device) -> Step:
    """AdamW operation by operation."""
    step = with_everything(size, folder, device)
    for group in step.stepper.optimizer.param_groups:  # type: ignore[attr-defined]
        group["fused"] = False
    return step


def with_activations_kept(size: Size, folder: Path, device: torch.device) -> Step:
    """`gradient_checkpointing: false`: a setting, memory for time."""
    return with_everything(replace(size, gradient_checkpointing=False), folder, device)


def with_compiled_parts(size: Size, folder: Path, device: torch.device) -> Step:
    """Norms and feed-forward parts by torch.compile: most of what is neither a product with weights nor attention."""
    step = with_everything(size, folder, device)
    for name, module in step.stepper.student.lm.named_modules():
        if name.endswith(("norm", "mlp")):
            module.compile(dynamic=True)
    return step


STEPS: dict[str, Callable[[Size, Path, torch.device], Step]] = {
    "as it is": with_everything,
    "rows share nothing": without_sharing,
    "several micro-batches": in_micro_batches,
    "all losses at once": with_all_losses_at_once,
    "AdamW operation by operation": with_plain_adamw,
    "activations kept": with_activations_kept,
    "norms and MLPs compiled": with_compiled_parts,
}


def measure_times(size: Size, folder: Path, device: torch.device, repetitions: int) -> dict[str, list[float]]:
    """Seconds of every step, made in turn, with one of each beforehand."""
    steps = {name: build(size, folder, device) for name, build in STEPS.items()}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    tolerance = TOLERANCE if size.precision == "float32" else 2e-2
    for repetition in range(repetitions + 1):
        for name, step in steps.items():
            seconds[name].append(wall(lambda step=step, name=name: losses[name].append(step()), device))
            own, expected = losses[name][-1], losses["as it is"][-1]
            print(f"{name}: step {repetition}, {seconds[name][-1]:.2f} s, loss {own:.6f}", flush=True)
            if abs(own - expected) > tolerance * expected:
                raise AssertionError(f"{name}: another loss, {own} in place of {expected}")
    return {name: each[1:] for name, each in seconds.items()}


def peak_apart(name: str, folder: str, device: str) -> float:
    """GiB beyond what stays, in a process of its own, in which large blocks go back to the system when freed."""
    command = [sys.executable, "-m", "benchmarks.train_step.changes", "--device", device]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    printed = subprocess.run(
        [*command, "--memory", name, "--model", folder], check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout
    return float(printed.splitlines()[-1])


def main() -> None:
    """Measure, compare, write the report beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--memory", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size, device = SIZES[options.device], torch.device(options.device)
    if options.device == "cpu":
        size = replace(size, layers=LAYERS)
    if options.memory:
        step = STEPS[options.memory](size, Path(options.model), device)
        step()
        print(measure_peak(step, device)["peak_gib"])
        return
    with model_folder() as folder:
        seconds = measure_times(size, Path(folder), device, options.repetitions)
        peaks = {name: peak_apart(name, folder, options.device) for name in STEPS}
    best, median = ({name: of(each) for name, each in seconds.items()} for of in (min, statistics.median))
    report = {
        "size": {field: getattr(size, field) for field in size.__slots__},
        "seconds": seconds,
        "best_over_as_it_is": {name: each / best["as it is"] for name, each in best.items()},
        "median_over_as_it_is": {name: each / median["as it is"] for name, each in median.items()},
        "peak_gib": peaks,
        **circumstances("torch", "transformers", device=options.device),
    }
    Path(__file__).with_name(f"changes_{options.device}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
