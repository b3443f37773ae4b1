"""Records of a Parquet file: its rows as Python values."""

from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa

from pos2distill.errors import UserError
from pos2distill.parquet import open_parquet

_ROWS = 256  # in a batch


def parquet_records(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) for each row, its null fields left out, dates as text and all other times as numbers.

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
            for row in _to_rows(_with_readable_times(batch), number, url):
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


def _with_readable_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with dates as text and all other times as numbers, at any depth.

    Python's own end with the year 9999, and it knows fewer time zones than there are.
    """
    readable = pa.schema([_readable_field(field) for field in batch.schema])
    return batch if readable == batch.schema else batch.cast(readable)


def _readable_type(kind: pa.DataType) -> pa.DataType:
    """The type to which `_with_readable_times` casts one."""
    if pa.types.is_struct(kind):
        return pa.struct([_readable_field(field) for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_readable_field(kind.value_field), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_readable_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_readable_field(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(_readable_type(kind.key_type), _readable_type(kind.item_type))
    return _readable_time(kind)


def _readable_field(field: pa.Field) -> pa.Field:
    return field.with_type(_readable_type(field.type))


def _readable_time(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_time32(kind):
        return pa.int32()
    # Arrow 26.0 casts no interval.
    is_time = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    return pa.int64() if is_time else kind
