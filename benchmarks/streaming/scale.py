"""Does memory stay constant, and how many rows per second pass, when many examples stream into a tiny student? Run:

python -m benchmarks.streaming.scale [EXAMPLES]
"""

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from benchmarks.circumstances import circumstances
from pipelines.executors.ray.connection import connected_to_ray
from pipelines.executors.ray.executor import RayExecutor
from pipelines.plan import Plan, make_plan
from pipelines.stages.distill import read_steps
from pipelines.stages.prepare import training_ids
from pipelines.stages.stage import RunContext
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.store.lease import Lease
from pos2distill.store.samples import SampleStore

REPORT = Path(__file__).with_suffix(".json")
_PERIOD_SECONDS = 5.0

# Processes are recognized by a part of their title, as set by Ray 2.60.
_TITLES = {
    "train worker": "RayTrainWorker",
    "train controller": "TrainController",
    "split coordinator": "SplitCoordinator",
    "sampler": "samplers",
    "tracker": "RunCoordinatorActor",
}


def write_data(path: Path, examples: int) -> None:
    """Write JSON Lines: questions with three short documents each."""
    with path.open("w") as file:
        for index in range(examples):
            documents = []
            for other in (index, index + 1, index + 2):
                text = f"The code of fox {other} is {other:06d}."
                documents.append({"title": f"Fox {other}", "text": text, "gold": other == index})
            record = {
                "id": f"fox-{index}",
                "question": f"The code of fox {index}",
                "answers": [f"{index:06d}"],
                "documents": documents,
            }
            file.write(json.dumps(record) + "\n")


def write_model(folder: Path, toy: str) -> None:
    """Save a model of one layer with the toy's tokenizer."""
    AutoTokenizer.from_pretrained(toy).save_pretrained(folder)
    config = AutoConfig.from_pretrained(toy)
    config.hidden_size = 32
    config.intermediate_size = 32
    config.num_hidden_layers = 1
    config.head_dim = 16
    config.num_attention_heads = config.num_key_value_heads = 2
    LlamaForCausalLM(config).save_pretrained(folder)


def load(storage: str, data: Path, model: Path, examples: int) -> Recipe:
    """One epoch over every example, one row each, in large batches: the pipeline is measured, not the student."""
    overrides = [
        f"runtime.storage={storage}",
        "runtime.mode=streamed",
        "runtime.fake.reply_tokens=8",
        "runtime.samplers.batch_size=256",
        "runtime.trainers.micro_batch_tokens=131072",
        "runtime.checkpoints.minutes=2",
        f"model.path={model}",
        "model.engine=fake",
        f"data.path={data}",
        f"data.train_examples={examples}",
        f"data.train_candidates={examples}",
        "data.documents=3",
        "data.eval_examples=2",
        "data.eval_fraction=0.001",
        "sampling.keep=all",
        "method.name=seqkd",
        "method.k=1",
        "training.epochs=1",
        "training.global_batch_rows=512",
        "evaluation.slots=all",
        "evaluation.other_documents=[]",
    ]
    return load_recipe("quickstart", overrides)


def watch(measured: list[dict[str, float]], store: SampleStore, finished: threading.Event) -> None:
    """Record, every few seconds, the memory of each kind of process and the number of stored parts.

    Memory is what a process does not share with others (USS), in MiB. For the object store it is the size of its file
    in /dev/shm. This file never shrinks, so it is the most that the store has held.
    """
    start = time.monotonic()
    own = psutil.Process()
    while not finished.wait(_PERIOD_SECONDS):
        current: dict[str, float] = defaultdict(float)
        current["seconds"] = time.monotonic() - start
        current["parts"] = len(store.part_names())
        current["driver"] = own.memory_full_info().uss / 2**20
        current["object store"] = shutil.disk_usage("/dev/shm").used / 2**20
        for process in own.children(recursive=True):
            try:
                title = " ".join(process.cmdline())
                for kind, part_of_title in _TITLES.items():
                    if part_of_title in title:
                        current[kind] += process.memory_full_info().uss / 2**20
            except psutil.Error:
                continue  # it has ended
        measured.append(current)


def measure(recipe: Recipe, plan: Plan, examples: int) -> dict[str, Any]:
    """Run the stages `prepare` and `distill`, and check that training used every example once."""
    logged_settings = recipe.study.model_dump(mode="json")
    run = RunContext(recipe.name, logged_settings, recipe.runtime, RayExecutor(recipe.runtime), Lease())
    plan.prepare.run(plan.prepare, run)
    measured: list[dict[str, float]] = []
    finished = threading.Event()
    store = SampleStore(plan.first_sample.artifact)
    thread = threading.Thread(target=watch, args=(measured, store, finished), daemon=True)
    thread.start()
    start = time.monotonic()
    plan.distill.run(plan.distill, run)
    wall_s = time.monotonic() - start
    finished.set()
    thread.join()

    trained = []
    for step in read_steps(plan.distill.artifact):
        trained += step["examples"]
    assert len(trained) == len(set(trained)) == len(training_ids(plan.prepare.artifact)) == examples
    manifest = plan.first_sample.artifact.manifest()
    assert manifest is not None
    sampling_s = manifest.seconds["sample"]
    return {
        "examples": examples,
        "wall_s": wall_s,
        "sampling_s": sampling_s,
        "samples_per_second": examples / sampling_s,
        "memory_mib": {kind: _curve(measured, kind) for kind in ("driver", *_TITLES, "object store")},
    }


def _curve(measured: list[dict[str, float]], kind: str) -> list[int]:
    """Ten values in MiB, spread over the time in which there was such a process."""
    values = [current[kind] for current in measured if kind in current]
    if not values:
        return []
    return [round(values[len(values) * tenth // 10]) for tenth in range(10)]


def main() -> None:
    """Stream, train, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "examples", nargs="?", type=int, default=200_000, metavar="EXAMPLES", help="default: 200000; at least 4000"
    )
    examples = parser.parse_args().examples
    with tempfile.TemporaryDirectory() as folder, connected_to_ray():
        data = Path(folder) / "data.jsonl"
        model = Path(folder) / "model"
        # More than training needs, since the split keeps a fraction for evaluation.
        write_data(data, int(examples * 1.01) + 10)
        write_model(model, load_recipe("quickstart").study.model.path)
        recipe = load(f"{folder}/run", data, model, examples)
        report = measure(recipe, make_plan(recipe), examples)
    report |= circumstances("ray", "torch", "transformers")
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
