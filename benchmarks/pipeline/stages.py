"""Where does the time go? The steps of the pipeline in this process, one after the other, without Ray. Run:

python -m benchmarks.pipeline.stages [EXAMPLES]
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.circumstances import circumstances
from benchmarks.pipeline.material import load, write_data, write_model
from pipelines.executors.local import LocalExecutor
from pipelines.plan import Plan, make_plan
from pipelines.stages.prepare import TRAIN_FILE, training_ids
from pipelines.stages.sample import missing_blocks, sampling_operators
from pipelines.stages.stage import RunContext
from pos2distill.config import Recipe
from pos2distill.models.load import load_prompt_builder
from pos2distill.sampling.operators import ActorOperator, fetch_examples
from pos2distill.sampling.prompting import PromptSpec, build_evaluation_prompts
from pos2distill.store.lease import Lease
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.permutations import evaluated_placements
from pos2distill.training.rows import RowBuilder, decode_samples

REPORT = Path(__file__).with_suffix(".json")
_EVALUATED_EXAMPLES = 64
_LOADED_EXAMPLES = 256  # at a time, into training rows


class Stopwatch:
    """Adds up the CPU seconds of this process by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, step: str) -> Iterator[None]:
        """Count the time of the body for this step."""
        start = time.process_time()
        yield
        self.seconds[step] += time.process_time() - start


class IgnoredCounts:
    """A `SampleCounter` that counts nothing."""

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], sample_ids: Sequence[str]) -> None:
        """See `SampleCounter`."""


def measure(recipe: Recipe, plan: Plan) -> dict[str, float]:
    """CPU seconds of every step for all training examples of a recipe, in blocks as the pipeline cuts them."""
    stopwatch = Stopwatch()
    logged_settings = recipe.study.model_dump(mode="json")
    run = RunContext(recipe.name, logged_settings, recipe.runtime, LocalExecutor(recipe.runtime), Lease())
    with stopwatch.time("read, check, split, write"):
        plan.prepare.run(plan.prepare, run)
    _sample(recipe, plan, stopwatch)
    _build_rows(recipe, plan, stopwatch)
    return dict(stopwatch.seconds)


def _sample(recipe: Recipe, plan: Plan, stopwatch: Stopwatch) -> None:
    operators = sampling_operators(plan.first_sample, recipe.runtime, IgnoredCounts(), return_samples=False)
    functions: list[Callable[[pa.Table], Any]] = []
    for operator in operators:
        if isinstance(operator, ActorOperator):
            functions.append(operator.create())
        else:
            functions.append(operator.function)
    # Tokenizer and data file are loaded once per process, so a first prompt is built before time counts.
    read, build = functions[:2]
    build(read(pa.table({"index": [0]})))
    for block in missing_blocks(plan.first_sample, recipe.runtime.samplers.batch_size):
        table = block
        for operator, function in zip(operators, functions, strict=True):
            with stopwatch.time(operator.name):
                result = function(table)
                if isinstance(operator, ActorOperator) and operator.is_async:
                    result = asyncio.run(result)
            table = result


def _build_rows(recipe: Recipe, plan: Plan, stopwatch: Stopwatch) -> None:
    store = SampleStore(plan.first_sample.artifact)
    builder = RowBuilder(load_prompt_builder(recipe.study, reserve=0), recipe.study)
    ids = training_ids(plan.prepare.artifact)
    with stopwatch.time("index the store"):
        index = store.index(ids)
    for start in range(0, len(ids), _LOADED_EXAMPLES):
        with stopwatch.time("load samples"):
            indices = np.arange(start, min(start + _LOADED_EXAMPLES, len(ids)))
            samples = decode_samples(store.load(index, indices))
        with stopwatch.time("build rows"):
            for sample in samples:
                assert sample is not None  # every answer is kept
                for key in builder.keys(sample):
                    builder.row(key)


def measure_evaluation_prompts(recipe: Recipe, plan: Plan) -> float:
    """CPU seconds per prompt if examples are evaluated at every slot."""
    study = recipe.study
    documents = study.data.documents
    specs = [PromptSpec(documents, evaluated_placements(documents, (1,), "all"))]
    indices = pa.table({"index": np.arange(_EVALUATED_EXAMPLES)})
    examples = fetch_examples(indices, plan.prepare.artifact, TRAIN_FILE)
    start = time.process_time()
    prompts = build_evaluation_prompts(examples, study, specs, study.evaluation.max_new_tokens)
    return (time.process_time() - start) / len(prompts)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "examples", nargs="?", type=int, default=500, metavar="EXAMPLES", help=f"at least {_EVALUATED_EXAMPLES}"
    )
    examples = parser.parse_args().examples
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        write_model(material / "model")
        write_data(material / "data.jsonl", int(examples * 1.03) + 100)
        recipe = load(material, f"{folder}/run", examples)
        plan = make_plan(recipe)
        seconds = measure(recipe, plan)
        evaluation_s = measure_evaluation_prompts(recipe, plan)
    report = {
        "examples": examples,
        "cpu_ms_per_example": {step: 1000 * each / examples for step, each in seconds.items()},
        "cpu_ms_per_example_total": 1000 * sum(seconds.values()) / examples,
        "cpu_ms_per_evaluation_prompt": 1000 * evaluation_s,
        **circumstances("pyarrow", "transformers", "tokenizers", "fastokens"),
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
