"""Parquet files that are read by the calling thread.

By default, threads of pyarrow (26.0) read a file, and may release it, a Python object, after all has been read. If the
interpreter ends in between, it aborts (exit code 134): most runs of a short command did.
"""

from typing import Any

from pyarrow.parquet import ParquetFile

__all__ = ["ParquetFile", "open_parquet"]  # the class as a type only


def open_parquet(source: Any, *, coalesce: bool = False) -> ParquetFile:
    """A Parquet file whose checksums are verified. Its methods still take `use_threads=False`.

    Args:
        source: an open file, or a buffer.
        coalesce: read what lies close together at once, by other threads. For files in a network, whose every request
            takes long.
    """
    return ParquetFile(source, page_checksum_verification=True, pre_buffer=coalesce)
