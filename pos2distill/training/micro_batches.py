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
from pos2distill.losses.objectives import PADDING
from pos2distill.models.packing import ResponseBatch, collate, count_own_tokens
from pos2distill.training.batches import Batch
from pos2distill.training.distributed import DistContext
from pos2distill.training.rows import Row, RowBuilder, RowKey, row_keys_of_rank
from pos2distill.training.teachers import TeacherDistribution
from pos2distill.training.views import view_of

AddedTokens = Callable[[int, int], int]
"""(index of the first row of a micro-batch, index of a row in it) -> the tokens that this row adds to it."""

_FINISH_SECONDS = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that pass through the model together.

    Attributes:
        rows: B rows.
        batch: the same rows, packed.
        slot_id_B: (B,) int64, each row's `slot_id`.
        teacher: what is known of the base model at the responses; None until training has added it.
    """

    rows: Sequence[Row]
    batch: ResponseBatch
    slot_id_B: Tensor
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

    def prefetch(self, batches: Iterator[Batch]) -> "PrefetchIterator":
        """Prepare the batches. The next one is read and prepared while the caller uses the current one."""
        return PrefetchIterator(batches, self.prepare)

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Build this rank's rows of a batch, cut them into micro-batches and pack each."""
        keys: list[RowKey] = []
        for sample in batch.samples:
            keys += self.build.keys(sample)
        # The same on every rank, since all see the same samples; so no rank waits for the others in `_cut`.
        if not keys:
            return PreparedBatch(batch, [])
        rows = []
        for key, is_padding in row_keys_of_rank(keys, self.dist.rank, self.dist.world_size):
            row = self.build.row(key)
            rows.append(_as_padding(row) if is_padding else row)
        return PreparedBatch(batch, self._cut(rows, batch.epoch))

    def _cut(self, rows: list[Row], epoch: int) -> list[MicroBatch]:
        """Equally many micro-batches on every rank, since ZeRO-3 requires every rank in every pass."""
        added_tokens = added_token_counter(rows)
        # The rank that needs most decides; the others cut their rows into smaller micro-batches.
        count = max(self.dist.all_gather_object(count_micro_batches(added_tokens, len(rows), self.limit)))
        micro_batches = []
        start = 0
        for size in split_into_micro_batches(added_tokens, len(rows), count):
            micro_rows = rows[start : start + size]
            slot_id_B = torch.tensor([row.slot_id for row in micro_rows])
            micro_batches.append(MicroBatch(micro_rows, pack(micro_rows, self.study, epoch), slot_id_B))
            start += size
        return micro_batches


class PrefetchIterator:
    """An iterator over prepared batches; a thread prepares the next batch in advance."""

    def __init__(self, batches: Iterator[Batch], prepare: Callable[[Batch], PreparedBatch]) -> None:
        self.batches = batches
        self.prepare = prepare
        # One thread, so that all ranks take the batches, and call the collectives inside, in the same order. These use
        # `DistContext.sample_group`, so that they do not mix with those of training.
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare-batches")
        self.upcoming = self.pool.submit(self._prepare_next)

    def __iter__(self) -> "PrefetchIterator":
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
    """Pack rows. Neighboring rows of one example share the prefix that their prompts have in common."""
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


def added_token_counter(rows: Sequence[Row]) -> AddedTokens:
    """A function that counts the tokens that each row adds to a micro-batch, as `pack` packs it."""
    prompts = [row.prompt_ids for row in rows]
    lengths = [row.length for row in rows]
    groups = [row.group for row in rows]

    # Cached, since the search for a limit asks for the same rows again and again.
    @functools.cache
    def added_tokens(first: int, row: int) -> int:
        return count_own_tokens(prompts, lengths, groups, first, row)

    return added_tokens


def count_micro_batches(added_tokens: AddedTokens, row_count: int, limit: int) -> int:
    """How many micro-batches consecutive rows make if none exceeds `limit` tokens; a longer row makes one by itself.

    Args:
        added_tokens: the tokens that a row adds to its micro-batch.
        row_count: how many rows there are.
    """
    return len(_fill(added_tokens, row_count, limit, 1))


def split_into_micro_batches(added_tokens: AddedTokens, row_count: int, count: int) -> list[int]:
    """Divide rows into micro-batches such that the largest has few tokens: as few as possible if none are shared.

    Args:
        added_tokens: the tokens that a row adds to its micro-batch.
        row_count: how many rows there are.
        count: how many micro-batches; at most as many as rows. None is empty.
    Returns: the number of rows in each micro-batch.
    """
    # Binary search for the smallest limit that needs no more than `count`. A higher limit needs no more micro-batches,
    # except where rows share prefixes, in rare cases; then the limit that is found is not the smallest.
    low, high = 1, sum(added_tokens(row, row) for row in range(row_count))
    while low < high:
        middle = (low + high) // 2
        if count_micro_batches(added_tokens, row_count, middle) <= count:
            high = middle
        else:
            low = middle + 1
    return _fill(added_tokens, row_count, low, count)


def _fill(added_tokens: AddedTokens, row_count: int, limit: int, at_least: int) -> list[int]:
    """Fill micro-batches one after another up to `limit` tokens; start some earlier if fewer than `at_least` result.

    Returns: the number of rows in each micro-batch.
    """
    sizes = [0]
    first, filled = 0, 0
    for row in range(row_count):
        # With as few rows left as micro-batches, each row must start one, or one would be empty.
        is_full = filled + added_tokens(first, row) > limit or row_count - row <= at_least - len(sizes)
        if sizes[-1] > 0 and is_full:
            sizes.append(0)
            first, filled = row, 0
        sizes[-1] += 1
        filled += added_tokens(first, row)
    return sizes


def _as_padding(row: Row) -> Row:
    """A copy of a row with weight 0; with a short prompt, since its length does not matter."""
    return replace(row, slot_id=PADDING, prompt_ids=row.prompt_ids[-1:])
