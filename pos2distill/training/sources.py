"""Where an epoch's samples come from. Each source gives every sample that is left of an epoch exactly once.

    store complete                       `from_store`: from the store, in the epoch's order
    first epoch, training.order=arrival  `in_stream_order`: from the store, then from the stream as it brings them
    first epoch, training.order=fixed    `in_fixed_order`: in the epoch's order; a sample that arrives early waits
    a later epoch, store incomplete      `refill`: from the store, once the stream has replaced what was lost

A source yields lists of samples, and an empty list where none has come for a while. It depends only on what all ranks
have gathered together, so that every rank gets equally many lists.

The first kept samples in index order are trained on (`Selection`). While sampling runs, a sample that has arrived is
held back until it is certain to be one of them.

Shapes: N samples.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

import numpy as np
import pyarrow as pa

from pos2distill.config import Study
from pos2distill.randomness import derive_generator
from pos2distill.records import Bools
from pos2distill.training.batches import IndexedSample, Indices
from pos2distill.training.distributed import DistContext
from pos2distill.training.rows import Sample
from pos2distill.training.sample_tracker import SampleTracker

WINDOW = 256
"""Samples that are read, and shuffled, together. An epoch's order does not depend on how the store is cut."""


class StreamReader(Protocol):
    """This rank's part of a live stream of samples."""

    def poll(self) -> pa.Table | None:
        """New samples; an empty table if none came within a short wait; None once the stream has ended."""


def samples_left(
    tracker: SampleTracker, study: Study, epoch: int, done_N: Bools, open_stream: Callable[[], StreamReader]
) -> Iterator[list[IndexedSample]]:
    """The samples that an epoch has not processed yet, from the source that the module's table names."""
    if len(tracker.selection.missing) == 0:
        return from_store(tracker, _order_left(tracker, study.seed, epoch, done_N))
    # Opened before anything is read, so that sampling runs while stored samples are trained on.
    stream = gathered_tables(open_stream(), tracker.dist)
    if epoch > 0:
        return refill(tracker, stream, study.seed, epoch, done_N)
    if study.training.order == "fixed":
        return in_fixed_order(tracker, stream, done_N)
    return in_stream_order(tracker, stream, done_N)


def from_store(tracker: SampleTracker, indices: Indices) -> Iterator[list[IndexedSample]]:
    """Stored samples, in the order of `indices`."""
    # One window at a time, so that memory does not hold a whole epoch of samples.
    for start in range(0, len(indices), WINDOW):
        yield tracker.load(indices[start : start + WINDOW])


def refill(
    tracker: SampleTracker, stream: Iterator[pa.Table], seed: int, epoch: int, done_N: Bools
) -> Iterator[list[IndexedSample]]:
    """A later epoch that lacks samples: a part of the store was corrupt, and the stream brings them again."""
    yield from _wait_for_end(tracker, stream)
    yield from from_store(tracker, _order_left(tracker, seed, epoch, done_N))


def in_stream_order(tracker: SampleTracker, stream: Iterator[pa.Table], done_N: Bools) -> Iterator[list[IndexedSample]]:
    """What the store holds at the beginning, then the stream, then what the stream left out."""
    pending = _Pending(tracker, done_N)
    yield from from_store(tracker, pending.take_stored())
    for table in stream:
        if len(table) == 0:
            yield []
            continue
        pending.add(tracker.add(table))
        # What has arrived can make it certain that stored samples are trained on, too.
        yield from from_store(tracker, pending.take_stored())
        arrived = pending.take_arrived()
        # No empty list where none is certain to be trained on yet: samples have come, and more may be there.
        if arrived:
            yield arrived
    tracker.require_all()
    # Ray Data's streaming_split(equal=True) drops rows at its end (Ray 2.60); the store holds those, too.
    yield from from_store(tracker, pending.rest())


class _Pending:
    """The samples that an epoch has not passed on yet. One is passed on once it is certain that it is trained on."""

    def __init__(self, tracker: SampleTracker, done_N: Bools) -> None:
        self.tracker = tracker
        self.pending_N = ~done_N
        # By their indices. Stored samples are not held here, but read when they are passed on.
        self.arrived: dict[int, Sample | None] = {}

    def add(self, arrived: list[IndexedSample]) -> None:
        """Hold samples that the stream has brought."""
        for indexed in arrived:
            # The stream may bring a sample twice, or one that the store already had.
            if self.pending_N[indexed.index]:
                self.arrived[indexed.index] = indexed.sample

    def take_stored(self) -> Indices:
        """The samples of the store that are certain to be trained on."""
        stored_N = self.tracker.index.stored & self.pending_N
        stored_N[list(self.arrived)] = False
        indices = np.flatnonzero(stored_N[: self.tracker.selection.certain_end])
        self.pending_N[indices] = False
        return indices

    def take_arrived(self) -> list[IndexedSample]:
        """The samples of the stream that are certain to be trained on, in the order in which they came."""
        end = self.tracker.selection.certain_end
        indices = [index for index in self.arrived if index < end]
        self.pending_N[indices] = False
        return [IndexedSample(index, self.arrived.pop(index)) for index in indices]

    def rest(self) -> Indices:
        """All samples that are trained on, once all are known."""
        return np.flatnonzero(self.pending_N[: self.tracker.selection.end])


def in_fixed_order(tracker: SampleTracker, stream: Iterator[pa.Table], done_N: Bools) -> Iterator[list[IndexedSample]]:
    """The first epoch's order, in whichever order samples arrive."""
    is_stored_N = tracker.index.stored
    stored = chain.from_iterable(from_store(tracker, np.flatnonzero(is_stored_N & ~done_N)))
    # Samples that arrived before their turn.
    early: dict[int, Sample | None] = {}
    for index in np.flatnonzero(~done_N).tolist():
        # All before it are known, so it is certain whether this one is trained on.
        if index >= tracker.selection.end:
            break
        if is_stored_N[index]:
            yield [next(stored)]
            continue
        while index not in early:
            table = next(stream, None)
            if table is None:
                # The stream has ended without this sample. The store now holds all that are left.
                tracker.require_all()
                left = np.arange(index, tracker.selection.end)
                yield from from_store(tracker, left[~done_N[left]])
                return
            if len(table) == 0:
                yield []
                continue
            for indexed in tracker.add(table):
                early[indexed.index] = indexed.sample
        yield [IndexedSample(index, early.pop(index))]
    # Later epochs read from the store, so the stream must have stored everything, and the index is read again.
    yield from _wait_for_end(tracker, stream)


def gathered_tables(reader: StreamReader, dist: DistContext) -> Iterator[pa.Table]:
    """The stream's samples as all ranks together receive them, until every rank's part has ended. A collective.

    A table is empty if no rank has received a sample for a while.

    Args:
        reader: this rank's part. Every rank gets the parts of all.
    """
    part_ended = False
    while True:
        part = None
        # A rank whose part has ended still takes part in the collective, until all parts have ended.
        if not part_ended:
            part = reader.poll()
            part_ended = part is None
        tables = dist.all_gather_tables(part)
        if not tables:
            return
        yield pa.concat_tables(tables)


def epoch_order(samples: int, seed: int, epoch: int) -> Indices:
    """The indices of all samples in the order of an epoch: a pure function of (seed, epoch).

    Epoch 0 keeps their order, since the training examples were drawn at random by the seed. Later epochs shuffle
    windows of `WINDOW` neighbors, and the indices inside each window. Neighbors are stored in the same few parts, so
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


def _order_left(tracker: SampleTracker, seed: int, epoch: int, done_N: Bools) -> Indices:
    """What an epoch has left, in its order, once all samples that are trained on are known."""
    # The order is that of all of them, so that a resumed epoch continues where it stopped.
    order = epoch_order(tracker.selection.end, seed, epoch)
    return order[~done_N[order]]


def _wait_for_end(tracker: SampleTracker, stream: Iterator[pa.Table]) -> Iterator[list[IndexedSample]]:
    # The ranks agree on a checkpoint or a stop while they wait.
    for _ in stream:
        yield []
    tracker.require_all()
