"""Greedy answers of one model to the first examples of a file, which the stages that measure accuracy share.

If a server refuses one prompt of a question for its content, the question is left out at every placement, so that
placements stay comparable. Its prompts that were refused are in a second table, which is not there if there are none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config import Study
from pos2distill.errors import TransientError, UserError
from pos2distill.records import PREDICTION_SCHEMA, REFUSAL_SCHEMA
from pos2distill.sampling.blocks import examples_per_block, index_blocks
from pos2distill.sampling.generate import require_responses
from pos2distill.sampling.operators import evaluation_operators, greedy_params, to_predictions, to_refusals
from pos2distill.sampling.prompting import PromptKey, PromptSpec
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.parts import TableParts
from pos2distill.tasks.thoughts import count_thoughts

from .parts_loop import map_and_store
from .prepare import read_prepared
from .stage import Input, RunContext, Stage

PREDICTIONS = "predictions.parquet"
REFUSALS = "refused.parquet"

# The columns that identify a prompt.
_PROMPT_KEY = ("documents", "example_id", "placement", "order")

# What prompts and answers are made with; the data itself is an input.
PROMPT_FIELDS = ("model", "data.template", "data.prompt", "data.metric", "data.hops", "data.documents")


@dataclass(frozen=True, slots=True)
class Predictions:
    """The answers of one model to some examples.

    Attributes:
        answered: a table of `PREDICTION_SCHEMA`, sorted by prompt length, example, placement and order, of the
            examples that are answered at every placement.
        refused: a table of `REFUSAL_SCHEMA`, of all others.
    """

    answered: pa.Table
    refused: pa.Table


def prediction_parts(artifact: Artifact) -> TableParts:
    """The answers of an evaluation, each prompt once, sorted by prompt length, example, placement and order."""
    return TableParts(artifact, PREDICTION_SCHEMA, _PROMPT_KEY)


def refusal_parts(artifact: Artifact) -> TableParts:
    """The prompts of an evaluation that the server refused, sorted as the answers are."""
    return TableParts(artifact, REFUSAL_SCHEMA, _PROMPT_KEY, "refused-parts")


def finished_examples(predictions: pa.Table, prompts_per_example: int) -> pa.Array:
    """The ids of the examples of which every prompt is answered."""
    counts = predictions.group_by("example_id").aggregate([("placement", "count")])
    return counts.filter(pc.equal(counts["placement_count"], prompts_per_example))["example_id"].combine_chunks()


def predict(
    stage: Stage, study: Study, context: RunContext, file: str, count: int, specs: list[PromptSpec]
) -> Predictions:
    """Greedy answers to the first `count` examples of a file of the stage's input `examples`, at every placement.

    Answers and refusals are stored in the stage's artifact as they come, also those that came with a failure which
    ends the run, and an earlier run's are not asked for again.

    Args:
        study: the stage's, with the model that answers.
    Raises:
        UserError: if the engine fails on a prompt, or more examples are refused than `runtime.max_failed_fraction`.
    """
    examples, runtime = stage.inputs["examples"], context.runtime
    prompts_per_example = sum(spec.prompts_per_example for spec in specs)
    total = count * prompts_per_example
    recorder = _Recorder(stage.artifact, count, runtime.max_failed_fraction)
    finished = pa.concat_arrays([finished_examples(recorder.answered, prompts_per_example), _ids(recorder.refused)])
    missing = _missing(examples, file, count, finished)
    # Prompts of examples that an earlier run did not finish.
    answered = _prompt_keys(_without(recorder.answered, finished))
    map_and_store(
        stage,
        context,
        index_blocks(missing, examples_per_block(len(missing), prompts_per_example, runtime.samplers)),
        evaluation_operators(study, runtime, examples.artifact, file, specs, greedy_params(study), answered=answered),
        recorder,
        label="evaluation",
        total=total,
        done=total - len(missing) * prompts_per_example + len(answered),
        unit="prompt",
    )
    return recorder.read(prompts_per_example)


class _Recorder:
    """Stores answers and refusals in an artifact, beside those of earlier runs.

    Args:
        count: number of examples.
        max_refused: the fraction of them that may be left out.
    Attributes:
        answered: what earlier runs have answered.
        refused: what was refused so far.
    Raises:
        UserError: if earlier runs have left out too many.
    """

    def __init__(self, artifact: Artifact, count: int, max_refused: float) -> None:
        self.count, self.max_refused = count, max_refused
        self.parts, self.refused_parts = prediction_parts(artifact), refusal_parts(artifact)
        self.answered, self.refused = self.parts.read(), self.refused_parts.read()
        self.num_answered, self.correct = len(self.answered), _count_correct(self.answered)
        self._require_few_refused()

    def __call__(self, responses: pa.Table) -> str:
        """Store responses. Returns how many answers are correct so far: a wrong template is seen before all are there.

        Raises:
            UserError: if the engine failed on a prompt, or too many examples are left out.
        """
        answers, refused = to_predictions(responses), to_refusals(responses)
        if len(answers):
            self.parts.append(answers)
        if len(refused):
            self.refused_parts.append(refused)
        self.refused = pa.concat_tables([self.refused, refused])
        self.num_answered += len(answers)
        self.correct += _count_correct(answers)
        # After all is stored, so that no answer that was paid for is lost.
        require_responses(responses.filter(pc.field("outcome") != "refused"))
        self._require_few_refused()
        return f"correct {self.correct} of {self.num_answered} so far" if self.num_answered else ""

    def read(self, prompts_per_example: int) -> Predictions:
        """All answers and refusals that are stored.

        Raises:
            TransientError: if that is not all.
        """
        refused = self.refused_parts.read()
        answered = _without(self.parts.read(), _ids(refused))
        expected = (self.count - _count_examples(refused)) * prompts_per_example
        if len(answered) != expected:
            raise TransientError(
                f"{self.parts.artifact.url}: {len(answered)} of {expected} answers are readable; run the same "
                f"command again"
            )
        return Predictions(answered, refused)

    def _require_few_refused(self) -> None:
        """Require that few examples are left out. The order of the questions does not matter.

        Raises:
            UserError: with the reason of the first one.
        """
        left_out = _count_examples(self.refused)
        if left_out > self.max_refused * self.count:
            limit = f"more than runtime.max_failed_fraction={self.max_refused:g}; with a larger one they are left out"
        elif left_out and left_out == self.count:
            limit = "so nothing is measured"
        else:
            return
        first = self.refused.sort_by("example_id").slice(0, 1).to_pylist()[0]
        raise UserError(
            f"the server refuses a prompt of {left_out} of {self.count} questions for its content ({limit}); to ask "
            f"these again, delete {self.refused_parts.url}; the first is example {first['example_id']}: "
            f"{first['error']:.300}"
        )


def _missing(examples: Input, file: str, count: int, finished: pa.Array) -> npt.NDArray[np.int64]:
    """Indices of the first `count` examples of a file that are not finished."""
    ids = read_prepared(examples.artifact, file, ["example_id"])["example_id"][:count]
    return np.flatnonzero(~pc.is_in(ids, value_set=finished).to_numpy())


def _ids(prompts: pa.Table) -> pa.Array:
    return prompts["example_id"].combine_chunks()


def _count_correct(predictions: pa.Table) -> int:
    return pc.sum(predictions["correct"]).as_py() or 0


def _count_examples(prompts: pa.Table) -> int:
    return len(pc.unique(_ids(prompts)))


def _without(predictions: pa.Table, example_ids: pa.Array) -> pa.Table:
    return predictions.filter(pc.invert(pc.is_in(predictions["example_id"], value_set=example_ids)))


def _prompt_keys(predictions: pa.Table) -> frozenset[PromptKey]:
    columns = [predictions[name].to_pylist() for name in _PROMPT_KEY]
    return frozenset(zip(*columns, strict=True))


def publish(
    stage: Stage,
    predictions: Predictions,
    count: int,
    seconds: Mapping[str, float],
    details: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the answers to `count` examples, each table as one file, and publish the artifact."""
    artifact = stage.artifact
    artifact.write_table(PREDICTIONS, predictions.answered)
    if len(predictions.refused):
        artifact.write_table(REFUSALS, predictions.refused)
    manifest = artifact.publish(counts=count_predictions(count, predictions), seconds=seconds, details=details)
    prediction_parts(artifact).remove()
    refusal_parts(artifact).remove()
    return manifest


def read_predictions(artifact: Artifact, columns: list[str] | None = None) -> pa.Table:
    """The answers of a finished evaluation, as a table of `PREDICTION_SCHEMA` or some of its columns.

    Raises:
        UserError: if the file is missing or corrupt, or has another number of rows than the manifest counts.
    """
    return artifact.read_table(PREDICTIONS, columns, schema=PREDICTION_SCHEMA, count="prompts")


def read_refused(artifact: Artifact) -> pa.Table:
    """The prompts of a finished evaluation that the server refused, as a table of `REFUSAL_SCHEMA`."""
    manifest = artifact.manifest()
    if manifest is None or not manifest.counts.get("refused"):
        return REFUSAL_SCHEMA.empty_table()
    return artifact.read_table(REFUSALS)


def count_predictions(examples: int, predictions: Predictions) -> dict[str, int]:
    """What became of every example and prompt, and the tokens of both unless a server did not count them.

    Counts: refused of the examples are left out, because a server refuses one of their prompts; absent if there are
    none. prompts = correct + wrong, of the others; hit_max_tokens of them were cut off at the length limit; thoughts
    and unfinished_thoughts: see `count_thoughts`.
    """
    answered = predictions.answered
    correct = _count_correct(answered)
    counts = {"examples": examples}
    if len(predictions.refused):
        counts["refused"] = _count_examples(predictions.refused)
    counts |= {
        "prompts": len(answered),
        "correct": correct,
        "wrong": len(answered) - correct,
        "hit_max_tokens": pc.sum(pc.equal(answered["finish_reason"], "length")).as_py(),
        **count_thoughts(answered["text"].to_pylist()),
    }
    for name in ("prompt_tokens", "answer_tokens"):
        if answered[name].null_count == 0:
            counts[name] = pc.sum(answered[name]).as_py()
    if answered["prompt_tokens"].null_count:
        counts["without_usage"] = answered["prompt_tokens"].null_count
    return counts
