"""Which samples make up which global batch: every example once an epoch, from the store or as it is sampled.

All ranks see the same batches; `rows_of_rank` divides each between them. So everything that a batch depends on (what
the store holds, what the stream has brought) is gathered from all ranks before it is used.

An epoch takes its samples from one of four sources:

    store complete                       from the store, in the epoch's order
    first epoch, training.order=arrival  from the store, then from the stream as it brings them
    first epoch, training.order=fixed    in the epoch's order; a sample that arrives early waits
    a later epoch, store incomplete      from the store, once the stream has replaced what was lost
"""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pos2distill.config import Study
from pos2distill.errors import UserError
from pos2distill.randomness import derive_generator
from pos2distill.store.samples import SampleStore, StoreIndex
from pos2distill.training.distributed import DistContext
from pos2distill.training.rows import Sample, examples_per_batch, kept_samples

WINDOW = 256
"""Examples that are read, and shuffled, together. An epoch's order does not depend on how the store is cut."""

_PROGRESS_FILE = "progress.json"

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IndexedSample:
    """An example's index among the training examples, and its sample; None if it was not kept."""

    index: int
    sample: Sample | None


Arrival = list[IndexedSample]
"""Samples that have become available. Empty if the stream brought nothing new."""


class StreamReader(Protocol):
    """This rank's part of a live stream of samples."""

    def poll(self) -> pa.Table | None:
        """New samples; an empty table if none came within a short wait; None once the stream has ended."""


@dataclass
class TrainingProgress:
    """How far training is: the next step, the epoch, and which of its examples are done.

    Attributes:
        done: (N,) bool, the examples that the epoch has processed, whether trained on or not kept.
    """

    step: int
    epoch: int
    done: npt.NDArray[np.bool_]

    @classmethod
    def at_start(cls, examples: int) -> "TrainingProgress":
        """The progress of a run that has not begun, over `examples` examples."""
        return cls(0, 0, np.zeros(examples, bool))

    @classmethod
    def load(cls, folder: Path) -> "TrainingProgress":
        """Read what `save` wrote."""
        raw = json.loads((folder / _PROGRESS_FILE).read_text())
        bits = np.frombuffer(base64.b64decode(raw["done"]), np.uint8)
        # `packbits` fills the last byte with zeros; `count` removes them.
        return cls(raw["step"], raw["epoch"], np.unpackbits(bits, count=raw["examples"]).astype(bool))

    def save(self, folder: Path) -> None:
        """Write one small JSON file."""
        # One bit for each example, so that the file stays small with millions of examples.
        bits = base64.b64encode(np.packbits(self.done).tobytes()).decode()
        raw = {"step": self.step, "epoch": self.epoch, "examples": len(self.done), "done": bits}
        (folder / _PROGRESS_FILE).write_text(json.dumps(raw) + "\n")

    def add(self, batch: "Batch") -> None:
        """Count a batch that has been trained on."""
        if batch.epoch > self.epoch:
            self.epoch, self.done = batch.epoch, np.zeros_like(self.done)
        self.done[batch.indices] = True
        if batch.samples:
            self.step += 1


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch. An empty one says that no sample came in a while: time to handle requests.

    Attributes:
        epoch: from 0.
        indices: of the examples that it processes.
        samples: of those examples that were kept; possibly none.
        fraction: of the whole run that is completed after this batch, in (0, 1].
    """

    epoch: int
    indices: Indices
    samples: tuple[Sample, ...]
    fraction: float


class BatchLoader:
    """Cuts the samples of all epochs into global batches.

    Every rank makes one and iterates over it in step with the others: it calls collectives of `dist`.

    Args:
        study: seed, method and batch size.
        ids: the ids of all training examples, in their order; an example's index is its position here.
        store: where samples are. The stream's samples are stored before they arrive here.
        open_stream: opens this rank's part of the samples that the store lacks; called at most once an epoch, and only
            if the store lacks any.
        dist: the group of ranks.
    """

    def __init__(
        self,
        study: Study,
        ids: pa.Array,
        store: SampleStore,
        open_stream: Callable[[], StreamReader],
        dist: DistContext,
    ) -> None:
        self.study = study
        self.ids = ids
        self.store = store
        self.open_stream = open_stream
        self.dist = dist
        self._index_of = {example_id: index for index, example_id in enumerate(ids.to_pylist())}
        self._store_index = self._read_store_index()

    def batches(self, progress: TrainingProgress) -> Iterator[Batch]:
        """The batches from `progress` to the end.

        Raises:
            UserError: at the end, if no sample of the whole run was kept.
        """
        # Counted from the start of the run: a resumed run that has nothing left to do is no error.
        any_kept = progress.step > 0
        for epoch in range(progress.epoch, self.study.training.epochs):
            done = np.zeros(len(self.ids), bool)
            if epoch == progress.epoch:
                # A copy, since the caller updates `progress` while it iterates over the batches.
                done = progress.done.copy()
            for batch in self._batches_of_epoch(epoch, done):
                any_kept = any_kept or len(batch.samples) > 0
                yield batch
        if not any_kept:
            raise UserError("no sample was kept, so there is nothing to train on")

    def _batches_of_epoch(self, epoch: int, done: npt.NDArray[np.bool_]) -> Iterator[Batch]:
        """Collect arriving samples until they fill a batch; the last batch takes what is left."""
        collected = _Collector(epoch, self.study, done)
        for arrival in self._arrivals(epoch, done):
            # Passed on, since a request to stop must not wait until sampling has filled a batch.
            if not arrival:
                yield collected.empty_batch()
            for indexed in arrival:
                collected.add(indexed)
                if collected.is_full:
                    yield collected.batch()
        # Also if no sample of them was kept: the examples count as done, without a step.
        if collected.indices:
            yield collected.batch()

    # --- where an epoch's samples come from

    def _arrivals(self, epoch: int, done: npt.NDArray[np.bool_]) -> Iterator[Arrival]:
        """Each example that is not done, exactly once, from the source that the module's table names."""
        # The order is that of all examples, so that a resumed epoch continues where it stopped.
        order = epoch_order(len(self.ids), self.study.seed, epoch)
        remaining = order[~done[order]]
        if len(self._store_index.missing) == 0:
            return self._from_store(remaining)
        # Opened before anything is read, so that sampling runs while stored samples are trained on.
        stream = _GatheredStream(self.open_stream(), self.dist)
        if epoch > 0:
            return self._from_store_after(stream, remaining)
        if self.study.training.order == "fixed":
            return self._in_fixed_order(stream, remaining)
        return self._in_order_of_arrival(stream, remaining)

    def _from_store(self, indices: Indices) -> Iterator[Arrival]:
        # One window at a time, so that memory does not hold a whole epoch of samples.
        for start in range(0, len(indices), WINDOW):
            yield self._load(indices[start : start + WINDOW])

    def _from_store_after(self, stream: "_GatheredStream", remaining: Indices) -> Iterator[Arrival]:
        """A later epoch that lacks samples: a part of the store was corrupt, and the stream brings them again."""
        yield from self._wait_for_end(stream)
        yield from self._from_store(remaining)

    def _in_order_of_arrival(self, stream: "_GatheredStream", remaining: Indices) -> Iterator[Arrival]:
        """What the store holds at the beginning, then the stream, then what the stream left out."""
        stored = remaining[self._store_index.stored[remaining]]
        pending = np.zeros(len(self.ids), bool)
        pending[remaining] = True
        pending[stored] = False
        yield from self._from_store(stored)
        for table in stream:
            if len(table) == 0:
                yield []
            for indexed in self._indexed(table):
                # The stream may bring an example twice, or one that the store already had.
                if pending[indexed.index]:
                    pending[indexed.index] = False
                    yield [indexed]
        self._check_store_is_complete()
        # Ray Data's streaming_split(equal=True) drops rows at its end (Ray 2.60); the store holds those, too.
        yield from self._from_store(remaining[pending[remaining]])

    def _in_fixed_order(self, stream: "_GatheredStream", remaining: Indices) -> Iterator[Arrival]:
        """The epoch's order, in whichever order samples arrive."""
        is_stored = self._store_index.stored
        stored = self._one_by_one(self._from_store(remaining[is_stored[remaining]]))
        # Samples that arrived before their turn.
        early: dict[int, Sample | None] = {}
        for position, index in enumerate(remaining.tolist()):
            if is_stored[index]:
                yield [next(stored)]
                continue
            while index not in early:
                table = stream.poll()
                if table is None:
                    # The stream has ended without this example. The store now holds all that are left.
                    self._check_store_is_complete()
                    yield from self._from_store(remaining[position:])
                    return
                if len(table) == 0:
                    yield []
                for indexed in self._indexed(table):
                    early[indexed.index] = indexed.sample
            yield [IndexedSample(index, early.pop(index))]
        # Later epochs read from the store, so the stream must have stored everything, and the index is read again.
        yield from self._wait_for_end(stream)

    def _wait_for_end(self, stream: "_GatheredStream") -> Iterator[Arrival]:
        # Each empty arrival lets the ranks agree on a checkpoint or a stop while they wait.
        for _ in stream:
            yield []
        self._check_store_is_complete()

    @staticmethod
    def _one_by_one(arrivals: Iterator[Arrival]) -> Iterator[IndexedSample]:
        for arrival in arrivals:
            yield from arrival

    # --- the store

    def _load(self, indices: Indices) -> Arrival:
        samples = kept_samples(self.store.load(self._store_index, self.ids, indices))
        return list(map(IndexedSample, indices.tolist(), samples))

    def _indexed(self, table: pa.Table) -> Arrival:
        indices = [self._index_of[example_id] for example_id in table["example_id"].to_pylist()]
        return list(map(IndexedSample, indices, kept_samples(table)))

    def _check_store_is_complete(self) -> None:
        """Read the store's index again, after the stream's end.

        Raises:
            RuntimeError: if an example is in neither; the sampler promises one sample, if only a failed one, of each.
        """
        self._store_index = self._read_store_index()
        absent = len(self._store_index.missing)
        if absent:
            raise RuntimeError(f"{absent} examples are neither in the store nor did the stream bring them")

    def _read_store_index(self) -> StoreIndex:
        """What the store holds, as rank 0 sees it; others could see parts that are newer."""
        own = None
        if self.dist.rank == 0:
            own = self.store.index(self.ids)
        index: StoreIndex = self.dist.all_gather_object(own)[0]
        return index


class _Collector:
    """Collects an epoch's samples until they fill a global batch.

    Args:
        done: (N,) bool, the examples that were processed before.
    """

    def __init__(self, epoch: int, study: Study, done: npt.NDArray[np.bool_]) -> None:
        self.epoch = epoch
        self.epochs = study.training.epochs
        self.size = examples_per_batch(study)
        self.examples = len(done)
        self.processed = int(done.sum())  # before the batch that is being collected
        self.indices: list[int] = []
        self.samples: list[Sample] = []

    @property
    def is_full(self) -> bool:
        # Kept samples only, so that a full batch has the same number of rows however many examples were not kept.
        return len(self.samples) == self.size

    def add(self, indexed: IndexedSample) -> None:
        self.indices.append(indexed.index)
        if indexed.sample is not None:
            self.samples.append(indexed.sample)

    def batch(self) -> Batch:
        """The batch of what was collected; the next one starts empty."""
        self.processed += len(self.indices)
        indices = np.asarray(self.indices, np.int64)
        batch = Batch(self.epoch, indices, tuple(self.samples), self._fraction())
        self.indices, self.samples = [], []
        return batch

    def empty_batch(self) -> Batch:
        """A batch of nothing. What was collected stays for the next one, or is read again after a stop."""
        return Batch(self.epoch, np.empty(0, np.int64), (), self._fraction())

    def _fraction(self) -> float:
        return (self.epoch + self.processed / self.examples) / self.epochs


class _GatheredStream:
    """The stream's samples as all ranks together receive them: every rank gets the parts of all.

    Args:
        reader: this rank's part.
    """

    def __init__(self, reader: StreamReader, dist: DistContext) -> None:
        self.reader = reader
        self.dist = dist
        self.part_ended = False

    def poll(self) -> pa.Table | None:
        """New samples, possibly none; None once every rank's part has ended. Called on every rank."""
        part = None
        # A rank whose part has ended still takes part in the collective, until all parts have ended.
        if not self.part_ended:
            part = self.reader.poll()
            self.part_ended = part is None
        tables = self.dist.all_gather_tables(part)
        if not tables:
            return None
        return pa.concat_tables(tables)

    def __iter__(self) -> Iterator[pa.Table]:
        table = self.poll()
        while table is not None:
            yield table
            table = self.poll()


def epoch_order(examples: int, seed: int, epoch: int) -> Indices:
    """The indices of all examples in the order of an epoch: a pure function of (seed, epoch).

    Epoch 0 keeps their order, since the training examples were drawn at random by the seed. Later epochs shuffle
    windows of `WINDOW` neighbours, and the indices inside each window. Neighbours are stored in the same few parts, so
    an epoch reads each part once, front to back, in bounded memory.
    """
    if epoch == 0:
        return np.arange(examples)
    generator = derive_generator(seed, "epoch", epoch)
    starts = np.arange(0, examples, WINDOW)
    generator.shuffle(starts)
    shuffled = []
    for start in starts:
        window: Indices = np.arange(start, min(start + WINDOW, examples))
        shuffled.append(generator.permutation(window))
    return np.concatenate(shuffled)
