"""Stage `examples`: the data set read, checked, split and written as Parquet, before anything expensive starts."""

import time

import pyarrow as pa

from pipelines.plan import Plan
from pos2distill.config import Recipe
from pos2distill.records import examples_to_table
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.tasks.datasets import load_split

TRAIN, EVALUATION = "train.parquet", "evaluation.parquet"


def make_examples(recipe: Recipe, artifact: Artifact) -> Manifest:
    """Write `train.parquet` and `evaluation.parquet`, each in an order that the seed has drawn.

    Counts: rows = duplicate + every reason to pass rows over + train_unused + eval_unused + train + evaluation.
    """
    start = time.monotonic()
    study = recipe.study
    longest = max(study.data.documents, *study.evaluation.other_documents, 0)
    split = load_split(study.data, documents=longest, seed=study.seed)
    with artifact.writing():
        artifact.write_table(TRAIN, examples_to_table(split.train))
        artifact.write_table(EVALUATION, examples_to_table(split.evaluation))
        return artifact.publish(counts=split.counts, seconds={"examples": time.monotonic() - start})


def training_ids(plan: Plan) -> pa.Array:
    """Ids of the training examples in their order; the place in it stands for the example from here on."""
    return plan.examples.read_table(TRAIN, ["example_id"])["example_id"].combine_chunks()
