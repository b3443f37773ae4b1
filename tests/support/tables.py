"""Stored data as tests write and read it."""

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pos2distill.records import EXAMPLE_SCHEMA, Example, example_tables
from pos2distill.store.samples import StoreIndex
from pos2distill.store.selection import Selection


def examples_to_table(examples: Sequence[Example]) -> pa.Table:
    """Examples as one table of `EXAMPLE_SCHEMA`."""
    return pa.concat_tables([EXAMPLE_SCHEMA.empty_table(), *example_tables(examples)])


def missing_in(index: StoreIndex) -> list[int]:
    """Indices of the examples that are not stored, in order."""
    missing: list[int] = np.flatnonzero(~index.stored).tolist()
    return missing


def nothing_known(examples: int, wanted: int) -> Selection:
    """A selection before the first answer."""
    nothing_N = np.zeros(examples, bool)
    return Selection(nothing_N, nothing_N, wanted)


def decode_questions(text: str) -> dict[str, Any]:
    """The inverse of `encode_questions`."""
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(text)))
    return data
