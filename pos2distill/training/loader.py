"""Which samples make up which global batch: every sample once an epoch, from the store or as it is sampled.

All ranks see the same batches; `rows_of_rank` divides each between them. So everything that a batch depends on (what
the store holds, what the stream has brought) is gathered from all ranks before it is used.

Trained on are the first samples until enough of them are kept (`Selection`). Where they are still being made, one
that arrives waits until it is certain that it is among them.

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
from pos2distill.store.selection import Selection
from pos2distill.training.batches import Batch, BatchCollector, IndexedSample, Indices
from pos2distill.training.distributed import DistContext
from pos2distill.training.rows import Sample, kept_samples

WINDOW = 256
"""Samples that are read, and shuffled, together. An epoch's order does not depend on how the store is cut."""

_PROGRESS_FILE = "progress.json"

Arrival = list[IndexedSample]
"""Samples that have become available. Empty if the stream brought nothing new."""


class StreamReader(Protocol):
    """This rank's part of a live stream of samples."""

    def poll(self) -> pa.Table | None:
        """New samples; an empty table if none came within a short wait; None once the stream has ended."""


@dataclass
class TrainingProgress:
    """How far training is: the next step, the epoch, and which of its samples are done.

    Attributes:
        done: (N,) bool, the samples that the epoch has processed, whether trained on or not kept.
    """

    step: int
    epoch: int
    done: npt.NDArray[np.bool_]

    @classmethod
    def at_start(cls, samples: int) -> "TrainingProgress":
        """The progress of a run that has not begun, over `samples` samples."""
        return cls(0, 0, np.zeros(samples, bool))

    @classmethod
    def load(cls, folder: Path) -> "TrainingProgress":
        """Read what `save` wrote."""
        raw = json.loads((folder / _PROGRESS_FILE).read_text())
        bits = np.frombuffer(base64.b64decode(raw["done"]), np.uint8)
        # `packbits` fills the last byte with zeros; `count` removes them.
        return cls(raw["step"], raw["epoch"], np.unpackbits(bits, count=raw["samples"]).astype(bool))

    def save(self, folder: Path) -> None:
        """Write one small JSON file."""
        # One bit for each sample, so that the file stays small with millions of samples.
        bits = base64.b64encode(np.packbits(self.done).tobytes()).decode()
        raw = {"step": self.step, "epoch": self.epoch, "samples": len(self.done), "done": bits}
        (folder / _PROGRESS_FILE).write_text(json.dumps(raw) + "\n")

    def add(self, batch: "Batch") -> None:
        """Count a batch that has been trained on."""
        if batch.epoch > self.epoch:
            self.epoch, self.done = batch.epoch, np.zeros_like(self.done)
        self.done[batch.indices] = True
        if batch.samples:
            self.step += 1


class BatchLoader:
    """Cuts the samples of all epochs into global batches.

    Every rank makes one and iterates over it in step with the others: it calls collectives of `dist`.

    Args:
        study: seed, method and batch size.
        ids: the ids of all samples that may be trained on (`sample_id_array`), in order; an index is an index into it.
            On-policy methods have several of each example.
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
        self._index_of = {sample_id: index for index, sample_id in enumerate(ids.to_pylist())}
        self._read_store()

    def batches(self, progress: TrainingProgress) -> Iterator[Batch]:
        """The batches from `progress` to the end.

        Raises:
            UserError: at the end, if no sample of the whole run was kept.
        """
        # Counted from the start of the run: a resumed run that has nothing left to do is not an error.
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
        collected = BatchCollector(epoch, self.study, done, self._selection)
        for arrival in self._arrivals(epoch, done):
            # Passed on, since a request to stop must not wait until sampling has filled a batch.
            if not arrival:
                yield collected.empty_batch()
            for indexed in arrival:
                collected.add(indexed)
                if collected.is_full:
                    yield collected.batch()
        # Also if no sample of them was kept: the samples count as done, without a step.
        if collected.indices:
            yield collected.batch()

    # --- where an epoch's samples come from

    def _arrivals(self, epoch: int, done: npt.NDArray[np.bool_]) -> Iterator[Arrival]:
        """Each sample that is not done, exactly once, from the source that the module's table names."""
        if len(self._selection.missing) == 0:
            return self._from_store(self._remaining(epoch, done))
        # Opened before anything is read, so that sampling runs while stored samples are trained on.
        stream = _GatheredStream(self.open_stream(), self.dist)
        if epoch > 0:
            return self._from_store_after(stream, epoch, done)
        if self.study.training.order == "fixed":
            return self._in_fixed_order(stream, done)
        return self._in_order_of_arrival(stream, done)

    def _remaining(self, epoch: int, done: npt.NDArray[np.bool_]) -> Indices:
        """What an epoch has left, in its order, once all samples that are trained on are known."""
        # The order is that of all of them, so that a resumed epoch continues where it stopped.
        order = epoch_order(self._selection.end, self.study.seed, epoch)
        return order[~done[order]]

    def _from_store(self, indices: Indices) -> Iterator[Arrival]:
        # One window at a time, so that memory does not hold a whole epoch of samples.
        for start in range(0, len(indices), WINDOW):
            yield self._load(indices[start : start + WINDOW])

    def _from_store_after(
        self, stream: "_GatheredStream", epoch: int, done: npt.NDArray[np.bool_]
    ) -> Iterator[Arrival]:
        """A later epoch that lacks samples: a part of the store was corrupt, and the stream brings them again."""
        yield from self._wait_for_end(stream)
        yield from self._from_store(self._remaining(epoch, done))

    def _in_order_of_arrival(self, stream: "_GatheredStream", done: npt.NDArray[np.bool_]) -> Iterator[Arrival]:
        """What the store holds at the beginning, then the stream, then what the stream left out."""
        pending = ~done
        # Samples of which it is not certain yet that they are trained on. Those of the store are read when it is.
        waiting: dict[int, Sample | None] = {}
        yield from self._from_store(self._now_certain(self._store_index.stored & pending, pending))
        for table in stream:
            if len(table) == 0:
                yield []
            for indexed in self._resolved(table):
                # The stream may bring a sample twice, or one that the store already had.
                if pending[indexed.index]:
                    waiting[indexed.index] = indexed.sample
            stored = self._store_index.stored.copy()
            stored[list(waiting)] = False
            yield from self._from_store(self._now_certain(stored & pending, pending))
            end = self._selection.certain_end
            for index in [index for index in waiting if index < end]:
                pending[index] = False
                yield [IndexedSample(index, waiting.pop(index))]
        self._check_store_is_complete()
        # Ray Data's streaming_split(equal=True) drops rows at its end (Ray 2.60); the store holds those, too.
        yield from self._from_store(np.flatnonzero(pending[: self._selection.end]))

    def _now_certain(self, candidates: npt.NDArray[np.bool_], pending: npt.NDArray[np.bool_]) -> Indices:
        """Indices of the candidates that are certainly trained on. They are no longer pending."""
        indices = np.flatnonzero(candidates[: self._selection.certain_end])
        pending[indices] = False
        return indices

    def _in_fixed_order(self, stream: "_GatheredStream", done: npt.NDArray[np.bool_]) -> Iterator[Arrival]:
        """The epoch's order, in whichever order samples arrive."""
        is_stored = self._store_index.stored
        stored = self._one_by_one(self._from_store(np.flatnonzero(is_stored & ~done)))
        # Samples that arrived before their turn.
        early: dict[int, Sample | None] = {}
        for index in range(len(self.ids)):
            if done[index]:
                continue
            # All before it are known, so it is certain whether this one is trained on.
            if index >= self._selection.end:
                break
            if is_stored[index]:
                yield [next(stored)]
                continue
            while index not in early:
                table = stream.poll()
                if table is None:
                    # The stream has ended without this sample. The store now holds all that are left.
                    self._check_store_is_complete()
                    remaining = np.arange(index, self._selection.end)
                    yield from self._from_store(remaining[~done[remaining]])
                    return
                if len(table) == 0:
                    yield []
                for indexed in self._resolved(table):
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
        samples = kept_samples(self.store.load(self._store_index, indices))
        return list(map(IndexedSample, indices.tolist(), samples))

    def _resolved(self, table: pa.Table) -> Arrival:
        """The samples of a table, which are known from here on."""
        indices = [self._index_of[sample_id] for sample_id in table["sample_id"].to_pylist()]
        samples = kept_samples(table)
        self._selection.add(indices, [sample is not None for sample in samples])
        return list(map(IndexedSample, indices, samples))

    def _check_store_is_complete(self) -> None:
        """Read the store's index again, after the stream's end.

        Raises:
            RuntimeError: if a sample is in neither; the sampler promises every one, if only a failed one.
        """
        self._read_store()
        absent = len(self._selection.missing)
        if absent:
            raise RuntimeError(f"{absent} samples are neither in the store nor did the stream bring them")

    def _read_store(self) -> None:
        """What the store holds, as rank 0 sees it; others could see parts that are newer."""
        own = None
        if self.dist.rank == 0:
            index, kept_N = self.store.read_kept(self.ids)
            # Without the ids, which every rank has.
            own = (index.parts, index.part_of, kept_N)
        parts, part_of_N, kept_N = self.dist.all_gather_object(own)[0]
        self._store_index = StoreIndex(self.ids, parts, part_of_N)
        self._selection = Selection(self._store_index.stored, kept_N, self.study.wanted_samples)


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


def epoch_order(samples: int, seed: int, epoch: int) -> Indices:
    """The indices of all samples in the order of an epoch: a pure function of (seed, epoch).

    Epoch 0 keeps their order, since the training examples were drawn at random by the seed. Later epochs shuffle
    windows of `WINDOW` neighbours, and the indices inside each window. Neighbours are stored in the same few parts, so
    an epoch reads each part once, front to back, in bounded memory.
    """
    if epoch == 0:
        return np.arange(samples)
    generator = derive_generator(seed, "epoch", epoch)
    starts = np.arange(0, samples, WINDOW)
    generator.shuffle(starts)
    shuffled = []
    for start in starts:
        window: Indices = np.arange(start, min(start + WINDOW, samples))
        shuffled.append(generator.permutation(window))
    return np.concatenate(shuffled)
