"""Sample stores, samples without a model's answer in them, and evaluations that are not finished."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore


def open_store(storage: str) -> SampleStore:
    """A sample store under `storage`."""
    return SampleStore(Artifact(storage, "samples", "f00d"))


def make_samples(*ids: str, **values: Any) -> pa.Table:
    """A kept sample of each id. Every other column is null or as given."""
    records = []
    for sample_id in ids:
        empty = dict.fromkeys(SAMPLE_SCHEMA.names)
        records.append(empty | {"text": "42", "outcome": "kept", **values, "sample_id": sample_id})
    return pa.Table.from_pylist(records, schema=SAMPLE_SCHEMA)


def interrupt_evaluation(folder: Path) -> list[Path]:
    """Make of a finished artifact of predictions one that was interrupted with all answers in two parts.

    Returns: the parts.
    """
    predictions = pq.read_table(folder / "predictions.parquet")
    for name in ("manifest.json", "predictions.parquet"):
        (folder / name).unlink()
    half = len(predictions) // 2
    parts = [folder / "parts" / f"part-{number:06d}.parquet" for number in range(2)]
    parts[0].parent.mkdir()
    pq.write_table(predictions[:half], parts[0])
    pq.write_table(predictions[half:], parts[1])
    return parts
