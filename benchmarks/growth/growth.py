"""How do a training step's time and memory grow with documents, with K, with the response and with workers?

A step has one example per worker; everything else is as in `benchmarks/train_step`. Each point is measured in its own
processes. Run:

  python -m benchmarks.growth.growth [--device cuda]
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch.multiprocessing.spawn import start_processes

from benchmarks.circumstances import circumstances
from benchmarks.train_step.measuring import measure_peak, run_in_own_process, wall
from benchmarks.train_step.problem import OurStep, Questions, Size, make_study, model_folder
from pos2distill.training.distributed import DistContext

SIZES = {
    "cpu": Size(
        hidden=256,
        intermediate=704,
        layers=4,
        heads=4,
        key_value_heads=2,
        vocabulary=8000,
        documents=20,
        document_tokens=50,
        response_tokens=20,
        examples=1,
        k=4,
        micro_batch_rows=5,
        precision="float32",
    ),
    "cuda": Size(
        hidden=1024,
        intermediate=2816,
        layers=16,
        heads=16,
        key_value_heads=8,
        vocabulary=32000,
        documents=20,
        document_tokens=145,
        response_tokens=20,
        examples=1,
        k=4,
        micro_batch_rows=5,
        precision="bfloat16",
    ),
}
GROWN = {
    "documents": (10, 20, 30, 40, 50),
    "k": (1, 2, 4, 8),
    "response_tokens": (10, 20, 40, 80),
}
WORKERS = (1, 2)
STEPS = 5
MEASURED = {"seconds": "seconds per step", "peak_gib": "peak GiB in addition to weights"}
"""Keys of a point, with the labels of the plot."""


def measure(size: Size, folder: Path, device: torch.device, dist: DistContext, strategy: str) -> dict[str, float]:
    """Seconds of the fastest of several steps (the one that other processes disturbed least), and `measure_peak`."""
    study = make_study(size, folder)
    size = replace(size, micro_batch_rows=size.rows)
    step = OurStep(size, study, Questions(size, study, device), device, dist=dist, strategy=strategy)
    step()
    seconds = min(wall(step, device) for _ in range(STEPS))
    return {"seconds": seconds, **measure_peak(step, device)}


def run_rank(index: int, world_size: int, size: Size, folder: str, rendezvous: str) -> None:
    """Run one of several ZeRO-3 workers on CPUs. The first prints what it measured."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=index, world_size=world_size)
    dist = DistContext.create(index, world_size)
    point = measure(size, Path(folder), torch.device("cpu"), dist, "zero3")
    if index == 0:
        print(json.dumps(point), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure_point(changes: dict[str, int], folder: str, device: str) -> None:
    """Measure one point in this process, or in as many workers as it names, and print it."""
    workers = changes.pop("workers", None)
    size = replace(SIZES[device], **changes)  # type: ignore[arg-type]
    if workers is None:
        print(json.dumps(measure(size, Path(folder), torch.device(device), DistContext(), "torch")))
        return
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (workers, replace(size, examples=workers), folder, f"{scratch}/rendezvous")
        start_processes(run_rank, args=arguments, nprocs=workers, start_method="spawn")


def measure_in_own_process(changes: dict[str, int], folder: str, device: str) -> dict[str, float]:
    """`measure_point` in a process of its own."""
    arguments = ("--device", device, "--model", folder, "--point", json.dumps(changes))
    point = run_in_own_process("benchmarks.growth.growth", *arguments)
    print(changes, point, flush=True)
    return point


def measure_all(grown: Mapping[str, Sequence[int]], device: str) -> dict[str, list[dict[str, float]]]:
    """The points of every quantity."""
    size = SIZES[device]
    points: dict[str, list[dict[str, float]]] = {}
    with model_folder() as folder:
        make_study(size, Path(folder))
        # The unchanged size is a point of every quantity; it is measured once.
        unchanged = measure_in_own_process({}, folder, device)
        for name, values in grown.items():
            points[name] = []
            for value in values:
                point = unchanged
                if getattr(size, name, None) != value:
                    point = measure_in_own_process({name: value}, folder, device)
                points[name].append({name: value, **point})
    return points


def exponents(name: str, points: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The exponent b of measured = a * value ** b for time and memory, by least squares on logarithms. 1 is linear."""
    values = np.log([point[name] for point in points])
    fitted = {}
    for key in MEASURED:
        slope, _ = np.polyfit(values, np.log([point[key] for point in points]), 1)
        fitted[key] = float(slope)
    return fitted


def plot(points: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Plot time and memory over each quantity, with axes from zero, so that proportional growth is a straight line."""
    figure, axes = plt.subplots(2, len(points), figsize=(3.2 * len(points), 5.6), sharey="row", squeeze=False)
    for column, (name, measured) in enumerate(points.items()):
        values = [point[name] for point in measured]
        for line, (key, label) in enumerate(MEASURED.items()):
            axis = axes[line][column]
            axis.plot(values, [point[key] for point in measured], marker="o")
            axis.set_xlim(left=0)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            if column == 0:
                axis.set_ylabel(label)
        axes[1][column].set_xlabel(name.replace("_", " "))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure every point, and write report and plot to this folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.point is not None:
        measure_point(options.point, options.model, options.device)
        return
    grown: dict[str, Sequence[int]] = dict(GROWN)
    if options.device == "cpu":
        grown["workers"] = WORKERS
    points = measure_all(grown, options.device)
    report = {
        "size": SIZES[options.device].as_dict(),
        "points": points,
        "exponents": {name: exponents(name, measured) for name, measured in points.items()},
        **circumstances("torch", "transformers", "deepspeed", device=options.device),
    }
    path = Path(__file__).with_name(f"growth_{options.device}.json")
    path.write_text(json.dumps(report, indent=2) + "\n")
    plot(points, path.with_suffix(".png"))
    print(json.dumps(report["exponents"], indent=2))


if __name__ == "__main__":
    main()
