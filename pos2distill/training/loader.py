"""Which samples make up which global batch: every example once an epoch, from the store or as it is sampled.

All ranks hold the same samples of a batch, so that how it is cut between them is nobody's business here. What a
decision rests on (which parts the store holds, what has come, whether to stop) is exchanged first; so all ranks decide
alike.
"""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
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
IndexedSample = tuple[int, Sample | None]
"""An example's index among the training examples, and its sample if it is trained on."""


class Action(IntEnum):
    """What is to happen once a batch has been trained on; of different wishes the greatest counts."""

    CONTINUE = 0
    CHECKPOINT = 1
    STOP = 2


class StreamReader(Protocol):
    """This rank's part of a live stream."""

    def poll(self) -> pa.Table | None:
        """Samples that have come, after a moment's wait perhaps none; None once the stream has ended."""


@dataclass
class TrainingProgress:
    """Where training stands. `done`: (N,) bool, the examples that the epoch has dealt with, trained on or not kept."""

    step: int
    epoch: int
    done: npt.NDArray[np.bool_]

    @classmethod
    def at_start(cls, examples: int) -> "TrainingProgress":
        """Of a run over so many examples."""
        return cls(0, 0, np.zeros(examples, bool))

    @classmethod
    def load(cls, folder: Path) -> "TrainingProgress":
        """As `save` left it."""
        raw = json.loads((folder / _PROGRESS_FILE).read_text())
        bits = np.frombuffer(base64.b64decode(raw["done"]), np.uint8)
        return cls(raw["step"], raw["epoch"], np.unpackbits(bits, count=raw["examples"]).astype(bool))

    def save(self, folder: Path) -> None:
        """Write one small JSON file."""
        bits = base64.b64encode(np.packbits(self.done).tobytes()).decode()
        raw = {"step": self.step, "epoch": self.epoch, "examples": len(self.done), "done": bits}
        (folder / _PROGRESS_FILE).write_text(json.dumps(raw) + "\n")

    def add(self, batch: "Batch") -> None:
        """Count a batch that has been trained on."""
        if batch.epoch > self.epoch:
            self.epoch, self.done = batch.epoch, np.zeros_like(self.done)
        self.done[batch.indices] = True
        self.step += bool(batch.samples)


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch.

    indices: the examples that it deals with. samples: those of them that were kept; perhaps none.
    share: of the whole run that is done after it, in (0, 1]. action: what is to happen then.
    """

    epoch: int
    indices: Indices
    samples: tuple[Sample, ...]
    share: float
    action: Action


class BatchLoader:
    """Cuts the samples of all epochs into global batches.

    Args:
        study: seed, method and batch size.
        ids: of all training examples, in their order; an index is an index of it.
        store: where samples are, and where the stream's go before they come here.
        open_stream: this rank's part of the samples that the store lacks; called once, if it lacks any.
        dist: all of them call alike.
        action: what this rank wants after the step of that number.
    """

    def __init__(
        self,
        study: Study,
        ids: pa.Array,
        store: SampleStore,
        open_stream: Callable[[], StreamReader],
        dist: DistContext,
        action: Callable[[int], Action] = lambda _: Action.CONTINUE,
    ) -> None:
        self.study = study
        self.ids = ids
        self.place_of = {example_id: index for index, example_id in enumerate(ids.to_pylist())}
        self.store = store
        self.open_stream = open_stream
        self.dist = dist
        self.action = action
        self.index = self._look_into_store()

    def batches(self, progress: TrainingProgress) -> Iterator[Batch]:
        """From where training stands to the end, or to a batch whose action is to stop."""
        step = progress.step
        for epoch in range(progress.epoch, self.study.training.epochs):
            done = progress.done.copy() if epoch == progress.epoch else np.zeros(len(self.ids), bool)
            for batch in self._cut(epoch, done, step):
                step += bool(batch.samples)
                yield batch
                if batch.action is Action.STOP:
                    return
        if not step:
            raise UserError("no sample was kept, so there is nothing to train on")

    def _cut(self, epoch: int, done: npt.NDArray[np.bool_], step: int) -> Iterator[Batch]:
        size, count, epochs = examples_per_batch(self.study), int(done.sum()), self.study.training.epochs
        indices: list[int] = []
        samples: list[Sample] = []

        def batch(action: Action) -> Batch:
            share = (epoch + (count + len(indices)) / len(done)) / epochs
            return Batch(epoch, np.asarray(indices, np.int64), tuple(samples), share, action)

        for arrived in self._sequence(epoch, done):
            if arrived is None:  # nothing new: a moment to ask what is wished
                if action := self.all_reduce_max(step):
                    # Half a batch is no batch: it stays here, or comes again.
                    yield Batch(epoch, np.empty(0, np.int64), (), (epoch + count / len(done)) / epochs, action)
                    if action is Action.STOP:
                        return
                continue
            index, sample = arrived
            indices.append(index)
            samples += [sample] if sample else []
            if len(samples) == size:
                yield batch(self.all_reduce_max(step + 1))
                count, step = count + len(indices), step + 1
                indices, samples = [], []
        if indices:
            yield batch(self.all_reduce_max(step + bool(samples)))

    def all_reduce_max(self, step: int) -> Action:
        return Action(max(self.dist.all_gather_object(self.action(step))))

    def _sequence(self, epoch: int, done: npt.NDArray[np.bool_]) -> Iterator[IndexedSample | None]:
        """Each example that is not done, once; None while there is nothing to give."""
        order = epoch_order(len(self.ids), self.study.seed, epoch)
        order = order[~done[order]]
        if not len(self.index.missing):
            yield from self._stored(order)
        elif epoch > 0:  # a part was damaged; what replaces it is in the store once the stream has ended
            for _ in self._rounds():
                yield None
            yield from self._stored(order)
        elif self.study.training.order == "fixed":
            yield from self._in_order(order)
        else:
            yield from self._as_they_come(order)

    def _as_they_come(self, order: Indices) -> Iterator[IndexedSample | None]:
        """What the store holds from the beginning, then the stream, then what the stream left out."""
        taken = np.ones(len(self.ids), bool)
        taken[order] = False
        rounds = self._rounds()  # samplers start while the stored ones are trained on
        stored = order[self.index.stored[order]]
        taken[stored] = True
        yield from self._stored(stored)
        for samples in rounds:
            if not len(samples):
                yield None
            for index, sample in self._placed(samples):
                if not taken[index]:
                    taken[index] = True
                    yield index, sample
        yield from self._stored(order[~taken[order]])  # Ray's split drops rows to make ranks equally long

    def _in_order(self, order: Indices) -> Iterator[IndexedSample | None]:
        """The epoch's order, whatever comes first. What comes too early waits here."""
        rounds, stored = self._rounds(), self.index.stored
        early: dict[int, Sample | None] = {}
        from_store = self._stored(order[stored[order]])
        for index in order.tolist():
            while not stored[index] and index not in early:
                samples = next(rounds, None)
                if samples is None:  # the stream has ended without it, so the store holds it
                    early.update(self._load(order[(order == index)]))
                elif len(samples):
                    early.update(self._placed(samples))
                else:
                    yield None
            yield next(from_store) if stored[index] else (index, early.pop(index))
        for _ in rounds:
            yield None

    def _stored(self, indices: Indices) -> Iterator[IndexedSample]:
        for start in range(0, len(indices), WINDOW):
            yield from self._load(indices[start : start + WINDOW])

    def _load(self, indices: Indices) -> Iterator[IndexedSample]:
        return zip(indices.tolist(), kept_samples(self.store.load(self.index, self.ids, indices)), strict=True)

    def _placed(self, samples: pa.Table) -> Iterator[IndexedSample]:
        indices = [self.place_of[example_id] for example_id in samples["example_id"].to_pylist()]
        return zip(indices, kept_samples(samples), strict=True)

    def _rounds(self) -> Iterator[pa.Table]:
        """The stream's samples as all ranks together get them, opened at once; afterwards the store holds all."""
        return self._gather(self.open_stream())

    def _gather(self, reader: StreamReader) -> Iterator[pa.Table]:
        part = reader.poll()
        while gathered := self.dist.all_gather_tables(part):
            yield pa.concat_tables(gathered)
            part = None if part is None else reader.poll()
        self.index = self._look_into_store()
        if absent := len(self.index.missing):
            raise RuntimeError(f"{absent} examples are neither in the store nor did the stream bring them")

    def _look_into_store(self) -> StoreIndex:
        """What the store holds, as rank 0 sees it."""
        own = self.store.index(self.ids) if self.dist.rank == 0 else None
        index: StoreIndex = self.dist.all_gather_object(own)[0]
        return index


def epoch_order(examples: int, seed: int, epoch: int) -> Indices:
    """The indices of all examples in the order of an epoch: a pure function of (seed, epoch).

    Epoch 0 takes them as they stand, since they were drawn at random by the seed. Later epochs shuffle windows of
    `WINDOW` neighbours, and the indices inside each: neighbours lie in the same few parts of the store, so that an
    epoch reads each part once, front to back, in bounded memory.
    """
    if epoch == 0:
        return np.arange(examples)
    generator = derive_generator(seed, "epoch", epoch)
    windows = np.arange(-(-examples // WINDOW))
    generator.shuffle(windows)
    shuffled = [generator.permutation(np.arange(at * WINDOW, min((at + 1) * WINDOW, examples))) for at in windows]
    return np.concatenate(shuffled)
