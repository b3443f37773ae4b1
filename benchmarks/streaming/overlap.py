"""Does streaming hide the shorter stage behind the longer one? The same study staged, then streamed.

The fake engine's delay is set so that sampling takes about as long as training on this machine. Run:

  python -m benchmarks.streaming.overlap [--examples 480]
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from pipelines.executors.ray.connection import connected_to_ray
from pipelines.executors.ray.executor import RayExecutor
from pipelines.plan import Plan, make_plan
from pipelines.stages.distill import read_steps
from pipelines.stages.stage import RunContext
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.store.checkpoint_layout import STEPS_FOLDER
from pos2distill.store.lease import Lease
from pos2distill.store.samples import SampleStore

BATCH = 8
"""Examples that the fake engine answers per call."""

REPORT = Path(__file__).with_suffix(".json")


def load(storage: str, mode: str, delay_s: float, examples: int) -> Recipe:
    """The quickstart's model and training for one epoch, with an engine that answers nonsense after a delay."""
    overrides = [
        f"runtime.storage={storage}",
        f"runtime.mode={mode}",
        f"runtime.fake.delay_s={delay_s}",
        f"runtime.samplers.batch_size={BATCH}",
        "runtime.samplers.concurrent_batches=1",
        "runtime.trainers.threads=1",
        "runtime.checkpoints.steps=5",
        f"data.train_examples={examples}",
        f"data.train_candidates={examples}",
        "data.eval_examples=2",
        "model.engine=fake",
        "sampling.keep=all",
        "method.name=seqkd",
        "training.epochs=1",
    ]
    return load_recipe("quickstart", overrides)


def measure(mode: str, delay_s: float, examples: int) -> dict[str, Any]:
    """Run the study once.

    Returns: seconds of its stages, and the number of stored samples when the first steps were written.
    """
    with tempfile.TemporaryDirectory() as storage:
        recipe = load(storage, mode, delay_s, examples)
        plan = make_plan(recipe)
        logged_settings = recipe.study.model_dump(mode="json")
        run = RunContext(recipe.name, logged_settings, recipe.runtime, RayExecutor(recipe.runtime), Lease())
        plan.prepare.run(plan.prepare, run)
        result: dict[str, Any] = {}
        start = time.monotonic()
        if mode == "staged":
            plan.first_sample.run(plan.first_sample, run)
            result["sample_s"] = time.monotonic() - start
        training_start = time.monotonic()
        watcher = threading.Thread(target=_wait_for_first_steps, args=(plan, result), daemon=True)
        watcher.start()
        plan.distill.run(plan.distill, run)
        end = time.monotonic()
        watcher.join()
        result["distill_s"] = end - training_start
        result["wall_s"] = end - start
        result["steps"] = len(read_steps(plan.distill.artifact))
        return result


def _wait_for_first_steps(plan: Plan, result: dict[str, Any]) -> None:
    folder = Path(plan.distill.artifact.path) / STEPS_FOLDER
    while not list(folder.glob("*.jsonl")):
        time.sleep(0.05)
    result["samples_at_first_steps"] = BATCH * len(SampleStore(plan.first_sample.artifact).part_names())


def main() -> None:
    """Measure training alone, set the delay to match, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=480)
    examples = parser.parse_args().examples
    with connected_to_ray():
        no_delay = measure("staged", 0.0, examples)
        delay_s = no_delay["distill_s"] * BATCH / examples
        staged = measure("staged", delay_s, examples)
        streamed = measure("streamed", delay_s, examples)
    longer = max(staged["sample_s"], staged["distill_s"])
    report = {
        "examples": examples,
        "delay_s": delay_s,
        "no_delay": no_delay,
        "staged": staged,
        "streamed": streamed,
        "streamed_over_longer": streamed["wall_s"] / longer,
        "staged_over_longer": staged["wall_s"] / longer,
        "fraction_sampled_at_first_steps": streamed["samples_at_first_steps"] / examples,
        **circumstances("ray", "torch", "transformers"),
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
