"""Global batches prepared for one rank: its rows, cut into micro-batches and packed, while the last batch trains.

Shapes: B rows of a micro-batch.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pos2distill.config import Study
from pos2distill.config.method import Alignment
from pos2distill.losses.objectives import FILLER
from pos2distill.models.packing import ResponseBatch, collate, count_own_tokens
from pos2distill.training.batches import Batch
from pos2distill.training.distributed import DistContext
from pos2distill.training.rows import (
    Row,
    RowBuilder,
    RowKey,
    TokensInPart,
    count_parts,
    rows_of_rank,
    split_rows,
)
from pos2distill.training.teachers import TeacherDistribution
from pos2distill.training.views import view_of

_FINISH_SECONDS = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that pass through the model together.

    Attributes:
        rows: B rows.
        batch: the same rows, packed.
        slot_B: (B,) int64, each row's `slot_id`.
        teacher: what is known of the base model at the responses; None until training has added it.
    """

    rows: Sequence[Row]
    batch: ResponseBatch
    slot_B: Tensor
    teacher: TeacherDistribution | None = None


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A global batch, and this rank's micro-batches of it; none if no sample of the batch was kept."""

    batch: Batch
    micro_batches: list[MicroBatch]


class BatchPreparer:
    """Prepares global batches in a thread, one ahead of training.

    Args:
        study: alignment and loss.
        build: builds rows.
        dist: the group of ranks; every rank prepares the same batches.
        limit: tokens of a micro-batch, of which a shared prefix counts once; a longer row is a micro-batch by itself.
    """

    def __init__(self, study: Study, build: RowBuilder, dist: DistContext, limit: int) -> None:
        self.study = study
        self.build = build
        self.dist = dist
        self.limit = limit

    def prepare_ahead(self, batches: Iterator[Batch]) -> "BatchesAhead":
        """Each batch, prepared. The next one is read and prepared while the caller uses the last one."""
        return BatchesAhead(batches, self.prepare)

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Build this rank's rows of a batch, cut them into micro-batches and pack each."""
        keys: list[RowKey] = []
        for sample in batch.samples:
            keys += self.build.keys(sample)
        # The same on every rank, since all see the same samples; so no rank waits for the others in `_cut`.
        if not keys:
            return PreparedBatch(batch, [])
        rows = []
        for key, is_filler in rows_of_rank(keys, self.dist.rank, self.dist.world):
            row = self.build.row(key)
            rows.append(_as_filler(row) if is_filler else row)
        return PreparedBatch(batch, self._cut(rows, batch.epoch))

    def _cut(self, rows: list[Row], epoch: int) -> list[MicroBatch]:
        """Equally many micro-batches on every rank, since ZeRO-3 requires every rank in every pass."""
        added_tokens = tokens_in_part(rows)
        # The rank that needs most decides; the others cut their rows into smaller micro-batches.
        parts = max(self.dist.all_gather_object(count_parts(added_tokens, len(rows), self.limit)))
        micro_batches = []
        start = 0
        for size in split_rows(added_tokens, len(rows), parts):
            part = rows[start : start + size]
            slot_B = torch.tensor([row.slot_id for row in part])
            micro_batches.append(MicroBatch(part, pack(part, self.study, epoch), slot_B))
            start += size
        return micro_batches


class BatchesAhead:
    """An iterator over prepared batches; a thread prepares one ahead."""

    def __init__(self, batches: Iterator[Batch], prepare: Callable[[Batch], PreparedBatch]) -> None:
        self.batches = batches
        self.prepare = prepare
        # One thread, so that all ranks take the batches, and call the collectives inside, in the same order. These use
        # `DistContext.sample_group`, so that they do not mix with those of training.
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare-batches")
        self.upcoming = self.pool.submit(self._prepare_next)

    def __iter__(self) -> "BatchesAhead":
        return self

    def __next__(self) -> PreparedBatch:
        prepared = self.upcoming.result()
        if prepared is None:
            raise StopIteration
        self.upcoming = self.pool.submit(self._prepare_next)
        return prepared

    def finish(self) -> None:
        """Wait, but not for long, until the thread has prepared its batch. Called on every rank at the same batch."""
        # It may be waiting for a rank whose thread has failed, and a stop must not wait for that.
        try:
            error = self.upcoming.exception(timeout=_FINISH_SECONDS)
        except TimeoutError:
            return
        if error is not None:
            _logger.warning("the batch after the last step could not be prepared: %s", error)

    def close(self) -> None:
        """Give the thread nothing more to do. Does not wait: after an error its ranks may have exited."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _prepare_next(self) -> PreparedBatch | None:
        batch = next(self.batches, None)
        if batch is None:
            return None
        return self.prepare(batch)


def pack(rows: Sequence[Row], study: Study, epoch: int) -> ResponseBatch:
    """Pack rows. Neighbouring rows of one example share the prefix that their prompts have in common."""
    # A cross-entropy is always that of the response's own tokens; `official` is a variant of the KL only.
    alignment: Alignment = "shifted"
    if study.method.loss == "kl":
        alignment = study.method.alignment
    batch = collate(
        [row.prompt_ids for row in rows],
        [row.response_ids for row in rows],
        alignment=alignment,
        group_ids=[row.group for row in rows],
    )
    if study.method.view == "none":
        return batch
    view = view_of(rows, batch, study.method.view, seed=study.seed, epoch=epoch)
    if study.method.view == "pose":
        # Not a second view, but the only one.
        return replace(batch, position_S=view.position_S)
    return replace(batch, view=view)


def tokens_in_part(rows: Sequence[Row]) -> TokensInPart:
    """How many tokens each row adds to a micro-batch, as `pack` packs it."""
    prompts, lengths = [row.prompt_ids for row in rows], [row.length for row in rows]
    return functools.cache(functools.partial(count_own_tokens, prompts, lengths, [row.group for row in rows]))


def _as_filler(row: Row) -> Row:
    """A copy of a row that counts for nothing; with a short prompt, since its length does not matter."""
    return replace(row, slot_id=FILLER, prompt_ids=row.prompt_ids[-1:])
