"""The tee into the sample store. Alone in its module, so that the tasks which run it need not import torch."""

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore


def write_samples(batch: pa.Table, artifact: Artifact, tracker_actor: ActorHandle, hand_on: bool) -> pa.Table:
    """Append a batch to the store, from where the batch is, and tell the tracker_actor.

    Args:
        hand_on: the samples go on to the trainers; else their ids alone, for whoever counts them.
    Raises:
        UserError: once too many samples of the run have failed.
    """
    batch = to_samples(batch)
    SampleStore(artifact).append(batch)
    # Waited for: what the tracker_actor refuses ends the run.
    ray.get(
        tracker_actor.count_stored.remote(*(batch[name].to_pylist() for name in ("outcome", "error", "example_id")))
    )
    return batch if hand_on else batch.select(["example_id"])


def to_samples(answers: pa.Table) -> pa.Table:
    """Answers as rows of `SAMPLE_SCHEMA`; what no teacher stage has added is null."""
    for field in SAMPLE_SCHEMA:
        if field.name not in answers.column_names:
            answers = answers.append_column(field, pa.nulls(len(answers), field.type))
    return answers.select(SAMPLE_SCHEMA.names).cast(SAMPLE_SCHEMA)
