"""Stage `prepare`: read, check and split the data set, and write it as Parquet, before anything expensive starts."""

import functools
import time
from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa

from pos2distill.config import DataSection, Study
from pos2distill.config.restrict import restrict
from pos2distill.errors import UserError, reworded, warn_once
from pos2distill.records import EXAMPLE_SCHEMA, example_tables
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.tasks.data_files import file_digest
from pos2distill.tasks.datasets import load_split

from ..artifact_names import EXAMPLES
from .stage import Digests, Input, RunContext, Stage

TRAIN_FILE, EVALUATION_FILE = "train.parquet", "evaluation.parquet"
_COUNTS = {TRAIN_FILE: "train", EVALUATION_FILE: "eval"}  # names of the counts in the manifest
_LOCATIONS = "locations.json"

# How questions are worded and scored does not matter here, and `longest_prompt` stands for the prompt lengths.
_UNUSED = ("template", "prompt", "metric", "documents")
_FIELDS = (*(f"data.{name}" for name in DataSection.model_fields if name not in _UNUSED), "seed", "evaluation.seed")
_NOT_FOR_TRAINING = ("data.eval_examples", "evaluation.seed")
_NOT_FOR_EVALUATION = ("data.train_examples", "data.train_candidates", "seed")


def plan(study: Study, storage: str, digests: Digests, *, task: str | None = None) -> Stage:
    """The stage of a study, or of another task of it."""
    return Stage.declare(
        study,
        storage,
        digests,
        name="prepare" if task is None else f"{task}: prepare",
        folder=EXAMPLES,
        fields=_FIELDS,
        run=functools.partial(run, task=task, digest=digests.data),
        derived={"longest_prompt": _longest_prompt(study)},
    )


def training_examples_input(stage: Stage, digests: Digests) -> Input:
    """The training examples. Which examples are evaluated does not change which are trained on."""
    fields = [name for name in _FIELDS if name not in _NOT_FOR_TRAINING]
    data = stage.study.data
    # Records of published files with too few documents for the longest prompt are skipped.
    skips_short_records = data.spec.skips_unusable and data.distractors == "given"
    derived = stage.derived if skips_short_records else {}
    return Input(stage.artifact, digests.fingerprint(restrict(stage.study, fields), derived=derived))


def evaluation_examples_input(stage: Stage, digests: Digests) -> Input:
    """The evaluation examples. Which examples are trained on does not change which are evaluated."""
    fields = [name for name in _FIELDS if name not in _NOT_FOR_EVALUATION]
    return Input(stage.artifact, digests.fingerprint(restrict(stage.study, fields), derived=stage.derived))


def read_prepared(examples: Artifact, file: str, columns: list[str] | None = None) -> pa.Table:
    """The prepared examples for training or evaluation, as a table of `EXAMPLE_SCHEMA` or some of its columns.

    Raises:
        UserError: if the file is missing or corrupt, or has another number of rows than the manifest counts.
    """
    return examples.read_table(file, columns, schema=EXAMPLE_SCHEMA, count=_COUNTS[file])


def training_ids(examples: Artifact) -> pa.Array:
    """Ids of the training examples in their order. The index in it stands for the example from here on."""
    return read_prepared(examples, TRAIN_FILE, ["example_id"])["example_id"].combine_chunks()


def count_training(examples: Artifact, *, at_most: int, setting: str) -> int:
    """How many training examples a measurement uses: a small data set has fewer than the setting allows.

    Args:
        setting: the name of the setting with `at_most`, for a warning.
    """
    available = len(training_ids(examples))
    if available < at_most:
        warn_once(f"{setting}: {at_most}, but there are {available} training examples; all of them are used")
    return min(at_most, available)


def read_locations(examples: Artifact) -> dict[str, str]:
    """Where the data set has each example, by its id."""
    return examples.read_json(_LOCATIONS)


def run(stage: Stage, context: RunContext, task: str | None, digest: str) -> Manifest:
    """Write `train.parquet` and `evaluation.parquet`, each in an order that its seed draws, and `locations.json`.

    Counts: records = duplicate + one count for every reason to skip a record + train_unused + eval_unused + train +
    eval.

    Args:
        task: the name of the other task whose data this is.
        digest: that of the data file when the study was planned.
    Raises:
        UserError: if the data cannot be used, or the file has changed since the study was planned: its examples would
            be stored under the old fingerprint.
    """
    start = time.monotonic()
    with prefix_task_errors(task):
        split = load_split(
            stage.study.data,
            documents=stage.derived["longest_prompt"],
            seed=stage.study.seed,
            eval_seed=stage.study.evaluation.seed,
        )
        if file_digest(stage.study.data.path) != digest:
            raise UserError(f"{stage.study.data.path}: changed since this command began; run it again (data.path)")
    with stage.artifact.writing():
        stage.artifact.write_tables(TRAIN_FILE, EXAMPLE_SCHEMA, example_tables(split.train))
        stage.artifact.write_tables(EVALUATION_FILE, EXAMPLE_SCHEMA, example_tables(split.evaluation))
        stage.artifact.write_json(_LOCATIONS, split.locations)
        return stage.artifact.publish(counts=split.counts, seconds={"prepare": time.monotonic() - start})


def prefix_task_errors(task: str | None) -> AbstractContextManager[None]:
    """Prefix errors with the name of the other task: the recipe itself has a `data.path` too."""
    if task is None:
        return nullcontext()
    return reworded(lambda message: f"evaluation.also_evaluate: {task}: {message}")


def _longest_prompt(study: Study) -> int:
    """The longest prompt of training and evaluation, in documents."""
    return max(study.prompt_lengths)
