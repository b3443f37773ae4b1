"""The training loop: global batches in, weights moved, one record a step.

Shapes: N rows of the global batch over all ranks, C rows of one rank's share, B rows of a micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pos2distill.config import Study, TrainersSection
from pos2distill.losses.objectives import r1_coefficients
from pos2distill.models.responses import ResponseBatch, collate
from pos2distill.training.rows import Row, RowSource, rank_share, slots_of
from pos2distill.training.schedule import learning_rate
from pos2distill.training.stepper import Stepper
from pos2distill.training.teachers import TeacherStates


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did. KLs in nats, means over the global batch's rows; weight_by_slot: sum of alpha at each slot."""

    step: int
    epoch: int
    rows: int
    loss: float
    kl_trivial: float | None
    kl_anchor: float | None
    gradient_norm: float
    learning_rate: float
    weight_by_slot: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a log line."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This worker's place among all, and the device that its process group talks through (NCCL: the GPU)."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"

    def gather(self, value_C: Tensor) -> Tensor:
        """Every rank's values, in rank order: (C,) -> (world * C,)."""
        if self.world == 1:
            return value_C
        own_C = value_C.to(self.device)
        gathered = [torch.empty_like(own_C) for _ in range(self.world)]
        torch.distributed.all_gather(gathered, own_C)
        return torch.cat(gathered).cpu()


@dataclass(frozen=True, slots=True)
class _Micro:
    batch: ResponseBatch
    teacher_TH: Tensor
    slot_B: Tensor


def train(
    study: Study,
    trainers: TrainersSection,
    source: RowSource,
    stepper: Stepper,
    teacher: TeacherStates,
    ranks: Ranks,
    listeners: Sequence[Callable[[StepRecord], None]] = (),
) -> None:
    """Run all epochs.

    The loss and its gradient do not depend on how a global batch is cut into ranks and micro-batches: coefficients
    are made from the KLs of the whole batch (a pass without gradients gives them first where there are several
    micro-batches), and what ranks and micro-batches add up to is the global loss.
    """
    step = 0
    for epoch in range(study.training.epochs):
        for rows in _prefetched(source, epoch, ranks):
            micros = [
                _to_micro(rows[start : start + trainers.micro_batch_rows], teacher, study)
                for start in range(0, len(rows), trainers.micro_batch_rows)
            ]
            kl_N, coefficient_N, slot_N = _accumulate(study, stepper, micros, ranks)
            rate = learning_rate(step, source.total_steps, study.training)
            norm = stepper.step(rate)
            record = _record(step, epoch, kl_N, coefficient_N, slot_N, study.advantageous_slot, norm, rate)
            for listen in listeners:
                listen(record)
            step += 1


def _accumulate(
    study: Study, stepper: Stepper, micros: Sequence[_Micro], ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of this rank's share. Returns the global batch's KLs, coefficients and slots, (N,) each."""
    slot_C = torch.cat([micro.slot_B for micro in micros])
    if study.method.weights_scope == "micro":
        kl_C, coefficient_C = _accumulate_by_micro(study, stepper, micros, ranks)
    else:
        first = [stepper.forward(micros[0].batch, micros[0].teacher_TH)] if len(micros) == 1 else None
        kl_C = torch.cat(first or _measure(stepper, micros)).detach().cpu()
        coefficient_C = _global_coefficients(study, kl_C, slot_C, ranks)
        parts = coefficient_C.split([len(micro.slot_B) for micro in micros])
        for index, (micro, coefficient_B) in enumerate(zip(micros, parts, strict=True)):
            kl_B = first[0] if first else stepper.forward(micro.batch, micro.teacher_TH)
            stepper.backward((coefficient_B.to(kl_B.device) * kl_B).sum(), last=index == len(micros) - 1)
    return ranks.gather(kl_C), ranks.gather(coefficient_C), ranks.gather(slot_C)


def _accumulate_by_micro(
    study: Study, stepper: Stepper, micros: Sequence[_Micro], ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """`weights_scope: micro`: each micro-batch is its own batch, and the loss is the mean over micro-batches."""
    kls, coefficients = [], []
    for index, micro in enumerate(micros):
        kl_B = stepper.forward(micro.batch, micro.teacher_TH)
        coefficient_B = _coefficients(study, kl_B.detach().cpu(), micro.slot_B) / (len(micros) * ranks.world)
        stepper.backward((coefficient_B.to(kl_B.device) * kl_B).sum(), last=index == len(micros) - 1)
        kls.append(kl_B.detach().cpu())
        coefficients.append(coefficient_B)
    return torch.cat(kls), torch.cat(coefficients)


@torch.no_grad()
def _measure(stepper: Stepper, micros: Sequence[_Micro]) -> list[Tensor]:
    return [stepper.forward(micro.batch, micro.teacher_TH) for micro in micros]


def _global_coefficients(study: Study, kl_C: Tensor, slot_C: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of the coefficients of the whole global batch."""
    coefficient_N = _coefficients(study, ranks.gather(kl_C), ranks.gather(slot_C))
    return coefficient_N[ranks.rank * len(kl_C) : (ranks.rank + 1) * len(kl_C)]


def _coefficients(study: Study, kl_N: Tensor, slot_N: Tensor) -> Tensor:
    """R1 coefficients of the rows that count; 0 for filler."""
    real_N = slot_N >= 0
    coefficient_M = r1_coefficients(
        kl_N[real_N],
        slot_N[real_N],
        anchor=study.advantageous_slot,
        anchor_weight=study.method.anchor_weight,
        variant=study.method.weights,
    )
    return torch.zeros_like(kl_N).masked_scatter(real_N, coefficient_M)


def _to_micro(rows: Sequence[Row], teacher: TeacherStates, study: Study) -> _Micro:
    batch = collate(
        [row.prompt_ids for row in rows], [row.response_ids for row in rows], alignment=study.method.alignment
    )
    return _Micro(batch, teacher(rows), slots_of(rows))


def _prefetched(source: RowSource, epoch: int, ranks: Ranks) -> Iterator[list[Row]]:
    """This rank's rows of each global batch; the next batch is built while the last one trains."""

    def build(keys: list[tuple[int, int]]) -> list[Row]:
        share = rank_share(keys, ranks.rank, ranks.world)
        return [replace(source.row(key), filler=filler) for key, filler in share]

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows") as pool:
        batches = source.global_batches(epoch)
        coming = pool.submit(build, next(batches))
        for keys in batches:
            ready, coming = coming, pool.submit(build, keys)
            yield ready.result()
        yield coming.result()


def _record(
    step: int, epoch: int, kl_N: Tensor, coefficient_N: Tensor, slot_N: Tensor, anchor: int, norm: float, rate: float
) -> StepRecord:
    anchor_N = slot_N == anchor
    trivial_N = (slot_N >= 0) & ~anchor_N
    weights: dict[int, float] = {}
    for slot, weight in zip(slot_N[trivial_N].tolist(), coefficient_N[trivial_N].tolist(), strict=True):
        weights[slot] = weights.get(slot, 0.0) + weight
    return StepRecord(
        step=step,
        epoch=epoch,
        rows=int((slot_N >= 0).sum()),
        loss=float((coefficient_N * kl_N).sum()),
        kl_trivial=float(kl_N[trivial_N].mean()) if trivial_N.any() else None,
        kl_anchor=float(kl_N[anchor_N].mean()) if anchor_N.any() else None,
        gradient_norm=norm,
        learning_rate=rate,
        weight_by_slot=dict(sorted(weights.items())),
    )
