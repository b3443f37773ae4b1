"""Is memory flat, and how many rows a second pass, when 200,000 examples stream into a student of one layer? Run:

python -m benchmarks.streaming.scale [EXAMPLES]
"""

import json
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from benchmarks.circumstances import circumstances
from pipelines.executors.ray.session import ray_session
from pipelines.plan import make_plan
from pipelines.stages.distill import make_checkpoint, read_steps
from pipelines.stages.prepare import make_examples, training_ids
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.store.samples import SampleStore

REPORT = Path(__file__).with_suffix(".json")
_PERIOD_SECONDS = 5.0
_WATCHED = {
    "driver": "",
    "train worker": "RayTrainWorker",
    "train controller": "TrainController",
    "split coordinator": "SplitCoordinator",
    "sampler": "MapWorker(MapBatches(Generate))",
    "tracker_actor": "ProgressTracker",
    "object store": "",
}


def write_data(path: Path, examples: int) -> None:
    """Three short documents a question."""
    with path.open("w") as file:
        for index in range(examples):
            documents = [
                {"title": f"Fox {other}", "text": f"The code of fox {other} is {other:06d}.", "gold": other == index}
                for other in (index, index + 1, index + 2)
            ]
            row = {"id": f"fox-{index}", "question": f"The code of fox {index}", "answers": [f"{index:06d}"]}
            file.write(json.dumps({**row, "documents": documents}) + "\n")


def write_model(folder: Path, toy: str) -> None:
    """A student of one layer with the toy's tokenizer."""
    AutoTokenizer.from_pretrained(toy).save_pretrained(folder)
    config = AutoConfig.from_pretrained(toy)
    for name, value in {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}.items():
        setattr(config, name, value)
    config.num_attention_heads = config.num_key_value_heads = 2
    LlamaForCausalLM(config).save_pretrained(folder)


def load(storage: str, data: Path, model: Path, examples: int) -> Recipe:
    """One epoch over every example, one row each, and large batches: the pipeline is measured, not the student."""
    return load_recipe(
        "quickstart",
        [
            *(f"runtime.storage={storage}", f"data.path={data}", f"data.train_examples={examples}"),
            f"model.path={model}",
            *("data.documents=3", "data.eval_examples=2", "data.eval_fraction=0.001"),
            *("evaluation.slots=all", "evaluation.other_documents=[]", "model.engine=fake", "sampling.keep=all"),
            *("method.name=seqkd", "method.k=1", "training.epochs=1", "training.global_batch_rows=512"),
            *("runtime.fake.reply_tokens=8", "runtime.samplers.batch_size=256", "runtime.mode=streamed"),
            *("runtime.trainers.micro_batch_tokens=131072", "runtime.checkpoints.minutes=2"),
        ],
    )


def watch(samples: list[dict[str, Any]], store: SampleStore, finished: threading.Event) -> None:
    """Every few seconds: the memory that each kind of process has for itself (USS, MiB), and the parts stored.

    Of the object store: what its file in /dev/shm takes, which never shrinks, so that it shows the most it has held.
    """
    start = time.monotonic()
    while not finished.wait(_PERIOD_SECONDS):
        memory: dict[str, float] = defaultdict(float)
        own = psutil.Process()
        memory["driver"] = own.memory_full_info().uss / 2**20
        memory["object store"] = shutil.disk_usage("/dev/shm").used / 2**20
        for process in own.children(recursive=True):
            try:
                title = " ".join(process.cmdline())
                for kind, word in _WATCHED.items():
                    if word and word in title:
                        memory[kind] += process.memory_full_info().uss / 2**20
            except psutil.Error:
                continue
        samples.append({"seconds": time.monotonic() - start, "parts": len(store.part_names()), **memory})


def main() -> None:
    """Stream, train, and report."""
    examples = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as storage, ray_session():
        data = Path(storage) / "data.jsonl"
        model = Path(storage) / "model"
        write_data(data, int(examples * 1.01) + 10)
        write_model(model, load_recipe("quickstart").study.model.path)
        recipe = load(f"{storage}/run", data, model, examples)
        plan = make_plan(recipe)
        make_examples(recipe, plan.examples)
        finished = threading.Event()
        thread = threading.Thread(target=watch, args=(samples, SampleStore(plan.samples), finished), daemon=True)
        thread.start()
        start = time.monotonic()
        make_checkpoint(recipe, plan)
        wall = time.monotonic() - start
        finished.set()
        thread.join()
        steps, ids = read_steps(plan), training_ids(plan)
        manifest = plan.samples.manifest()
        assert manifest is not None
        trained = [example for step in steps for example in step["examples"]]
        assert len(trained) == len(set(trained)) == len(ids) == examples
    report = {
        "examples": examples,
        "wall_s": wall,
        "sampling_s": manifest.seconds["sample"],
        "samples_a_second": examples / manifest.seconds["sample"],
        "memory_mib": {kind: _curve(samples, kind) for kind in _WATCHED},
        **circumstances("ray", "torch", "transformers"),
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def _curve(samples: list[dict[str, Any]], kind: str) -> list[int]:
    """Ten values over the run, in MiB."""
    values = [sample[kind] for sample in samples if kind in sample]
    return [round(values[len(values) * tenth // 10]) for tenth in range(10)] if values else []


if __name__ == "__main__":
    main()
