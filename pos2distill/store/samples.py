"""The sample store: append-only Parquet parts in one artifact, each example in it once.

A part is named after the examples it holds, so that a batch written twice (its actor died after the write) is one
file. Readers take an example from the first part that holds it, in the order of part names, whatever racing writers
left. A damaged part is named, moved to `damaged/` beside `parts/`, and its examples count as missing.
"""

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pos2distill.errors import CorruptPart
from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.store.artifacts import Artifact, write_table

# Parts are small, and an object store answers many requests at once.
_READERS = 16

# What a damaged part raises; pyarrow's own, and what it says of checksums and of text that is none.
_DAMAGE = (pa.ArrowException, OSError, ValueError)

Indices = npt.NDArray[np.integer[Any]]
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StoreIndex:
    """Which part holds which example of a list of ids.

    parts: names of the parts, sorted. part_of: (N,) int32, for each index of the list the index of its part, or -1.
    """

    parts: tuple[str, ...]
    part_of: npt.NDArray[np.int32]

    @property
    def stored(self) -> npt.NDArray[np.bool_]:
        """(N,) whether the example at each index is stored."""
        return self.part_of >= 0

    @property
    def missing(self) -> npt.NDArray[np.int64]:
        """Indices of the examples that are not stored, in order."""
        return np.flatnonzero(self.part_of < 0)


@dataclass(slots=True)
class Tally:
    """What became of stored examples: how many of each outcome and finish reason, and the teacher's time in seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    teacher_seconds: float = 0.0


class SampleStore:
    """Samples under an artifact of their own.

    `ids` is everywhere the same list of all training ids, none of them twice; an index is an index into it.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.folder = f"{artifact.path}/parts"
        self.damaged = f"{artifact.path}/damaged"

    def open(self) -> None:
        """Make ready to append; parts of an interrupted run stay and count."""
        self.artifact.fs.makedirs(self.folder, exist_ok=True)

    def append(self, samples: pa.Table) -> str:
        """Write one part, whole or not at all.

        Args:
            samples: rows of `SAMPLE_SCHEMA`, at least one.
        Returns: the part's name.
        """
        name = _part_name(samples["example_id"])
        write_table(self.artifact.fs, f"{self.folder}/{name}", samples.cast(SAMPLE_SCHEMA))
        return name

    def part_names(self) -> list[str]:
        """Names of all parts, sorted."""
        self.artifact.fs.invalidate_cache(self.folder)  # other processes write parts too
        paths = self.artifact.fs.glob(f"{self.folder}/part-*.parquet")
        return sorted(str(path).rsplit("/", 1)[-1] for path in paths)

    def index(self, ids: Sequence[str] | pa.Array, known: StoreIndex | None = None) -> StoreIndex:
        """Find the part of every example; damaged parts are set aside. Examples that `ids` lacks are ignored.

        Args:
            known: an earlier index of the same ids; parts that it knows are not read again.
        """
        names = self.part_names()
        if known and not set(known.parts) <= set(names):
            known = None  # a part was set aside, and others may hold examples of it
        new = sorted(set(names).difference(known.parts if known else ()))
        held = {name: part for name, part in zip(new, _map(self._ids_of, new), strict=True) if part is not None}
        parts = tuple(sorted([*held, *(known.parts if known else ())]))
        number = {name: index for index, name in enumerate(parts)}
        none = len(parts)  # higher than any part, so that the first part in name order is the least number
        part_of = np.full(len(ids), none, np.int32)
        if known:
            part_of = np.asarray([*(number[name] for name in known.parts), none], np.int32)[known.part_of]
        if held:
            owners = np.repeat([number[name] for name in held], [len(part) for part in held.values()])
            # Indices that `ids` lacks are null, here -1.
            indices = pc.index_in(pa.concat_arrays(list(held.values())), value_set=_array(ids)).fill_null(-1).to_numpy()
            np.minimum.at(part_of, indices[indices >= 0], owners[indices >= 0].astype(np.int32))
        part_of[part_of == none] = -1
        return StoreIndex(parts, part_of)

    def load(
        self, index: StoreIndex, ids: Sequence[str] | pa.Array, indices: Indices, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """The samples at these indices, in their order. Each part concerned is read once, and no other.

        Args:
            columns: which to read, by default all.
        Raises:
            ValueError: if the index has no sample at one of the indices.
            CorruptPart: if a part is damaged or gone; it is set aside, and the index is out of date.
        """
        indices = np.asarray(indices)
        if absent := indices[~index.stored[indices]].tolist():
            raise ValueError(f"{self.artifact.url}: no sample at indices {absent[:5]}")
        names = list(columns or SAMPLE_SCHEMA.names)
        schema = pa.schema([SAMPLE_SCHEMA.field(name) for name in names], SAMPLE_SCHEMA.metadata)
        order = np.argsort(index.part_of[indices], kind="stable")
        pieces = self._map_parts(lambda piece: piece, index, ids, indices[order], names)
        table = pa.concat_tables([schema.empty_table(), *pieces])
        return table.take(np.argsort(order))

    def tally(self, index: StoreIndex, ids: Sequence[str] | pa.Array) -> Tally:
        """Count what became of the stored examples, each once, part by part.

        Raises:
            CorruptPart: as `load`.
        """
        total = Tally()
        indices = np.argsort(index.part_of, kind="stable")[len(index.missing) :]
        names = ["outcome", "finish_reason", "teacher_seconds"]
        for each in self._map_parts(_tally_of, index, ids, indices, names):
            total.outcomes += each.outcomes
            total.finish_reasons += each.finish_reasons
            total.teacher_seconds += each.teacher_seconds
        return total

    def _map_parts(
        self,
        function: Callable[[pa.Table], _T],
        index: StoreIndex,
        ids: Sequence[str] | pa.Array,
        indices: Indices,
        names: list[str],
    ) -> Iterator[_T]:
        """`function` of each part's rows at these indices, which are sorted by part."""
        numbers, starts = np.unique(index.part_of[indices], return_index=True)
        wanted = _array(ids).take(pa.array(indices))

        def of_part(number: int, start: int, stop: int) -> _T:
            table = self._read(index.parts[number], list({*names, "example_id"}))
            rows = pc.index_in(wanted[start:stop], value_set=table["example_id"].combine_chunks())
            return function(table.select(names).take(rows))

        return _map(of_part, numbers, starts, [*starts[1:], len(indices)])

    def _ids_of(self, name: str) -> pa.Array | None:
        """The examples of a part, or None where it is damaged or gone."""
        try:
            return self._read(name, ["example_id"])["example_id"].combine_chunks()
        except CorruptPart:
            return None

    def _read(self, name: str, columns: list[str]) -> pa.Table:
        """Columns of one part, `example_id` among them.

        What cannot be read is looked at again from a copy in memory, where no fault on the way looks like damage; a
        storage that does not answer raises its own error.

        Raises:
            CorruptPart: if the part is damaged, and now set aside, or gone.
        """
        path = f"{self.folder}/{name}"
        fs = self.artifact.fs
        with contextlib.suppress(*_DAMAGE), fs.open(path, cache_type="none") as file:
            return _parse(file, name, columns)
        try:
            data = fs.cat_file(path)
        except FileNotFoundError:
            raise CorruptPart(f"{path}: is gone; its examples are sampled again") from None
        try:
            return _parse(pa.BufferReader(data), name, SAMPLE_SCHEMA.names).select(columns)
        except _DAMAGE as error:
            raise self._set_aside(name, str(error).partition("\n")[0]) from None

    def _set_aside(self, name: str, reason: str) -> CorruptPart:
        fs = self.artifact.fs
        fs.makedirs(self.damaged, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process was first
            fs.mv(f"{self.folder}/{name}", f"{self.damaged}/{name}")
        damage = CorruptPart(
            f"{self.folder}/{name}: damaged ({reason}); moved to {self.damaged}, its examples are sampled again"
        )
        _logger.warning("%s", damage)
        return damage


def _part_name(example_ids: pa.ChunkedArray) -> str:
    ids = "\n".join(sorted(example_ids.to_pylist()))
    return f"part-{hashlib.sha256(ids.encode()).hexdigest()[:16]}.parquet"


def _parse(source: Any, name: str, columns: list[str]) -> pa.Table:
    """Columns of a part.

    Raises:
        one of `_DAMAGE`: if it is damaged in what was looked at.
    """
    file = pq.ParquetFile(source, page_checksum_verification=True)
    schema = file.schema_arrow
    found, wanted = ((each.metadata or {}).get(b"schema_version", b"none") for each in (schema, SAMPLE_SCHEMA))
    if found != wanted:
        raise ValueError(f"schema version {found.decode()}, not {wanted.decode()}")
    if not schema.equals(SAMPLE_SCHEMA):
        raise ValueError("its columns are not those of a sample")
    table = file.read(columns, use_threads=False)
    table.validate()
    if _part_name(table["example_id"]) != name:
        raise ValueError("it does not hold the examples that it is named after")
    return table.select(columns)


def _tally_of(samples: pa.Table) -> Tally:
    outcomes, reasons, seconds = samples.columns
    return Tally(Counter(outcomes.to_pylist()), Counter(reasons.to_pylist()), pc.sum(seconds).as_py() or 0.0)


def _array(ids: Sequence[str] | pa.Array) -> pa.Array:
    return ids if isinstance(ids, pa.Array) else pa.array(ids, pa.string())


def _map(function: Callable[..., _T], *items: Iterable[Any]) -> Iterator[_T]:
    """As the built-in `map`, several calls at a time."""
    with ThreadPoolExecutor(_READERS) as pool:
        yield from pool.map(function, *items)
