"""Which samples make up which global batch: every sample once an epoch, from the store or as it is sampled.

All ranks see the same batches; `row_keys_of_rank` divides each between them.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from pos2distill.config import Study
from pos2distill.errors import UserError
from pos2distill.records import Bools
from pos2distill.store.samples import SampleStore
from pos2distill.training.batches import Batch, BatchCollector
from pos2distill.training.distributed import DistContext
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.sample_tracker import SampleTracker
from pos2distill.training.sources import StreamReader, samples_left


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
        self.open_stream = open_stream
        self.tracker = SampleTracker(ids, store, study.wanted_samples, dist)

    def batches(self, progress: TrainingProgress) -> Iterator[Batch]:
        """The batches from `progress` to the end, and an empty one whenever no sample has come for a while.

        Raises:
            UserError: at the end, if no sample of the whole run was kept.
        """
        # Counted from the start of the run: a resumed run that has nothing left to do is not an error.
        any_kept = progress.step > 0
        for epoch in range(progress.epoch, self.study.training.epochs):
            done_N = np.zeros(len(self.tracker.ids), bool)
            if epoch == progress.epoch:
                # A copy, since the caller updates `progress` while it iterates over the batches.
                done_N = progress.done.copy()
            for batch in self._batches_of_epoch(epoch, done_N):
                any_kept = any_kept or len(batch.samples) > 0
                yield batch
        if not any_kept:
            raise UserError("no sample was kept, so there is nothing to train on")

    def _batches_of_epoch(self, epoch: int, done_N: Bools) -> Iterator[Batch]:
        """Collect samples until they fill a batch; the last batch takes what is left."""
        collected = BatchCollector(epoch, self.study, done_N, self.tracker.selection)
        for samples in samples_left(self.tracker, self.study, epoch, done_N, self.open_stream):
            # No sample has come for a while. The empty batch lets the training loop handle a request to stop.
            if not samples:
                yield collected.empty_batch()
                continue
            for indexed in samples:
                collected.add(indexed)
                if collected.is_full:
                    yield collected.batch()
        # Also if no sample of them was kept: the samples count as done, without a step.
        if collected.indices:
            yield collected.batch()
