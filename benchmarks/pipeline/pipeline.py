"""How many examples per second pass through everything except the models, and does memory stay constant? Run:

python -m benchmarks.pipeline.pipeline [EXAMPLES ...]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.circumstances import circumstances
from benchmarks.pipeline.material import load, write_data, write_model
from pipelines.executors.ray.connection import connected_to_ray
from pipelines.executors.ray.executor import RayExecutor
from pipelines.plan import Plan, make_plan
from pipelines.stages.prepare import training_ids
from pipelines.stages.stage import RunContext
from pos2distill.config import Recipe
from pos2distill.models.load import load_prompt_builder
from pos2distill.store.lease import Lease
from pos2distill.store.samples import SampleStore
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import BatchLoader
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.rows import RowBuilder

REPORT = Path(__file__).with_suffix(".json")
_PERIOD_SECONDS = 10.0  # reading the memory of all processes takes a tenth of a second and more


def run_in_own_process(material: Path, examples: int, cores: int) -> dict[str, Any]:
    """Run `measure` in a process that may use only this number of cores."""
    command = [sys.executable, "-m", "benchmarks.pipeline.pipeline"]
    command += ["--measure", str(material), str(examples), str(cores)]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return result


def measure(material: Path, examples: int, cores: int) -> dict[str, Any]:
    """Rates of reading, of sampling through Ray Data and of building rows, and the memory during these stages."""
    os.sched_setaffinity(0, range(cores))
    memory: list[dict[str, float]] = []
    seconds: dict[str, float] = {}
    cpu: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as storage, connected_to_ray():
        recipe = load(material, storage, examples)
        plan = make_plan(recipe)
        logged_settings = recipe.study.model_dump(mode="json")
        run = RunContext(recipe.name, logged_settings, recipe.runtime, RayExecutor(recipe.runtime), Lease())
        finished = threading.Event()
        watcher = threading.Thread(target=watch, args=(memory, finished), daemon=True)
        watcher.start()
        stages = {
            "read": lambda: plan.prepare.run(plan.prepare, run),
            "sample": lambda: plan.first_sample.run(plan.first_sample, run),
            "build rows": lambda: build_rows(recipe, plan),
        }
        for name, run_stage in stages.items():
            start = time.monotonic()
            cpu_before = psutil.cpu_times()
            run_stage()
            seconds[name] = time.monotonic() - start
            cpu[name] = _cpu_since(cpu_before, examples)
        finished.set()
        watcher.join()
        rate_once_started = _sampling_rate_once_started(plan, examples)
    rates = {name: examples / each for name, each in seconds.items()}
    rates["sample, once started"] = rate_once_started
    kinds = sorted(set().union(*memory))
    return {
        "examples": examples,
        "cores": cores,
        "seconds": seconds,
        "examples_per_second": rates,
        "cpu": cpu,
        "memory_mib": {kind: _curve(memory, kind) for kind in kinds},
    }


def _cpu_since(before: Any, examples: int) -> dict[str, float]:
    """CPU milliseconds per example of the whole machine, on which nothing else must run, and the fraction of its time
    that the host of a virtual machine used for others."""
    now = psutil.cpu_times()
    spent = {name: getattr(now, name) - getattr(before, name) for name in now._fields}
    busy = sum(spent[name] for name in ("user", "nice", "system", "irq", "softirq"))
    return {"ms_per_example": 1000 * busy / examples, "stolen_fraction": spent["steal"] / sum(spent.values())}


def _sampling_rate_once_started(plan: Plan, examples: int) -> float:
    """Examples per second between the first and the last part of the store. So the start of Ray does not count."""
    parts = Path(plan.first_sample.artifact.path).glob("parts/*.parquet")
    times = sorted(path.stat().st_mtime for path in parts)
    return examples * (len(times) - 1) / len(times) / (times[-1] - times[0])


def build_rows(recipe: Recipe, plan: Plan) -> None:
    """Build all rows of one epoch from the store, as a training worker does."""
    study = recipe.study
    builder = RowBuilder(load_prompt_builder(study, reserve=0), study)
    ids = training_ids(plan.prepare.artifact)
    loader = BatchLoader(study, ids, SampleStore(plan.first_sample.artifact), _no_stream, DistContext())
    rows = 0
    for batch in loader.batches(TrainingProgress.at_start(len(ids))):
        for sample in batch.samples:
            for key in builder.keys(sample):
                builder.row(key)
                rows += 1
    assert rows == len(ids) * (study.method.k + 1)


def _no_stream() -> Any:
    raise AssertionError("all samples are stored")


def watch(memory: list[dict[str, float]], finished: threading.Event) -> None:
    """Record, every few seconds, the memory that each kind of process does not share with others (USS), in MiB."""
    own = psutil.Process()
    while not finished.wait(_PERIOD_SECONDS):
        current: dict[str, float] = defaultdict(float)
        current["driver"] = own.memory_full_info().uss / 2**20
        for process in own.children(recursive=True):
            try:
                title = " ".join(process.cmdline())
                if title.startswith("ray::"):
                    current[_kind(title)] += process.memory_full_info().uss / 2**20
            except psutil.Error:
                continue  # it has ended
        memory.append(current)


def _kind(title: str) -> str:
    """The kind of a process, by the title that Ray 2.60 gives it."""
    if "samplers" in title:
        return "sampler"
    if "RunCoordinatorActor" in title:
        return "coordinator"
    return "tasks"


def _curve(memory: list[dict[str, float]], kind: str) -> list[int]:
    """Ten values in MiB, spread over the run."""
    values = [current.get(kind, 0.0) for current in memory]
    return [round(values[len(values) * tenth // 10]) for tenth in range(10)]


def main() -> None:
    """Whole runs on one core and on two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "examples", nargs="*", type=int, default=[10_000], metavar="EXAMPLES", help="one run for each (default: 10000)"
    )
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        folder, examples, cores = arguments.measure
        print(json.dumps(measure(Path(folder), int(examples), int(cores))))
        return
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        write_model(material / "model")
        write_data(material / "data.jsonl", int(max(arguments.examples) * 1.03) + 100)
        for examples in arguments.examples:
            for cores in (1, 2):
                runs.append(run_in_own_process(material, examples, cores))
    report = {"runs": runs, **circumstances("ray", "pyarrow", "transformers", "tokenizers", "fastokens")}
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
