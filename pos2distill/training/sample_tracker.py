"""What is known of all samples, the same on every rank: which the store holds, and which are trained on.

Everything that a batch depends on is known from here. So it is gathered from all ranks before it is used.

Shapes: N samples.
"""

import pyarrow as pa

from pos2distill.store.samples import SampleStore, StoreIndex
from pos2distill.store.selection import Selection
from pos2distill.training.batches import IndexedSample, Indices
from pos2distill.training.distributed import DistContext
from pos2distill.training.rows import decode_samples


class SampleTracker:
    """Which of N samples the store holds, and which of them are trained on as far as that is known.

    Every rank makes one, and calls `read_store` and `require_all` in step with the others: they are collectives.

    Args:
        ids: the ids of the samples; an index is an index into it.
        wanted: kept samples to train on.

    Attributes:
        index: what the store held when it was last read.
        selection: the samples that are trained on, from what the store held and what the stream has brought since.
    """

    index: StoreIndex
    selection: Selection

    def __init__(self, ids: pa.Array, store: SampleStore, wanted: int, dist: DistContext) -> None:
        self.ids = ids
        self.store = store
        self.wanted = wanted
        self.dist = dist
        self._index_of = {sample_id: index for index, sample_id in enumerate(ids.to_pylist())}
        self.read_store()

    def read_store(self) -> None:
        """Read on rank 0 what the store holds, and share it with all ranks: others could see parts that are newer."""
        own = None
        if self.dist.rank == 0:
            index, kept_N = self.store.read_index_and_kept(self.ids)
            # Without the ids, which every rank has.
            own = (index.parts, index.part_of, kept_N)
        parts, part_of_N, kept_N = self.dist.all_gather_object(own)[0]
        self.index = StoreIndex(self.ids, parts, part_of_N)
        self.selection = Selection(self.index.stored, kept_N, self.wanted)

    def require_all(self) -> None:
        """Read the store again, after the stream's end. It then holds every sample that is trained on.

        Raises:
            RuntimeError: if it lacks some; the sampler promises every one, if only a failed one.
        """
        self.read_store()
        absent = len(self.selection.missing)
        if absent:
            raise RuntimeError(f"{absent} samples are neither in the store nor did the stream bring them")

    def load(self, indices: Indices) -> list[IndexedSample]:
        """Samples of the store, in the order of `indices`."""
        samples = decode_samples(self.store.load(self.index, indices))
        return list(map(IndexedSample, indices.tolist(), samples))

    def add(self, table: pa.Table) -> list[IndexedSample]:
        """Samples of the stream, which the selection counts from here on."""
        indices = [self._index_of[sample_id] for sample_id in table["sample_id"].to_pylist()]
        samples = decode_samples(table)
        self.selection.add(indices, [sample is not None for sample in samples])
        return list(map(IndexedSample, indices, samples))
