"""Stage `examples`: the data set read, checked, split and written as Parquet, before anything expensive starts."""

import time

from pipelines.plan import Plan
from pos2distill.config import Recipe
from pos2distill.records import Example, example_from_row, examples_to_table
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.tasks.datasets import load_split


def make_examples(recipe: Recipe, artifact: Artifact) -> Manifest:
    """Write `train.parquet` and `evaluation.parquet`.

    Counts: rows = duplicate + every reason to pass rows over + train_unused + evaluation_unused + train + evaluation.
    """
    start = time.monotonic()
    study = recipe.study
    longest = max(study.data.documents, *study.evaluation.other_documents, 0)
    split = load_split(study.data, documents=longest, seed=study.seed)
    with artifact.writing():
        artifact.write_table("train.parquet", examples_to_table(split.train))
        artifact.write_table("evaluation.parquet", examples_to_table(split.evaluation))
        return artifact.publish(counts=split.counts, seconds={"examples": time.monotonic() - start})


def read_training_examples(plan: Plan) -> dict[str, Example]:
    """The training examples by id."""
    rows = plan.examples.read_table("train.parquet").to_pylist()
    return {row["example_id"]: example_from_row(row) for row in rows}
