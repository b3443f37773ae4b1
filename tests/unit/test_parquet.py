import io
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pos2distill.parquet import open_parquet


class Recorder(io.BytesIO):
    """A file that records the threads that read it."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.threads: set[int] = set()

    def read(self, size: int | None = -1) -> bytes:
        self.threads.add(threading.get_ident())
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.threads.add(threading.get_ident())
        return super().seek(offset, whence)


@pytest.fixture
def table() -> pa.Table:
    rows = np.random.default_rng(0).integers(1000, size=(5000, 6))
    return pa.table({f"column {number}": rows[:, number] for number in range(6)})


@pytest.fixture
def recorder(table: pa.Table) -> Recorder:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=500, write_page_checksum=True)
    return Recorder(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("in_part", [False, True])
def test_open_parquet_reads_in_the_calling_thread(table: pa.Table, recorder: Recorder, *, in_part: bool) -> None:
    """A thread of pyarrow that still holds the file when the interpreter ends would abort it."""
    file = open_parquet(recorder)
    if in_part:
        assert next(file.iter_batches(7, use_threads=False)).num_rows == 7
        assert file.read_row_groups([3, 5], use_threads=False).num_rows == 1000
    else:
        assert file.read(use_threads=False).equals(table)
    assert recorder.threads == {threading.get_ident()}


def test_pyarrow_reads_in_other_threads_by_itself(recorder: Recorder) -> None:
    """As soon as it does not, `open_parquet` is no longer needed."""
    pq.ParquetFile(recorder, pre_buffer=True).read()
    assert recorder.threads > {threading.get_ident()}


def test_open_parquet_verifies_checksums(recorder: Recorder) -> None:
    content = bytearray(recorder.getvalue())
    content[len(content) // 3] ^= 1
    with pytest.raises(OSError, match="CRC"):
        open_parquet(io.BytesIO(bytes(content))).read(use_threads=False)
