"""Global batches, and how an epoch's samples are collected into them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pos2distill.config import Study
from pos2distill.records import Bools
from pos2distill.store.selection import Selection
from pos2distill.training.rows import Sample

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IndexedSample:
    """A sample's index among all samples, and the sample; None if it was not kept."""

    index: int
    sample: Sample | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch. An empty one says that no sample came in a while: time to handle requests.

    Attributes:
        epoch: its epoch, from 0.
        indices: indices of the samples that it processes.
        samples: those of them that were kept; possibly none.
        fraction: how much of the whole run is completed after this batch, in (0, 1].
    """

    epoch: int
    indices: Indices
    samples: tuple[Sample, ...]
    fraction: float


class BatchCollector:
    """Collects an epoch's samples until they fill a global batch.

    Args:
        done: (N,) bool, the samples that were processed before.
        selection: knows which of them were kept.
    """

    def __init__(self, epoch: int, study: Study, done: Bools, selection: Selection) -> None:
        self.epoch = epoch
        self.epochs = study.training.epochs
        self.size = study.samples_per_batch
        self.all_samples = len(done)
        self.wanted = study.wanted_samples
        # Before the batch that is being collected.
        self.processed = int(done.sum())
        self.kept = int((done & selection.kept_N).sum())
        self.indices: list[int] = []
        self.samples: list[Sample] = []

    @property
    def is_full(self) -> bool:
        """Whether what was collected makes a batch."""
        # Kept samples only, so that a full batch has the same number of rows however many samples were not kept.
        return len(self.samples) == self.size

    def add(self, indexed: IndexedSample) -> None:
        """Count a sample, and collect it if it was kept."""
        self.indices.append(indexed.index)
        if indexed.sample is not None:
            self.samples.append(indexed.sample)

    def batch(self) -> Batch:
        """The batch of what was collected; the next one starts empty."""
        self.processed += len(self.indices)
        self.kept += len(self.samples)
        indices = np.asarray(self.indices, np.int64)
        batch = Batch(self.epoch, indices, tuple(self.samples), self._fraction())
        self.indices, self.samples = [], []
        return batch

    def empty_batch(self) -> Batch:
        """A batch of nothing. What was collected stays for the next one, or is read again after a stop."""
        return Batch(self.epoch, np.empty(0, np.int64), (), self._fraction())

    def _fraction(self) -> float:
        # An epoch ends when enough samples were kept, or when all samples have been made.
        of_epoch = max(self.kept / self.wanted, self.processed / self.all_samples)
        return (self.epoch + of_epoch) / self.epochs
