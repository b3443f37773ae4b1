"""The training loop: for each global batch one update of the weights and one record.

Shapes: N rows of the global batch over all ranks, C rows of one rank, B rows of a micro-batch, T response tokens of a
micro-batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from pos2distill.config import Study, TrainersSection
from pos2distill.errors import UserError
from pos2distill.losses.kl import mean_by_row
from pos2distill.losses.objectives import ANCHOR, PADDING, row_coefficients
from pos2distill.training.batches import Batch
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import BatchLoader
from pos2distill.training.memory import translate_step_oom_error
from pos2distill.training.micro_batches import BatchPreparer, MicroBatch, PreparedBatch
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.rows import RowBuilder
from pos2distill.training.schedule import learning_rate
from pos2distill.training.step_record import StepRecord
from pos2distill.training.strategies.protocol import Strategy
from pos2distill.training.teachers import FullDistribution, TeacherSource

_CHUNK_TOKENS = 64
"""Tokens whose logits of the base model exist at once while its own loss on the responses is computed."""


class Action(IntEnum):
    """What to do next. If ranks request different actions, the greatest counts."""

    CONTINUE = 0
    CHECKPOINT = 1
    POSTPONE = 2
    """Continue, and save no checkpoint yet: this rank still uploads the last one."""
    CHECKPOINT_NOW = 3
    STOP = 4


class _Stopped(Exception):
    """A stop was requested, and the state is saved."""


RequestedAction = Callable[[int, bool], Action]
"""The action that this rank requests: given the number of completed steps, and whether a step is under way."""


@dataclass(frozen=True, slots=True)
class _GlobalBatch:
    """All ranks' values of a global batch, (N,) each, in rank order."""

    loss_N: Tensor
    coefficient_N: Tensor
    slot_id_N: Tensor


class TrainingLoop:
    """Trains a student on global batches.

    The loss and its gradient do not depend on how a global batch is cut into ranks and micro-batches: coefficients
    come from the row losses of the whole batch, and the parts of ranks and micro-batches add up to the global loss.
    Where the coefficients depend on the losses and there are several micro-batches, a pass without gradients computes
    the losses first.

    Args:
        study: method and training settings.
        trainers: settings of the training workers: the token limit of a micro-batch, and what an error of memory names.
        build: builds the rows of a sample.
        strategy: the student, and how it is updated.
        teacher: the base model; None if the method does not use it.
        dist: the group of ranks.
    """

    def __init__(
        self,
        study: Study,
        trainers: TrainersSection,
        build: RowBuilder,
        strategy: Strategy,
        teacher: TeacherSource | None,
        dist: DistContext,
    ) -> None:
        self.study = study
        self.strategy = strategy
        self.teacher = teacher
        self.dist = dist
        self.trainers = trainers
        self.preparer = BatchPreparer(study, build, dist, trainers.micro_batch_tokens)

    def train(
        self,
        loader: BatchLoader,
        progress: TrainingProgress,
        log: Callable[[StepRecord], None] | None,
        requested_action: RequestedAction,
        save: Callable[[TrainingProgress], None],
    ) -> bool:
        """Train from `progress` to the end, or until a rank requests a stop.

        Requests are handled after every micro-batch, and while samples are awaited: a node that is about to be taken
        away may not have the time for the rest of a step. What is saved within a step is the state before it. After a
        stop its gradients are lost, and the resumed run computes them again.

        Args:
            loader: the global batches.
            progress: updated after each batch.
            log: called with each step's record.
            requested_action: called on every rank.
            save: called on every rank to save the state if any rank has requested a checkpoint or a stop.
        Returns: whether all epochs are completed.
        Raises:
            UserError: if training diverges, or if a GPU's memory does not hold a step.
        """

        def handle_requests(*, in_step: bool = True) -> None:
            action = Action(self.dist.all_reduce_max(requested_action(progress.step, in_step)))
            if action not in (Action.CONTINUE, Action.POSTPONE):
                save(progress)
            if action is Action.STOP:
                raise _Stopped

        is_first = True
        batches = self.preparer.prefetch(loader.batches(progress))
        try:
            for prepared in batches:
                if prepared.micro_batches:
                    with translate_step_oom_error(
                        self.study, self.trainers, prepared.micro_batches, self.dist.world_size, is_first=is_first
                    ):
                        record = self._step(prepared, progress.step, handle_requests)
                    is_first = False
                    if log is not None:
                        log(record)
                # Before requests are handled, so that a checkpoint counts this batch as done.
                progress.add(prepared.batch)
                handle_requests(in_step=False)
        except _Stopped:
            # All ranks are here, so the collectives of the batch that is being prepared will end.
            batches.finish()
            return False
        finally:
            batches.close()
        return True

    def _step(self, prepared: PreparedBatch, step: int, handle_requests: Callable[[], None]) -> StepRecord:
        """One update of the weights. Requests are handled between micro-batches."""
        micro_batches = prepared.micro_batches
        if self.teacher is not None:
            # Not while preparing: a resident teacher's forward can use collectives, which must not run in that thread.
            micro_batches = self._add_teacher_distributions(micro_batches, handle_requests)
        computed = self._accumulate_gradients(micro_batches, handle_requests)
        # The fraction after the step, so that the last step of a run reaches the final rate.
        rate = learning_rate(prepared.batch.fraction, self.study.training)
        norm = self.strategy.step(rate)
        # The weights may be updated already, but the run ends before they can be saved.
        if not math.isfinite(norm):
            raise UserError("training diverged (its gradient is not finite); lower training.learning_rate")
        return _make_record(step, prepared.batch, computed, norm, rate)

    def _add_teacher_distributions(
        self, micro_batches: Sequence[MicroBatch], handle_requests: Callable[[], None]
    ) -> list[MicroBatch]:
        assert self.teacher is not None
        with_distributions = []
        for micro in micro_batches:
            with_distributions.append(replace(micro, teacher=self.teacher(micro.rows)))
            handle_requests()
        return with_distributions

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], handle_requests: Callable[[], None]
    ) -> _GlobalBatch:
        """Forward and backward of this rank's rows."""
        # With one micro-batch, its losses serve for the coefficients and for the gradient: one pass suffices.
        single_loss_B = None
        if len(micro_batches) == 1:
            single_loss_B = self._forward(micro_batches[0])
        slot_id_N = self.dist.all_gather(torch.cat([micro.slot_id_B for micro in micro_batches]))
        coefficient_N = self._coefficients(micro_batches, single_loss_B, slot_id_N, handle_requests)
        losses = []
        # Values are gathered in rank order, and every rank has equally many rows.
        start = self.dist.rank * (len(slot_id_N) // self.dist.world_size)
        for index, micro in enumerate(micro_batches):
            loss_B = single_loss_B
            if loss_B is None:
                loss_B = self._forward(micro)
            coefficient_B = coefficient_N[start : start + len(micro.slot_id_B)].to(loss_B.device)
            is_last = index == len(micro_batches) - 1
            self.strategy.backward((coefficient_B * loss_B).sum(), last=is_last)
            losses.append(loss_B.detach())
            start += len(micro.slot_id_B)
            if not is_last:
                handle_requests()
        # Copied to the CPU only here: an earlier copy would make the CPU wait for each micro-batch.
        loss_N = _require_finite(self.dist.all_gather(torch.cat(losses).cpu()))
        return _GlobalBatch(loss_N, coefficient_N, slot_id_N)

    def _coefficients(
        self,
        micro_batches: Sequence[MicroBatch],
        single_loss_B: Tensor | None,
        slot_id_N: Tensor,
        handle_requests: Callable[[], None],
    ) -> Tensor:
        """The coefficients (N,) of the whole global batch, from the losses of all ranks."""
        if self.study.method.weights == "uniform":
            # The losses are not used, so no pass is needed.
            loss_C = torch.zeros(sum(len(micro.slot_id_B) for micro in micro_batches))
        elif single_loss_B is not None:
            loss_C = single_loss_B.detach().cpu()
        else:
            loss_C = self._measure(micro_batches, handle_requests)
        reference_C = torch.cat([self._reference_loss(micro) for micro in micro_batches])
        loss_N = _require_finite(self.dist.all_gather(loss_C))
        return row_coefficients(self.study.method, loss_N, self.dist.all_gather(reference_C), slot_id_N)

    def _forward(self, micro: MicroBatch) -> Tensor:
        return self.strategy.forward(micro.batch, micro.teacher)

    @torch.no_grad()
    def _measure(self, micro_batches: Sequence[MicroBatch], handle_requests: Callable[[], None]) -> Tensor:
        """This rank's row losses, (C,)."""
        losses = []
        for micro in micro_batches:
            losses.append(self._forward(micro))
            handle_requests()
        return torch.cat(losses).cpu()

    @torch.no_grad()
    def _reference_loss(self, micro: MicroBatch) -> Tensor:
        """The base model's own loss on each row's response at the advantageous slots, (B,); 0 if nothing needs it."""
        if self.study.method.weights != "adaptive":
            # Zeros of the right size, since every rank takes part in the gather.
            return torch.zeros(len(micro.slot_id_B))
        distribution = micro.teacher
        assert isinstance(distribution, FullDistribution)  # the settings allow no other with adaptive weights
        losses = []
        for start in range(0, len(micro.batch.target_T), _CHUNK_TOKENS):
            chunk = slice(start, start + _CHUNK_TOKENS)
            losses.append(distribution[chunk].cross_entropy(micro.batch.target_T[chunk]).cpu())
        return mean_by_row(torch.cat(losses), micro.batch.row_T, len(micro.slot_id_B))


def _require_finite(loss_N: Tensor) -> Tensor:
    """Stop training if a loss is not finite.

    Raises:
        UserError: if training has diverged; then nothing of it is worth saving.
    """
    if not torch.isfinite(loss_N).all():
        raise UserError("training diverged (a row's loss is not finite); lower training.learning_rate")
    return loss_N


def _make_record(step: int, batch: Batch, computed: _GlobalBatch, norm: float, rate: float) -> StepRecord:
    loss_N, coefficient_N, slot_id_N = computed.loss_N, computed.coefficient_N, computed.slot_id_N
    # ANCHOR and PADDING are negative.
    is_trivial_N = slot_id_N >= 0
    weights: dict[int, float] = {}
    slots = slot_id_N[is_trivial_N].tolist()
    coefficients = coefficient_N[is_trivial_N].tolist()
    for slot, coefficient in zip(slots, coefficients, strict=True):
        weights[slot] = weights.get(slot, 0.0) + coefficient
    return StepRecord(
        step=step,
        epoch=batch.epoch,
        examples=tuple(sample.example.example_id for sample in batch.samples),
        fraction=batch.fraction,
        rows=int((slot_id_N != PADDING).sum()),
        loss=float((coefficient_N * loss_N).sum()),
        loss_trivial=_mean(loss_N[is_trivial_N]),
        loss_anchor=_mean(loss_N[slot_id_N == ANCHOR]),
        grad_norm=norm,
        learning_rate=rate,
        weight_by_slot=dict(sorted(weights.items())),
    )


def _mean(loss: Tensor) -> float | None:
    if len(loss) == 0:
        return None
    return float(loss.mean())
