"""How many examples a second pass through everything but the models, and is memory flat? Run:

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
from pipelines.executors.ray.train_worker import make_prompt_builder

from benchmarks.circumstances import circumstances
from benchmarks.pipeline.material import load, write_data, write_model
from pipelines.executors.ray.session import ray_session
from pipelines.plan import Plan, make_plan
from pipelines.stages.prepare import make_examples, training_ids
from pipelines.stages.sample import make_samples
from pos2distill.config import Recipe
from pos2distill.store.samples import SampleStore
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import BatchLoader, TrainingProgress
from pos2distill.training.rows import RowBuilder

REPORT = Path(__file__).with_suffix(".json")
_PERIOD_SECONDS = 10.0  # to look at the memory of all processes takes a tenth of a second and more
_ONE_RUN = "--one-run"


def run(material: Path, examples: int, cores: int) -> dict[str, Any]:
    """The stages of a study one after the other, in a process of its own that has so many cores."""
    command = [sys.executable, "-m", "benchmarks.pipeline.pipeline", _ONE_RUN, str(material), str(examples), str(cores)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def one_run(material: Path, examples: int, cores: int) -> dict[str, Any]:
    """Rates of reading, of sampling through Ray Data, and of the fan-out to rows; memory meanwhile."""
    os.sched_setaffinity(0, range(cores))
    memory: list[dict[str, float]] = []
    seconds: dict[str, float] = {}
    cpus: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as storage, ray_session():
        recipe = load(material, storage, examples)
        plan = make_plan(recipe)
        finished = threading.Event()
        watcher = threading.Thread(target=watch, args=(memory, finished), daemon=True)
        watcher.start()
        for name, work in (
            ("read", lambda: make_examples(recipe, plan.examples)),
            ("sample", lambda: make_samples(recipe, plan)),
            ("fan out", lambda: fan_out(recipe, plan)),
        ):
            start, busy = time.monotonic(), psutil.cpu_times()
            work()
            seconds[name] = time.monotonic() - start
            cpus[name] = _cpu(busy, examples)
        finished.set()
        watcher.join()
        started = _rate_once_started(plan, examples)
    return {
        "examples": examples,
        "cores": cores,
        "seconds": seconds,
        "examples_a_second": {name: examples / each for name, each in seconds.items()}
        | {"sample, once started": started},
        "cpu": cpus,
        "memory_mib": {kind: _curve(memory, kind) for kind in sorted(set().union(*memory))},
    }


def _cpu(before: Any, examples: int) -> dict[str, float]:
    """CPU milliseconds an example of everything on this machine, where nothing else is at work; and the share of the
    time that the machine's host gave to others."""
    now = psutil.cpu_times()
    spent = {name: getattr(now, name) - getattr(before, name) for name in now._fields}
    busy = sum(spent[name] for name in ("user", "nice", "system", "irq", "softirq"))
    return {"ms_an_example": 1000 * busy / examples, "stolen_share": spent["steal"] / sum(spent.values())}


def _rate_once_started(plan: Plan, examples: int) -> float:
    """Examples a second between the first part of the store and the last: Ray's processes have started by then."""
    times = sorted(path.stat().st_mtime for path in Path(plan.samples.path).glob("parts/*.parquet"))
    return examples * (len(times) - 1) / len(times) / (times[-1] - times[0])


def fan_out(recipe: Recipe, plan: Plan) -> None:
    """All rows of one epoch, as a training worker makes them from the store."""
    study = recipe.study
    build = RowBuilder(make_prompt_builder(study), study)
    ids = training_ids(plan)
    loader = BatchLoader(study, ids, SampleStore(plan.samples), _no_stream, DistContext())
    rows = sum(
        len([build.row(key) for key in build.keys(sample)])
        for batch in loader.batches(TrainingProgress.at_start(len(ids)))
        for sample in batch.samples
    )
    assert rows == len(ids) * (study.method.k + 1)


def _no_stream() -> Any:
    raise AssertionError("the store holds everything")


def watch(samples: list[dict[str, float]], finished: threading.Event) -> None:
    """Every few seconds: the memory that each kind of process has for itself (USS, MiB)."""
    own = psutil.Process()
    while not finished.wait(_PERIOD_SECONDS):
        memory: dict[str, float] = defaultdict(float)
        memory["driver"] = own.memory_full_info().uss / 2**20
        for process in own.children(recursive=True):
            try:
                title = " ".join(process.cmdline())
                if title.startswith("ray::"):
                    kind = (
                        "sampler" if "Generate" in title else "tracker_actor" if "ProgressTracker" in title else "tasks"
                    )
                    memory[kind] += process.memory_full_info().uss / 2**20
            except psutil.Error:
                continue
        samples.append(dict(memory))


def _curve(samples: list[dict[str, float]], kind: str) -> list[int]:
    """Ten values over the run, in MiB."""
    values = [sample.get(kind, 0.0) for sample in samples]
    return [round(values[len(values) * tenth // 10]) for tenth in range(10)]


def main() -> None:
    """Whole runs on one core and on two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", type=int, default=[10_000], metavar="EXAMPLES", help="of a run each")
    sizes = parser.parse_args().examples
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        write_model(material / "model")
        write_data(material / "data.jsonl", int(max(sizes) * 1.03) + 100)
        runs = [run(material, examples, cores) for examples in sizes for cores in (1, 2)]
    report = {
        "runs": runs,
        **circumstances("ray", "pyarrow", "transformers", "tokenizers", "fastokens"),
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == [_ONE_RUN]:
        print(json.dumps(one_run(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
    else:
        main()
