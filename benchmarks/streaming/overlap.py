"""Does streaming hide the shorter stage behind the longer one? The same study staged and streamed, one after the other.

The fake engine's delay is set so that sampling takes about as long as training on this machine. Run:

  python -m benchmarks.streaming.overlap
"""

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from pipelines.executors.ray.session import ray_session
from pipelines.plan import Plan, make_plan
from pipelines.stages.distill import make_checkpoint, read_steps
from pipelines.stages.prepare import make_examples
from pipelines.stages.sample import make_samples
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.store.samples import SampleStore

EXAMPLES = 480
BATCH = 8
REPORT = Path(__file__).with_suffix(".json")


def load(storage: str, mode: str, delay_s: float) -> Recipe:
    """The quickstart's model and training, one epoch, with an engine that answers nonsense after a while."""
    return load_recipe(
        "quickstart",
        [
            *(f"runtime.storage={storage}", f"runtime.mode={mode}", f"runtime.fake.delay_s={delay_s}"),
            *(
                "model.engine=fake",
                "sampling.keep=all",
                f"data.train_examples={EXAMPLES}",
                "data.eval_examples=2",
            ),
            *("training.epochs=1", "method.name=seqkd", f"runtime.samplers.batch_size={BATCH}"),
            *("runtime.samplers.concurrent_batches=1", "runtime.trainers.threads=1", "runtime.checkpoints.steps=5"),
        ],
    )


def run(mode: str, delay_s: float) -> dict[str, Any]:
    """One run; seconds of its stages, and how many samples there were when the first steps were written."""
    with tempfile.TemporaryDirectory() as storage:
        recipe = load(storage, mode, delay_s)
        plan = make_plan(recipe)
        make_examples(recipe, plan.examples)
        result: dict[str, Any] = {}
        start = time.monotonic()
        if mode == "staged":
            make_samples(recipe, plan)
            result["sample_s"] = time.monotonic() - start
        trained = time.monotonic()
        threading.Thread(target=_watch, args=(plan, result), daemon=True).start()
        make_checkpoint(recipe, plan)
        end = time.monotonic()
        result |= {"distill_s": end - trained, "wall_s": end - start, "steps": len(read_steps(plan))}
        return result


def _watch(plan: Plan, result: dict[str, Any]) -> None:
    folder = Path(plan.checkpoint.path) / "steps"
    while not list(folder.glob("*.jsonl")):
        time.sleep(0.05)
    result["samples_at_first_steps"] = BATCH * len(SampleStore(plan.samples).part_names())


def main() -> None:
    """Measure training alone, set the delay to match, then compare."""
    with ray_session():
        alone = run("staged", 0.0)
        delay_s = alone["distill_s"] * BATCH / EXAMPLES
        staged, streamed = run("staged", delay_s), run("streamed", delay_s)
    longer = max(staged["sample_s"], staged["distill_s"])
    report = {
        "delay_s": delay_s,
        "alone": alone,
        "staged": staged,
        "streamed": streamed,
        "streamed_over_longer": streamed["wall_s"] / longer,
        "staged_over_longer": staged["wall_s"] / longer,
        "samples_at_first_steps_share": streamed["samples_at_first_steps"] / EXAMPLES,
        **circumstances("ray", "torch", "transformers"),
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
