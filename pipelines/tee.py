"""The tee into the sample store. Alone in its module, so that the tasks which run it need not import torch."""

import pyarrow as pa

from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore


def write_samples(batch: pa.Table, artifact: Artifact) -> pa.Table:
    """Append a batch to the store, from where the batch is, and hand on only a receipt.

    Teacher columns that a resident teacher leaves out are written as nulls.
    """
    for field in SAMPLE_SCHEMA:
        if field.name not in batch.column_names:
            batch = batch.append_column(field, pa.nulls(len(batch), field.type))
    part = SampleStore(artifact).append(batch.select(SAMPLE_SCHEMA.names))
    told = {"outcomes": "outcome", "errors": "error", "example_ids": "example_id"}
    return pa.table({"part": [part]} | {name: [batch[column].to_pylist()] for name, column in told.items()})
