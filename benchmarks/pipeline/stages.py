"""Where does the time go? Each stage of the pipeline in this process, on one core, without Ray. Run:

python -m benchmarks.pipeline.stages [EXAMPLES]
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pipelines.executors.ray.train_worker import make_prompt_builder
from pipelines.generate import Generate, PromptSpec, build_prompts
from pipelines.tee import to_samples

from benchmarks.circumstances import circumstances
from benchmarks.pipeline.material import load, write_data, write_model
from pipelines.plan import make_plan
from pipelines.stages.prepare import TRAIN, make_examples
from pipelines.stages.sample import read_examples
from pos2distill.config import Recipe
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.permutations import Placement, evaluated_placements
from pos2distill.training.rows import RowBuilder, kept_samples

REPORT = Path(__file__).with_suffix(".json")
Seconds = dict[str, float]
_ASKED_EXAMPLES = 64


def measure(recipe: Recipe) -> Seconds:
    """CPU seconds of every stage for all training examples of a recipe, block by block as the pipeline cuts them."""
    study, plan = recipe.study, make_plan(recipe)
    seconds: Seconds = {}

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        start = time.process_time()
        yield
        seconds[stage] = seconds.get(stage, 0.0) + time.process_time() - start

    with timed("read, check, split, write"):
        make_examples(recipe, plan.examples)
    params = SamplingParams(study.sampling.temperature, study.sampling.top_p, study.sampling.max_new_tokens, ())
    answer = Generate(recipe, study.model, params, True, None)
    prompt_specs = [PromptSpec(study.data.documents, {1: (Placement(study.advantageous(1)),)})]
    store, build = SampleStore(plan.samples), RowBuilder(make_prompt_builder(study), study)
    store.open()
    size = recipe.runtime.samplers.batch_size
    # What is loaded once in a process is no work of a block.
    build_prompts(
        read_examples(pa.table({"place": [0]}), plan.examples), study, prompt_specs, params.max_new_tokens, True
    )
    for start in range(0, study.data.train_examples, size):
        indices = pa.table({"place": list(range(start, min(start + size, study.data.train_examples)))})
        with timed("read examples"):
            examples = read_examples(indices, plan.examples)
        with timed("permute, prompt, tokenise"):
            prompts = build_prompts(examples, study, prompt_specs, params.max_new_tokens, True)
        with timed("judge"):
            answers = asyncio.run(answer(prompts))
        with timed("store"):
            store.append(to_samples(answers))
    ids = plan.examples.read_table(TRAIN, ["example_id"])["example_id"].combine_chunks()
    with timed("index the store"):
        index = store.index(ids)
    for start in range(0, len(ids), 256):
        with timed("load samples"):
            samples = kept_samples(store.load(index, ids, range(start, min(start + 256, len(ids)))))
        with timed("fan out to rows"):
            for key in (key for sample in samples if sample for key in build.keys(sample)):
                build.row(key)
    return seconds


def evaluation_prompts(recipe: Recipe) -> float:
    """CPU seconds of one prompt where examples are prompt_specs at every slot."""
    documents, study = recipe.study.data.documents, recipe.study
    prompt_specs = [PromptSpec(documents, evaluated_placements(documents, (1,), "all"))]
    examples = read_examples(pa.table({"place": list(range(_ASKED_EXAMPLES))}), make_plan(recipe).examples)
    start = time.process_time()
    prompts = build_prompts(examples, study, prompt_specs, study.evaluation.max_new_tokens, False)
    return (time.process_time() - start) / len(prompts)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="?", type=int, default=500, metavar="EXAMPLES")
    examples = parser.parse_args().examples
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        write_model(material / "model")
        write_data(material / "data.jsonl", int(examples * 1.03) + 100)
        recipe = load(material, f"{folder}/run", examples)
        seconds = measure(recipe)
        report = {
            "examples": examples,
            "cpu_ms_an_example": {stage: 1e3 * each / examples for stage, each in seconds.items()},
            "cpu_ms_an_example_in_all": 1e3 * sum(seconds.values()) / examples,
            "cpu_ms_a_prompt_of_an_evaluation": 1e3 * evaluation_prompts(recipe),
            **circumstances("pyarrow", "transformers", "tokenizers", "fastokens"),
        }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
