"""The sample store: append-only Parquet parts in one artifact; each sample is read once.

A part is named after the ids of its samples, so a batch that is written twice (its actor died after the write) gives
one file. Writers that race may leave a sample in several parts; every reader uses the first of them in the order of
part names. A corrupt part is named in the log, moved from `parts/` to `quarantine/`, and its samples count as missing;
a store that is opened read-only rejects it instead.
"""

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from fsspec.implementations.local import LocalFileSystem

from pos2distill.errors import CorruptPart, UserError
from pos2distill.faults import error_text
from pos2distill.literal_paths import last_part, list_matching, make_folder, move
from pos2distill.parquet import open_parquet
from pos2distill.records import SAMPLE_SCHEMA, Bools
from pos2distill.store.artifacts import Artifact
from pos2distill.store.files import write_table
from pos2distill.store.parallel_map import parallel_map
from pos2distill.tasks.thoughts import count_thoughts

# What reading a corrupt part raises. pyarrow 26 raises OSError for a checksum or a page that is wrong, ArrowException
# for other errors of the format, and UnicodeDecodeError, a ValueError, for text that is not UTF-8.
_CORRUPTION_ERRORS = (pa.ArrowException, OSError, ValueError)

IntegerArray = npt.NDArray[np.integer[Any]]
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class UnreadablePartError(UserError):
    """A part of a store that is only read is corrupt or missing. It stays where it is."""


@dataclass(frozen=True, slots=True, eq=False)
class StoreIndex:
    """Which part holds each sample of a list of N ids.

    Attributes:
        ids: the list.
        parts: names of the parts, sorted.
        part_of: (N,) int32, for each sample the index of its part in `parts`, or -1 if it is not stored.
    """

    ids: pa.Array
    parts: tuple[str, ...]
    part_of: npt.NDArray[np.int32]

    @property
    def stored(self) -> Bools:
        """(N,) bool: whether each sample is stored."""
        return self.part_of >= 0


@dataclass(slots=True)
class Tally:
    """What a store holds of N samples: counts by outcome and by finish reason, and of thoughts (`count_thoughts`).

    Attributes:
        sampled_N: which samples are stored.
        kept_N: which of them are kept.
    """

    sampled_N: Bools
    kept_N: Bools
    outcomes: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    thoughts: Counter[str] = field(default_factory=Counter)


class SampleStore:
    """The samples of one artifact.

    `ids` is always the list of all sample ids (`sample_ids`), each of them once. `indices` are indices into it.

    Args:
        read_only: raise UnreadablePartError for a part that is corrupt or missing, instead of moving it.
    """

    def __init__(self, artifact: Artifact, *, read_only: bool = False) -> None:
        self.artifact = artifact
        self.read_only = read_only
        self.folder = f"{artifact.path}/parts"
        self.quarantine = f"{artifact.path}/quarantine"

    def append(self, samples: pa.Table) -> str:
        """Write one part atomically: readers see all of it or nothing.

        Args:
            samples: a table of `SAMPLE_SCHEMA` with at least one row.
        Returns: the part's name.
        """
        name = _part_name(samples["sample_id"])
        make_folder(self.artifact.fs, self.folder)
        write_table(self.artifact.fs, f"{self.folder}/{name}", samples.cast(SAMPLE_SCHEMA))
        return name

    def part_names(self) -> list[str]:
        """Names of all parts, sorted."""
        return [last_part(path) for path in list_matching(self.artifact.fs, self.folder, "part-*.parquet")]

    def index(self, ids: Sequence[str] | pa.Array) -> StoreIndex:
        """Find the part of every sample, and quarantine corrupt parts. Samples that `ids` lacks are ignored."""
        ids = ids if isinstance(ids, pa.Array) else pa.array(ids, pa.string())
        names = self.part_names()
        ids_by_part: dict[str, pa.Array] = {}
        for name, part_ids in zip(names, parallel_map(self._read_ids, names), strict=True):
            if part_ids is not None:
                ids_by_part[name] = part_ids

        parts = tuple(ids_by_part)
        # The first part in name order counts, so a sample gets the least number of the parts that hold it. Until a
        # part is found, its number is higher than that of any part.
        no_part = len(parts)
        part_of = np.full(len(ids), no_part, np.int32)
        if parts:
            # One lookup for all parts, since each lookup builds a hash table of all ids.
            found = pc.index_in(pa.concat_arrays(list(ids_by_part.values())), value_set=ids)
            part_sizes = [len(part_ids) for part_ids in ids_by_part.values()]
            part_numbers = np.repeat(np.arange(len(parts), dtype=np.int32), part_sizes)
            in_ids = found.is_valid().to_numpy(zero_copy_only=False)
            np.minimum.at(part_of, found.drop_null().to_numpy(), part_numbers[in_ids])
        part_of[part_of == no_part] = -1
        return StoreIndex(ids, parts, part_of)

    def load(self, index: StoreIndex, indices: IntegerArray, columns: Sequence[str] | None = None) -> pa.Table:
        """The samples at these indices, in this order. Only the parts that hold them are read, each of them once.

        Args:
            columns: the columns to read; all by default.
        Raises:
            ValueError: if `index` has no sample at one of the indices.
            CorruptPart: if a part is corrupt or missing. It is quarantined, and `index` is out of date.
        """
        indices = np.asarray(indices)
        absent = indices[~index.stored[indices]].tolist()
        if absent:
            raise ValueError(f"{self.artifact.url}: no sample at indices {absent[:5]}")
        names = list(columns or SAMPLE_SCHEMA.names)
        schema = pa.schema([SAMPLE_SCHEMA.field(name) for name in names], SAMPLE_SCHEMA.metadata)
        order: list[IntegerArray] = [np.empty(0, np.int64)]
        tables = [schema.empty_table()]
        for rows, table in self._map_parts(lambda table: table, index, indices, names):
            order.append(rows)
            tables.append(table)
        # From the order of the parts to the requested one: the argsort of a permutation is its inverse.
        return pa.concat_tables(tables).take(np.argsort(np.concatenate(order)))

    def read_index_and_kept(self, ids: Sequence[str] | pa.Array) -> tuple[StoreIndex, Bools]:
        """The index, and `kept` of it; without parts that turn out to be corrupt."""
        return self._without_corrupt_parts(self.kept, ids)

    def read_tally(self, ids: Sequence[str] | pa.Array) -> Tally:
        """The `tally` of what is stored; without parts that turn out to be corrupt."""
        _, tally = self._without_corrupt_parts(self.tally, ids)
        return tally

    def _without_corrupt_parts(
        self, read: Callable[[StoreIndex], _T], ids: Sequence[str] | pa.Array
    ) -> tuple[StoreIndex, _T]:
        while True:
            index = self.index(ids)
            try:
                return index, read(index)
            except CorruptPart:
                continue  # it has been quarantined and reported, and no longer counts

    def kept(self, index: StoreIndex) -> Bools:
        """(N,) bool: which samples are stored and kept. Reads one column of a few parts at a time.

        Raises:
            CorruptPart: see `load`.
        """
        stored = np.flatnonzero(index.stored)
        kept = np.zeros(len(index.ids), bool)
        for rows, kept_rows in self._map_parts(_kept_rows, index, stored, ["outcome"]):
            kept[stored[rows]] = kept_rows
        return kept

    def tally(self, index: StoreIndex) -> Tally:
        """Count outcomes, finish reasons and thoughts of the stored samples, each once.

        Raises:
            CorruptPart: see `load`.
        """
        total = Tally(index.stored, np.zeros(len(index.ids), bool))
        stored = np.flatnonzero(index.stored)
        for rows, part in self._map_parts(_tally_table, index, stored, ["outcome", "finish_reason", "text"]):
            total.kept_N[stored[rows]] = part.kept_N
            total.outcomes += part.outcomes
            total.finish_reasons += part.finish_reasons
            total.thoughts += part.thoughts
        return total

    def _map_parts(
        self, function: Callable[[pa.Table], _T], index: StoreIndex, indices: IntegerArray, columns: list[str]
    ) -> Iterator[tuple[IntegerArray, _T]]:
        """Apply `function` to the samples of each part at these indices.

        Yields, for each part, which of `indices` (numbered from 0) it holds, and the result for them in that order.
        """
        by_part = np.argsort(index.part_of[indices], kind="stable")
        numbers, starts = np.unique(index.part_of[indices][by_part], return_index=True)
        rows_by_part = np.split(by_part, starts[1:])
        read_columns = [*columns] if "sample_id" in columns else [*columns, "sample_id"]

        def apply(number: int, rows: IntegerArray) -> tuple[IntegerArray, _T]:
            table = self._read(index.parts[number], read_columns)
            part_ids = table["sample_id"].combine_chunks()
            found = pc.index_in(index.ids.take(pa.array(indices[rows])), value_set=part_ids)
            return rows, function(table.select(columns).take(found))

        # Without indices there are no numbers, and `split` returns one array all the same.
        return parallel_map(apply, numbers, rows_by_part[: len(numbers)])

    def _read_ids(self, name: str) -> pa.Array | None:
        """The ids of a part's samples, or None if the part is corrupt or missing."""
        try:
            return self._read(name, ["sample_id"])["sample_id"].combine_chunks()
        except CorruptPart:
            return None

    def _read(self, name: str, columns: list[str]) -> pa.Table:
        """Columns of one part, `sample_id` among them.

        A part that cannot be read is downloaded whole and parsed again, so that an error of the connection is not
        taken for corruption. A storage that does not respond raises its own error.

        Raises:
            CorruptPart: if the part is corrupt, and now quarantined, or missing.
            UnreadablePartError: instead, if the store is read-only.
        """
        path = f"{self.folder}/{name}"
        fs = self.artifact.fs
        with contextlib.suppress(*_CORRUPTION_ERRORS), fs.open(path, cache_type="none") as file:
            # Each request to a store in a network takes long.
            return _parse(file, name, columns, coalesce=not isinstance(fs, LocalFileSystem))
        try:
            data = fs.cat_file(path)
        except FileNotFoundError:
            if self.read_only:
                raise UnreadablePartError(f"{path}: not found any more; run the same command again") from None
            raise CorruptPart(f"{path}: not found; its samples will be made again") from None
        try:
            return _parse(pa.BufferReader(data), name, SAMPLE_SCHEMA.names).select(columns)
        except _CORRUPTION_ERRORS as error:
            reason = error_text(error)
            if self.read_only:
                raise UnreadablePartError(
                    f"{path}: corrupt ({reason}); a run that trains on its samples makes them again"
                ) from None
            raise self._quarantine(name, reason) from None

    def _quarantine(self, name: str, reason: str) -> CorruptPart:
        """Move a part to `quarantine/`, log it, and return the error to raise."""
        fs = self.artifact.fs
        make_folder(fs, self.quarantine)
        with contextlib.suppress(FileNotFoundError):  # another process has moved it already
            move(fs, f"{self.folder}/{name}", f"{self.quarantine}/{name}")
        error = CorruptPart(
            f"{self.folder}/{name}: corrupt ({reason}); moved to {self.quarantine}, its samples will be made again"
        )
        _logger.warning("%s", error)
        return error


def _part_name(sample_ids: pa.ChunkedArray) -> str:
    """A name that depends on the ids only, not on their order."""
    ids = "\n".join(sorted(sample_ids.to_pylist()))
    return f"part-{hashlib.sha256(ids.encode()).hexdigest()[:16]}.parquet"


def _parse(source: Any, name: str, columns: list[str], *, coalesce: bool = False) -> pa.Table:
    """Read columns of a part and check its schema, checksums and name.

    Raises:
        one of `_CORRUPTION_ERRORS`: if the schema, the name or one of the columns is wrong.
    """
    file = open_parquet(source, coalesce=coalesce)
    version = _schema_version(file.schema_arrow)
    expected_version = _schema_version(SAMPLE_SCHEMA)
    if version != expected_version:
        raise ValueError(f"schema version {version}, expected {expected_version}")
    if not file.schema_arrow.equals(SAMPLE_SCHEMA):
        raise ValueError("its columns are not those of SAMPLE_SCHEMA")
    # Parts are read in parallel already, so each of them uses one thread.
    table = file.read(columns, use_threads=False)
    table.validate()
    if _part_name(table["sample_id"]) != name:
        raise ValueError("its samples are not those that it is named after")
    return table.select(columns)


def _schema_version(schema: pa.Schema) -> str:
    metadata: dict[bytes, bytes] = schema.metadata or {}
    return metadata.get(b"schema_version", b"none").decode()


def _kept_rows(samples: pa.Table) -> Bools:
    kept: Bools = pc.equal(samples["outcome"], "kept").to_numpy()
    return kept


def _tally_table(samples: pa.Table) -> Tally:
    outcomes, finish_reasons, texts = (column.to_pylist() for column in samples.columns)
    thoughts = count_thoughts(text or "" for text in texts)
    sampled = np.ones(len(samples), bool)
    return Tally(sampled, _kept_rows(samples), Counter(outcomes), Counter(finish_reasons), thoughts)
