"""Records of a Parquet file: its rows as Python values."""

from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pyarrow as pa

from pos2distill.errors import UserError
from pos2distill.parquet import open_parquet

_ROWS = 256  # in a batch


def parquet_records(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) for each row, its null fields left out, dates and times as text.

    Raises:
        UserError: a column name that occurs twice, a text that is not UTF-8.
    """
    number = 0
    # Not decompressed: Parquet compresses its own pages, and is read in any order.
    with fsspec.open(url, "rb") as file:
        parquet = open_parquet(file)
        names = parquet.schema_arrow.names
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"{url}, column {name}: given twice")
        for batch in parquet.iter_batches(_ROWS, use_threads=False):
            for row in _to_rows(_with_times_as_text(batch), number, url):
                number += 1
                yield f"row {number}", drop_null_fields(row)


def drop_null_fields(value: Any) -> Any:
    """A value without null fields, at any depth: Parquet has every field in every row."""
    if isinstance(value, dict):
        return {name: drop_null_fields(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [drop_null_fields(element) for element in value]
    return value


def _to_rows(batch: pa.RecordBatch, before: int, url: str) -> list[dict[str, Any]]:
    """The rows of a batch. `before`: rows of the file before it."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    except UnicodeDecodeError:
        pass
    for index in range(len(batch)):
        for name in batch.schema.names:
            try:
                batch[name][index].as_py()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{url}, row {before + index + 1}, {name}: not UTF-8 ({error.reason} at byte {error.start})"
                ) from None
    raise RuntimeError(f"{url}: rows {before + 1} to {before + len(batch)} cannot be read together, but one by one")


def _with_times_as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with dates and times as text, at any depth: those of Python end with the year 9999, and it knows fewer
    time zones than there are.
    """
    # In two steps, since the text of a time with a time zone needs that zone.
    for convert in (_without_time_zone, _time_to_text):
        converted = pa.schema([field.with_type(_convert_type(field.type, convert)) for field in batch.schema])
        if converted != batch.schema:
            batch = batch.cast(converted)
    return batch


def _without_time_zone(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind


def _time_to_text(kind: pa.DataType) -> pa.DataType:
    # Arrow 26.0 has no text of an interval.
    is_time = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    return pa.string() if is_time else kind


def _convert_type(kind: pa.DataType, convert: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type with `convert` applied to it and to the types inside it."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_convert_type(field.type, convert)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_convert_type(kind.value_type, convert)))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _convert_type(kind.item_type, convert))
    return convert(kind)
