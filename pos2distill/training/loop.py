"""The training loop: global batches in, weights moved, one record a step.

Shapes: N rows of the global batch over all ranks, C rows of one rank's share, B rows of a micro-batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pos2distill.config import Study, TrainersSection
from pos2distill.errors import UserError
from pos2distill.losses.kl import mean_by_row
from pos2distill.losses.objectives import ANCHOR, FILLER, row_coefficients
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import Action, Batch, BatchLoader, TrainingProgress
from pos2distill.training.rows import Row, RowBuilder, count_parts, rows_of_rank, split_rows
from pos2distill.training.schedule import learning_rate
from pos2distill.training.strategies.protocol import Strategy
from pos2distill.training.teachers import HiddenStatesView, TeacherSource, TeacherView

_CHUNK = 64
"""Tokens whose logits of the frozen model are there at once, where only its loss on them is wanted."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did.

    loss: the objective. loss_trivial, loss_anchor: means over the global batch's rows, nats, without weights.
    examples: trained on, by id: the steps are the ledger of what was trained when. share: of the run that is done.
    weight_by_slot: sum of the weights at each slot, of several hops at each `Row.slot_id`.
    """

    step: int
    epoch: int
    examples: tuple[str, ...]
    share: float
    rows: int
    loss: float
    loss_trivial: float | None
    loss_anchor: float | None
    grad_norm: float
    learning_rate: float
    weight_by_slot: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a log line."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Micro:
    batch: ResponseBatch
    teacher: TeacherView | None
    slot_B: Tensor


def train(
    study: Study,
    trainers: TrainersSection,
    loader: BatchLoader,
    build: RowBuilder,
    strategy: Strategy,
    teacher: TeacherSource | None,
    dist: DistContext,
    progress: TrainingProgress,
    listeners: Sequence[Callable[[StepRecord], None]] = (),
    save: Callable[[TrainingProgress], None] = lambda _: None,
) -> bool:
    """Train from where `progress` stands to the end, or until the feed's action is to stop.

    The loss and its gradient do not depend on how a global batch is cut into ranks and micro-batches: coefficients
    are made from the row losses of the whole batch (where weights depend on them and there are several micro-batches, a
    pass without gradients gives them first), and what ranks and micro-batches add up to is the global loss.

    Args:
        teacher: where the method looks at the frozen model.
        progress: kept up to date, batch by batch.
        save: called on every rank after batches whose action is a checkpoint, or to stop.
    Returns: whether all epochs are done.
    """
    for batch, cut in _prefetched(loader.batches(progress), build, dist, study, trainers.micro_batch_tokens):
        if cut:
            micros = [_to_micro(rows, laid, teacher) for rows, laid in cut]
            loss_N, coefficient_N, slot_N = _accumulate(study, strategy, micros, dist)
            rate = learning_rate(batch.share, study.training)
            norm = strategy.step(rate)
            if not math.isfinite(norm):
                raise UserError("training diverged (its gradient is not finite); lower training.learning_rate")
            record = _record(progress.step, batch, loss_N, coefficient_N, slot_N, norm, rate)
            for listen in listeners:
                listen(record)
        progress.add(batch)
        if batch.action is not Action.CONTINUE:
            save(progress)
        if batch.action is Action.STOP:
            return False
    return True


def _accumulate(
    study: Study, strategy: Strategy, micros: Sequence[_Micro], dist: DistContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of this rank's share. Returns the global batch's losses, coefficients and slots, (N,)."""
    slot_C = torch.cat([micro.slot_B for micro in micros])
    only = strategy.forward(micros[0].batch, micros[0].teacher) if len(micros) == 1 else None
    if study.method.weights == "uniform":
        known_C = torch.zeros(len(slot_C))
    else:
        known_C = _measure(strategy, micros) if only is None else only.detach().cpu()
    reference_C = torch.cat([_reference(study, micro) for micro in micros])
    slot_N = dist.gather(slot_C)
    known_N = _finite(dist.gather(known_C))
    coefficient_N = row_coefficients(study.method, known_N, dist.gather(reference_C), slot_N)
    own_C = coefficient_N[dist.rank * len(slot_C) : (dist.rank + 1) * len(slot_C)]
    losses = []
    for index, (micro, coefficient_B) in enumerate(
        zip(micros, own_C.split([len(micro.slot_B) for micro in micros]), strict=True)
    ):
        loss_B = strategy.forward(micro.batch, micro.teacher) if only is None else only
        strategy.backward((coefficient_B.to(loss_B.device) * loss_B).sum(), last=index == len(micros) - 1)
        losses.append(loss_B.detach())
    # Fetched once, so that a GPU has the next micro-batch while it works on this one.
    return _finite(dist.gather(torch.cat(losses).cpu())), coefficient_N, slot_N


def _finite(loss_N: Tensor) -> Tensor:
    """The losses as they are, unless training has diverged: then nothing of it is worth saving."""
    if not torch.isfinite(loss_N).all():
        raise UserError("training diverged (a row's loss is not finite); lower training.learning_rate")
    return loss_N


@torch.no_grad()
def _measure(strategy: Strategy, micros: Sequence[_Micro]) -> Tensor:
    return torch.cat([strategy.forward(micro.batch, micro.teacher) for micro in micros]).cpu()


@torch.no_grad()
def _reference(study: Study, micro: _Micro) -> Tensor:
    """The frozen model's own loss on each row's response, at the advantageous slots, where the weights ask for it."""
    if study.method.weights != "adaptive":
        return torch.zeros(len(micro.slot_B))
    assert isinstance(micro.teacher, HiddenStatesView)  # the settings allow no other
    parts = zip(micro.teacher.split(_CHUNK), micro.batch.target_T.split(_CHUNK), strict=True)
    loss_T = torch.cat([view.cross_entropy(target_T).cpu() for view, target_T in parts])
    return mean_by_row(loss_T, micro.batch.row_T, len(micro.slot_B))


def _to_micro(rows: Sequence[Row], batch: ResponseBatch, teacher: TeacherSource | None) -> _Micro:
    return _Micro(batch, teacher(rows) if teacher else None, torch.tensor([row.slot_id for row in rows]))


def _lay(rows: Sequence[Row], study: Study) -> ResponseBatch:
    """Rows of one sample stand together, and what their prompts begin with alike stands there once."""
    return collate(
        [row.prompt_ids for row in rows],
        [row.response_ids for row in rows],
        alignment=study.method.alignment if study.method.loss == "kl" else "shifted",
        group_ids=[id(row.sample) for row in rows],
    )


def _prefetched(
    batches: Iterator[Batch], build: RowBuilder, dist: DistContext, study: Study, limit: int
) -> Iterator[tuple[Batch, list[tuple[list[Row], ResponseBatch]]]]:
    """Each global batch with this rank's rows of it, cut into micro-batches of at most `limit` tokens and laid out.

    The next one is made while the last one trains.
    """

    def make() -> tuple[Batch, list[tuple[list[Row], ResponseBatch]]] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        keys = [key for sample in batch.samples for key in build.keys(sample)]
        share = rows_of_rank(keys, dist.rank, dist.world) if keys else []
        rows = [_as_filler(row) if filler else row for key, filler in share for row in [build.row(key)]]
        return batch, [(part, _lay(part, study)) for part in _cut(rows, limit, dist)] if rows else []

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")
    try:
        coming = pool.submit(make)
        while ready := coming.result():
            coming = pool.submit(make)
            yield ready
    finally:
        # After an error nobody waits for it: it may itself be waiting for ranks that have gone.
        pool.shutdown(wait=False, cancel_futures=True)


def _as_filler(row: Row) -> Row:
    """It counts for nothing, so it may as well be short."""
    return replace(row, slot_id=FILLER, prompt_ids=row.prompt_ids[-1:])


def _cut(rows: list[Row], limit: int, dist: DistContext) -> list[list[Row]]:
    """Micro-batches; as many on every rank, since ZeRO-3 needs every rank in every pass."""
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    parts = max(dist.all_gather_object(count_parts(lengths, limit)))
    coming = iter(rows)
    return [list(islice(coming, size)) for size in split_rows(lengths, parts)]


def _record(
    step: int, batch: Batch, loss_N: Tensor, coefficient_N: Tensor, slot_N: Tensor, norm: float, rate: float
) -> StepRecord:
    anchor_N, trivial_N = slot_N == ANCHOR, slot_N >= 0
    weights: dict[int, float] = {}
    for slot, weight in zip(slot_N[trivial_N].tolist(), coefficient_N[trivial_N].tolist(), strict=True):
        weights[slot] = weights.get(slot, 0.0) + weight
    return StepRecord(
        step=step,
        epoch=batch.epoch,
        examples=tuple(sample.example.example_id for sample in batch.samples),
        share=batch.share,
        rows=int((slot_N != FILLER).sum()),
        loss=float((coefficient_N * loss_N).sum()),
        loss_trivial=float(loss_N[trivial_N].mean()) if trivial_N.any() else None,
        loss_anchor=float(loss_N[anchor_N].mean()) if anchor_N.any() else None,
        grad_norm=norm,
        learning_rate=rate,
        weight_by_slot=dict(sorted(weights.items())),
    )
