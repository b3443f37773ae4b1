"""How do a training step's time and memory grow with documents, with K, with the response and with workers?

One example a step and worker, everything else as in `benchmarks/train_step`; each point in processes of its own. Run:

  python -m benchmarks.growth.growth [--device cuda]
"""

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from matplotlib import pyplot as plt

from benchmarks.circumstances import circumstances
from benchmarks.train_step.measuring import measure_peak, run_apart, wall
from benchmarks.train_step.problem import OurStep, Questions, Size, make_study, model_folder
from pos2distill.training.distributed import DistContext

SIZES = {
    "cpu": Size(256, 704, 4, 4, 2, 8000, 20, 50, 20, 1, 4, 5, "float32"),
    "cuda": Size(1024, 2816, 16, 16, 8, 32000, 20, 145, 20, 1, 4, 5, "bfloat16"),
}
GROWN = {
    "documents": (10, 20, 30, 40, 50),
    "k": (1, 2, 4, 8),
    "response_tokens": (10, 20, 40, 80),
}
WORKERS = (1, 2)
STEPS = 5


def measure(size: Size, folder: Path, device: torch.device, dist: DistContext, strategy: str) -> dict[str, float]:
    """Seconds of the fastest of some steps, which other work disturbed least, and the peak beyond what stays."""
    study = make_study(size, folder)
    size = replace(size, micro_batch_rows=size.rows)
    step = OurStep(size, study, Questions(size, study, device), device, dist=dist, strategy=strategy)
    step()
    seconds = [wall(step, device) for _ in range(STEPS)]
    return {"seconds": min(seconds)} | measure_peak(step, device)


def rank(index: int, world: int, size: Size, folder: str, rendezvous: str) -> None:
    """One of several ZeRO-3 workers on CPUs; the first prints."""
    torch.set_num_threads(1)
    of_world = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in of_world.items()}
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=index, world_size=world)
    # A group of its own, since rows are exchanged while the step before is made.
    dist = DistContext(index, world, control=torch.distributed.new_group(backend="gloo"))
    found = measure(size, Path(folder), torch.device("cpu"), dist, "zero3")
    if index == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def point(options: argparse.Namespace) -> None:
    """One point, printed: what `--point` asks a process for."""
    changes = json.loads(options.point)
    workers = changes.pop("workers", None)
    size = replace(SIZES[options.device], **changes)
    if workers is None:
        print(json.dumps(measure(size, Path(options.model), torch.device(options.device), DistContext(), "torch")))
        return
    with tempfile.TemporaryDirectory() as scratch:
        size = replace(size, examples=workers)
        mp.start_processes(
            rank, args=(workers, size, options.model, f"{scratch}/rendezvous"), nprocs=workers, start_method="spawn"
        )


def measure_apart(changes: dict[str, int], folder: str, device: str) -> dict[str, float]:
    """A point in a process of its own."""
    arguments = ("--device", device, "--model", folder, "--point", json.dumps(changes))
    found = run_apart("benchmarks.growth.growth", *arguments)
    print(changes, found, flush=True)
    return found


def exponent(values: tuple[int, ...], measured: list[float]) -> float:
    """b of measured = a * value ** b, by least squares on logarithms: 1 is linear growth."""
    return float(np.polyfit(np.log(values), np.log(measured), 1)[0])


def plot(points: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Time and memory over each quantity, from zero, so that linear growth is a straight line."""
    figure, axes = plt.subplots(2, len(points), figsize=(3.2 * len(points), 5.6), sharey="row", squeeze=False)
    for column, (name, found) in enumerate(points.items()):
        for line, (field, label) in enumerate((("seconds", "seconds a step"), ("peak_gib", "peak GiB beyond weights"))):
            axis = axes[line][column]
            axis.plot([each[name] for each in found], [each[field] for each in found], marker="o")
            axis.set_xlim(left=0)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            if column == 0:
                axis.set_ylabel(label)
        axes[1][column].set_xlabel(name.replace("_", " "))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure every point, write table and plot beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.point:
        point(options)
        return
    grown: dict[str, tuple[int, ...]] = GROWN | ({"workers": WORKERS} if options.device == "cpu" else {})
    with model_folder() as folder:
        make_study(SIZES[options.device], Path(folder))
        base = measure_apart({}, folder, options.device)
        size = SIZES[options.device]
        points = {
            name: [
                {name: value}
                # Of the same step there is one measurement, which all directions go through.
                | (base if getattr(size, name, None) == value else measure_apart({name: value}, folder, options.device))
                for value in values
            ]
            for name, values in grown.items()
        }
    report: dict[str, Any] = {
        "size": {field: getattr(SIZES[options.device], field) for field in Size.__slots__},
        "points": points,
        "exponents": {
            name: {field: exponent(values, [each[field] for each in points[name]]) for field in ("seconds", "peak_gib")}
            for name, values in grown.items()
        },
        **circumstances("torch", "transformers", "deepspeed", device=options.device),
    }
    path = Path(__file__).with_name(f"growth_{options.device}.json")
    path.write_text(json.dumps(report, indent=2) + "\n")
    plot(points, path.with_suffix(".png"))
    print(json.dumps(report["exponents"], indent=2))


if __name__ == "__main__":
    main()
