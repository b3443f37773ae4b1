"""What does each change to the training step bring? Each is taken away by itself from the step that has them all; and
what compiling would bring, which it has not. Run:

  python -m benchmarks.train_step.changes [--device cuda] [--repetitions 5]

The steps are made in turn by one process, and their losses held to each other; memory comes from a process for each.
The model has fewer layers than `train_step`'s: all steps are there at once, and one of them keeps its activations.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.circumstances import circumstances
from benchmarks.train_step.measuring import Step, free, make_in_turn, measure_peak, run_apart
from benchmarks.train_step.problem import SIZES, OurStep, Questions, Size, make_study, model_folder
from pos2distill.config import Study
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.training.rows import Row

LAYERS = {"cpu": 4, "cuda": 8}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of losses, as a share


def with_everything(size: Size, folder: Path, device: torch.device) -> OurStep:
    """All rows in one micro-batch, which share their beginnings."""
    study = make_study(size, folder)
    return OurStep(replace(size, micro_batch_rows=size.rows), study, Questions(size, study, device), device)


def without_sharing(size: Size, folder: Path, device: torch.device) -> Step:
    """Every row laid down whole."""

    def lay(rows: Sequence[Row], _: Study) -> ResponseBatch:
        return collate([row.prompt_ids for row in rows], [row.response_ids for row in rows])

    step = with_everything(size, folder, device)

    def patched() -> float:
        with patch("pos2distill.training.micro_batches.pack", lay):
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
            patch("pos2distill.training.student._CHUNK_LOGITS", 2**40),
            patch("pos2distill.training.student.checkpoint", lambda function, *given, **_: function(*given)),
        ):
            return step()

    return patched


def with_plain_adamw(size: Size, folder: Path, device: torch.device) -> Step:
    """AdamW operation by operation."""
    step = with_everything(size, folder, device)
    for group in step.strategy.optimizer.param_groups:  # type: ignore[attr-defined]
        group["fused"] = False
    return step


def with_activations_kept(size: Size, folder: Path, device: torch.device) -> Step:
    """`gradient_checkpointing: false`: a setting, memory for time."""
    return with_everything(replace(size, gradient_checkpointing=False), folder, device)


def with_compiled_parts(size: Size, folder: Path, device: torch.device) -> Step:
    """Norms and feed-forward parts by torch.compile: most of what is neither a product with weights nor attention."""
    step = with_everything(size, folder, device)
    for name, module in step.strategy.student.lm.named_modules():
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


def main() -> None:
    """Measure, compare, write the report beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--memory", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size, device = SIZES[options.device], torch.device(options.device)
    size = replace(size, layers=LAYERS[options.device])
    if options.memory:
        step = STEPS[options.memory](size, Path(options.model), device)
        step()
        print(json.dumps(measure_peak(step, device)))
        return
    with model_folder() as folder:
        steps = {name: build(size, Path(folder), device) for name, build in STEPS.items()}
        seconds, _ = make_in_turn(steps, device, options.repetitions, TOLERANCE[size.precision])
        free(steps)
        apart = ("benchmarks.train_step.changes", "--device", options.device, "--model", folder, "--memory")
        peaks = {name: run_apart(*apart, name)["peak_gib"] for name in STEPS}
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
