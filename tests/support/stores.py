"""Sample stores, and samples without a model's answer in them."""

from typing import Any

import pyarrow as pa

from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore


def open_store(storage: str) -> SampleStore:
    """A sample store under `storage`, ready to append."""
    store = SampleStore(Artifact(storage, "samples", "f00d"))
    store.open()
    return store


def make_samples(*ids: str, **values: Any) -> pa.Table:
    """A kept sample of each id. Every other column is null or as given."""
    records = []
    for example_id in ids:
        empty = dict.fromkeys(SAMPLE_SCHEMA.names)
        records.append(empty | {"text": "42", "outcome": "kept", **values, "example_id": example_id})
    return pa.Table.from_pylist(records, schema=SAMPLE_SCHEMA)
