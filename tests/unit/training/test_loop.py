import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pos2distill.config import TrainersSection
from pos2distill.errors import UserError
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.training import micro_batches
from pos2distill.training.batches import Batch
from pos2distill.training.distributed import DistContext
from pos2distill.training.loop import Action, TrainingLoop
from pos2distill.training.micro_batches import BatchPreparer, PreparedBatch
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.step_record import StepRecord
from pos2distill.training.strategies import build_strategy
from pos2distill.training.strategies.torch import TorchStrategy
from pos2distill.training.teachers import TeacherDistribution, build_teacher
from tests.support.ranks import run_threads
from tests.support.samples import Source
from tests.support.training import train_to_end

CPU = torch.device("cpu")


class Watched:
    """A strategy that keeps the gradient of each step before it is clipped, and counts the passes."""

    def __init__(self, strategy: TorchStrategy) -> None:
        self.strategy = strategy
        self.student = strategy.student
        self.gradients: list[Tensor] = []
        self.forwards = 0
        self.tokens_by_pass: list[int] = []  # computed, those of several rows once
        self.last: list[bool] = []

    def forward(self, batch: ResponseBatch, teacher: TeacherDistribution | None) -> Tensor:
        self.forwards += 1
        self.tokens_by_pass.append(len(batch.input_ids_S))
        return self.strategy.forward(batch, teacher)

    @property
    def tokens(self) -> int:
        """Of all passes."""
        return sum(self.tokens_by_pass)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.last.append(last)
        self.strategy.backward(loss, last=last)

    def step(self, learning_rate: float) -> float:
        parameters = self.student.lm.parameters()
        self.gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        return self.strategy.step(learning_rate)

    def base_states(self, batch: ResponseBatch) -> Tensor:
        return self.strategy.base_states(batch)

    def save(self, folder: Path) -> None:
        self.strategy.save(folder)


@dataclass
class Result:
    records: list[StepRecord] = field(default_factory=list)
    strategy: Any = None

    @property
    def gradient(self) -> Tensor:
        """Of the first step."""
        return self.strategy.gradients[0]


def prepare(source: Source, trainers: TrainersSection) -> Result:
    return Result(strategy=Watched(TorchStrategy(source.study, trainers, CPU, source.study.model)))


def work(result: Result, source: Source, trainers: TrainersSection, dist: DistContext) -> None:
    study = source.study
    teacher = build_teacher(study, result.strategy.base_states, CPU)
    progress = TrainingProgress.at_start(len(source.ids))
    trainer = TrainingLoop(study, trainers, source.build, result.strategy, teacher, dist)
    result.records += train_to_end(trainer, source.loader(dist), progress)
    assert progress.step == len(result.records)


def run(source: Source, trainers: TrainersSection) -> Result:
    result = prepare(source, trainers)
    work(result, source, trainers, DistContext())
    return result


def run_ranks(source: Source, trainers: TrainersSection, world_size: int) -> list[Result]:
    """The loop on every rank at once; each holds the whole model and its own part of the gradient."""
    # One after another, since transformers does not load models safely in several threads.
    results = [prepare(source, trainers) for _ in range(world_size)]
    run_threads(lambda dist: work(results[dist.rank], source, trainers, dist), world_size)
    return results


ROW_TOKENS = 220
"""Of the source's rows, at most; they differ by two."""


def trainers(micro_batch_rows: int, **settings: Any) -> TrainersSection:
    """Micro-batches of `micro_batch_rows` rows."""
    tokens = micro_batch_rows * ROW_TOKENS
    return TrainersSection(
        **{"strategy": "torch", "gradient_checkpointing": False, "micro_batch_tokens": tokens, **settings}
    )


def assert_same_step(one: StepRecord, other: StepRecord) -> None:
    assert other.rows == one.rows
    for name in ("loss", "loss_trivial", "loss_anchor"):
        want = getattr(one, name)
        assert getattr(other, name) == (want if want is None else pytest.approx(want, rel=1e-5, abs=1e-7))
    assert other.weight_by_slot == pytest.approx(one.weight_by_slot, rel=1e-4)


def assert_same_gradient(one: Tensor, other: Tensor) -> None:
    assert (one - other).norm() < 1e-5 * one.norm()


def test_row_tokens_is_the_length_of_the_sources_longest_row(make: Callable[..., Source]) -> None:
    source = make()
    rows = [source.build.row(key) for key in source.row_keys()]
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    assert max(lengths) == ROW_TOKENS
    assert 9 * min(lengths) > 8 * ROW_TOKENS


# --- any cut of the global batch


@pytest.mark.parametrize("global_batch_rows", [32, 20])
def test_trainer_loss_and_gradient_do_not_depend_on_micro_batches(
    make: Callable[..., Source], global_batch_rows: int
) -> None:
    source = make(training={"global_batch_rows": global_batch_rows})
    whole = run(source, trainers(32))
    assert whole.records[0].rows == global_batch_rows
    for size in (1, 4):
        cut = run(source, trainers(size))
        assert_same_step(whole.records[0], cut.records[0])
        assert_same_gradient(whole.gradient, cut.gradient)


def test_trainer_computes_a_prefix_shared_by_rows_of_an_example_once(make: Callable[..., Source]) -> None:
    """A micro-batch of one row has nothing to share with, so the test above holds one against the other."""
    source = make()
    rows = [source.build.row(key) for key in source.row_keys()]
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    shared = 0
    for at in range(0, len(rows), 4):  # rows of one example: the anchor row, then each further slot
        prompts = [row.prompt_ids.tolist() for row in rows[at : at + 4]]
        branches = [
            max(_common(prompt, other) for other in prompts[:index]) for index, prompt in enumerate(prompts) if index
        ]
        shared += sum(
            common for common, length in zip(branches, lengths[at + 1 : at + 4], strict=True) if 8 * common >= length
        )
    assert shared > sum(lengths) / 10
    assert run(source, trainers(32)).strategy.tokens == sum(lengths) - shared
    assert run(source, trainers(1)).strategy.tokens == 2 * sum(lengths)  # measured beforehand


def _common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_trainer_gradient_does_not_change_with_activation_checkpoints(make: Callable[..., Source]) -> None:
    source = make()
    assert_same_gradient(
        run(source, trainers(32)).gradient, run(source, trainers(8, gradient_checkpointing=True)).gradient
    )


def test_prepare_for_training_turns_dropout_off(make: Callable[..., Source], tmp_path: Path) -> None:
    """Else a row's weight and its gradient would be of two models."""
    study = make(method={"name": "seqkd"}).study
    folder = shutil.copytree(study.model.path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    dropping = study.model_copy(update={"model": study.model.model_copy(update={"path": str(folder)})})
    strategies = [TorchStrategy(each, trainers(32), CPU, each.model) for each in (study, dropping)]
    batch = collate([np.arange(20, 50)], [np.arange(60, 70)])
    plain, own, again = (strategy.forward(batch, None) for strategy in (*strategies, strategies[1]))
    assert torch.equal(own, plain)
    assert torch.equal(own, again)
    assert strategies[1].student.training
    strategies[1].save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["attention_dropout"] == 0.5


@pytest.mark.parametrize(("global_batch_rows", "world_size"), [(32, 2), (16, 3), (20, 3)])
def test_trainer_loss_and_gradient_do_not_depend_on_ranks(
    make: Callable[..., Source], global_batch_rows: int, world_size: int
) -> None:
    """16 and 20 rows leave the last of 3 ranks with padding, which counts for nothing."""
    source = make(training={"global_batch_rows": global_batch_rows})
    whole = run(source, trainers(32))
    parts = run_ranks(source, trainers(4), world_size)
    for part in parts:
        assert_same_step(whole.records[0], part.records[0])
    assert_same_gradient(whole.gradient, torch.stack([part.gradient for part in parts]).sum(0))


def test_trainer_makes_one_pass_for_one_micro_batch_and_two_for_several(make: Callable[..., Source]) -> None:
    source = make()
    one, four = run(source, trainers(32)).strategy, run(source, trainers(8)).strategy
    assert (one.forwards, one.last) == (1, [True])
    assert (four.forwards, four.last) == (8, [False, False, False, True])


METHODS: list[dict[str, Any]] = [
    {"name": "kl"},
    {"name": "seqkd"},
    {"name": "sft"},
    {"name": "r2"},
    {"name": "r2", "weights": "adaptive"},
    {"name": "r2", "weights": "adaptive", "teacher": "resident"},
    {"name": "r1", "teacher": "topk"},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(method.values()))
def test_trainer_loss_and_gradient_of_every_method_do_not_depend_on_the_cut(
    make: Callable[..., Source], method: dict[str, Any]
) -> None:
    """Ranks and micro-batches at once, with padding: of 12 rows 3 would be anchor rows, which are not built."""
    source = make(training={"global_batch_rows": 12}, method=method)
    whole = run(source, trainers(32))
    parts = run_ranks(source, trainers(3), 2)
    for part in parts:
        assert_same_step(whole.records[0], part.records[0])
    assert_same_gradient(whole.gradient, torch.stack([part.gradient for part in parts]).sum(0))


def test_trainer_makes_one_pass_for_uniform_weights(make: Callable[..., Source]) -> None:
    strategy = run(make(method={"name": "seqkd"}, training={"global_batch_rows": 32}), trainers(8)).strategy
    assert (strategy.forwards, strategy.last) == (3, [False, False, True])  # 24 trivial rows


# --- teachers


def test_trainer_with_cached_and_resident_teachers_agrees(make: Callable[..., Source]) -> None:
    cached, resident = (run(make(method={"teacher": teacher}), trainers(8)) for teacher in ("cached", "resident"))
    for one, other in zip(cached.records, resident.records, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-6, abs=1e-6)
    assert_same_gradient(cached.gradient, resident.gradient)


def test_trainer_with_topk_teacher_approaches_the_exact_loss_as_k_grows(make: Callable[..., Source]) -> None:
    """The tiny model is unsure, so that a few tokens are a loose bound."""
    bounds = [run(make(method={"teacher": "topk", "teacher_topk": k}), trainers(32)).records[0] for k in (2, 50, 300)]
    few, many, every = (record.loss_trivial or 0.0 for record in bounds)
    assert 0 < few < 0.9 * many < 0.9 * 0.9 * every
    assert all(record.loss_anchor == pytest.approx(0, abs=1e-6) for record in bounds)


def test_trainer_with_topk_teacher_reduces_the_loss(make: Callable[..., Source]) -> None:
    method = {"teacher": "topk", "teacher_topk": 30}
    source = make(method=method, data={"train_examples": 4}, training={"epochs": 20, "learning_rate": 3e-3})
    losses = [record.loss for record in run(source, trainers(32)).records]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_trainer_with_resident_teacher_keeps_the_teacher_fixed(make: Callable[..., Source]) -> None:
    overrides = {"data": {"train_examples": 4}, "training": {"epochs": 4, "learning_rate": 1e-2}}
    cached, resident = (
        run(make(method={"teacher": teacher}, **overrides), trainers(32)) for teacher in ("cached", "resident")
    )
    losses = [record.loss for record in cached.records]
    assert [record.loss for record in resident.records] == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("alignment", ["shifted", "official"])
def test_trainer_starts_with_a_student_equal_to_the_teacher_on_anchor_rows(
    make: Callable[..., Source], alignment: str
) -> None:
    first = run(make(method={"alignment": alignment}), trainers(8)).records[0]
    assert first.loss_anchor is not None
    assert first.loss_anchor < 1e-6
    assert first.loss_trivial is not None
    assert first.loss_trivial > 1e-3


@pytest.mark.parametrize("method", [{"name": "r1"}, {"name": "seqkd"}])
def test_trainer_raises_if_a_loss_is_not_finite(make: Callable[..., Source], method: dict[str, Any]) -> None:
    source = make(method=method)
    result = prepare(source, trainers(8))
    with torch.no_grad():
        result.strategy.student.lm.get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(UserError, match=r"training diverged .* lower training.learning_rate"):
        work(result, source, trainers(8), DistContext())
    assert result.records == []


def test_trainer_raises_if_the_gradient_is_not_finite(make: Callable[..., Source]) -> None:
    source = make(method={"name": "seqkd"})
    result = prepare(source, trainers(8))
    hidden = result.strategy.student.lm.get_input_embeddings().weight
    hidden.register_hook(lambda gradient: gradient * torch.inf)  # under a loss that is finite
    with pytest.raises(UserError, match=r"training diverged \(its gradient is not finite\); lower"):
        work(result, source, trainers(8), DistContext())
    assert result.records == []


# --- the loop


def test_trainer_halves_the_loss(make: Callable[..., Source]) -> None:
    source = make(data={"train_examples": 4}, training={"epochs": 20, "learning_rate": 3e-3})
    records = run(source, trainers(32)).records
    losses = [record.loss for record in records]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_step_records_report_each_step(make: Callable[..., Source]) -> None:
    source = make(training={"epochs": 2, "global_batch_rows": 20}, method={"anchor_weight": 0.0})
    records = run(source, trainers(8)).records
    assert [(record.step, record.epoch, record.rows) for record in records] == [
        (0, 0, 15),  # 5 of the 20 rows would be anchor rows, which are not built
        (1, 0, 9),
        (2, 1, 15),
        (3, 1, 9),
    ]
    assert records[-1].learning_rate == pytest.approx(1e-4)
    assert [record.fraction for record in records] == pytest.approx([5 / 16, 8 / 16, 13 / 16, 1])
    for record in records:
        assert record.loss_anchor is None
        assert set(record.weight_by_slot) == {1, 2, 3}
        assert sum(record.weight_by_slot.values()) > 0
        assert record.as_dict()["loss"] == record.loss


class Requests:
    """Requests an action at one of the polls, and keeps what was saved.

    Attributes:
        polls: for each poll, the number of completed steps and whether it was within a step.
    """

    def __init__(self, action: Action, poll: int) -> None:
        self.requested, self.poll = action, poll
        self.polls: list[tuple[int, bool]] = []
        self.saved: list[int] = []

    def action(self, step: int, in_step: bool) -> Action:
        self.polls.append((step, in_step))
        return self.requested if len(self.polls) == self.poll else Action.CONTINUE

    def save(self, progress: TrainingProgress) -> None:
        self.saved.append(progress.step)


def run_with(source: Source, requests: Requests, result: Result, dist: DistContext, rows: int = 8) -> bool:
    teacher = build_teacher(source.study, result.strategy.base_states, CPU)
    trainer = TrainingLoop(source.study, trainers(rows), source.build, result.strategy, teacher, dist)
    progress = TrainingProgress.at_start(len(source.ids))
    return trainer.train(source.loader(dist), progress, result.records.append, requests.action, requests.save)


TWO_STEPS: dict[str, Any] = {"data": {"train_examples": 4}, "training": {"epochs": 2}}


def test_trainer_polls_requests_after_every_micro_batch(make: Callable[..., Source]) -> None:
    """Of every pass (the base model's outputs, the losses, the gradients), and once after the step."""
    requests = Requests(Action.CONTINUE, 0)
    source = make(**TWO_STEPS)
    result = prepare(source, trainers(8))
    assert run_with(source, requests, result, DistContext())
    assert len(result.strategy.last) == 2 * 2  # micro-batches
    first_step, second_step = [(0, True)] * 5, [(1, True)] * 5
    assert requests.polls == [*first_step, (1, False), *second_step, (2, False)]
    assert requests.saved == []


@pytest.mark.parametrize("poll", [1, 4, 5, 6, 7, 12])
def test_trainer_stops_after_the_current_micro_batch(make: Callable[..., Source], poll: int) -> None:
    requests = Requests(Action.STOP, poll)
    source = make(**TWO_STEPS)
    result = prepare(source, trainers(8))
    assert not run_with(source, requests, result, DistContext())
    assert len(requests.polls) == poll
    assert requests.saved == [poll // 6]
    assert len(result.records) == poll // 6


@pytest.mark.parametrize("poll", [5, 11])
def test_trainer_saves_within_a_step_and_continues(make: Callable[..., Source], tmp_path: Path, poll: int) -> None:
    """After the first gradients of the first step, before Adam has any moments, and of the second."""
    source = make(**TWO_STEPS)
    undisturbed = run(source, trainers(8))
    result = prepare(source, trainers(8))

    class Saving(Requests):
        def save(self, progress: TrainingProgress) -> None:
            super().save(progress)
            result.strategy.strategy.save_state(tmp_path)

    requests = Saving(Action.CHECKPOINT, poll)
    assert run_with(source, requests, result, DistContext())
    assert requests.saved == [poll // 6]
    assert any(tmp_path.iterdir())
    assert [each.as_dict() for each in result.records] == [each.as_dict() for each in undisturbed.records]


def test_trainer_stops_all_ranks_if_one_requests_it(make: Callable[..., Source]) -> None:
    source = make(**TWO_STEPS)
    results = [prepare(source, trainers(4)) for _ in range(2)]
    requests = [Requests(Action.CHECKPOINT, 2), Requests(Action.STOP, 2)]

    def work_on(dist: DistContext) -> bool:
        return run_with(source, requests[dist.rank], results[dist.rank], dist, rows=4)

    assert run_threads(work_on, 2) == [False, False]
    assert [each.saved for each in requests] == [[0], [0]]
    assert [each.polls for each in requests] == [[(0, True)] * 2] * 2


@pytest.mark.parametrize(("requested", "saved"), [(Action.CHECKPOINT, []), (Action.CHECKPOINT_NOW, [0])])
def test_trainer_saves_nothing_while_a_rank_postpones_it_unless_it_is_urgent(
    make: Callable[..., Source], requested: Action, saved: list[int]
) -> None:
    source = make(**TWO_STEPS)
    results = [prepare(source, trainers(4)) for _ in range(2)]
    requests = [Requests(requested, 2), Requests(Action.POSTPONE, 2)]

    def work_on(dist: DistContext) -> bool:
        return run_with(source, requests[dist.rank], results[dist.rank], dist, rows=4)

    assert run_threads(work_on, 2) == [True, True]
    assert [each.saved for each in requests] == [saved, saved]


def test_trainer_raises_an_error_without_waiting_for_the_batch_being_prepared(
    make: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(**TWO_STEPS)
    result = prepare(source, trainers(8))
    released = threading.Event()
    prepare_batch = BatchPreparer.prepare
    prepared: list[Batch] = []

    def prepare_first_and_wait(preparer: BatchPreparer, batch: Batch) -> PreparedBatch:
        if prepared:
            released.wait(60)
        prepared.append(batch)
        return prepare_batch(preparer, batch)

    def fail(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(BatchPreparer, "prepare", prepare_first_and_wait)
    monkeypatch.setattr(result.strategy, "forward", fail)
    start = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            work(result, source, trainers(8), DistContext())
        assert time.monotonic() - start < 30
    finally:
        released.set()


def test_a_prefix_that_rows_share_counts_once_towards_a_micro_batch(make: Callable[..., Source]) -> None:
    source = make(**TWO_STEPS)
    steps = 2

    def forwards(tokens: int) -> int:
        result = run(source, trainers(1, micro_batch_tokens=tokens))
        assert len(result.records) == steps
        return int(result.strategy.forwards)

    together = run(source, trainers(100))
    assert together.strategy.forwards == steps
    most = max(together.strategy.tokens_by_pass)
    rows = together.records[0].rows
    # All rows without sharing would need more.
    assert most < rows * (ROW_TOKENS - 2)
    assert forwards(most) == steps
    assert forwards(most - 1) > steps


def test_trainer_stops_although_the_next_batch_cannot_be_prepared_on_one_rank(
    make: Callable[..., Source], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(**TWO_STEPS)
    results = [prepare(source, trainers(4)) for _ in range(2)]
    requests = [Requests(Action.STOP, 3), Requests(Action.CONTINUE, 0)]
    monkeypatch.setattr(micro_batches, "_FINISH_SECONDS", 1.0)
    prepare_batch = BatchPreparer.prepare

    def fail_on_one_rank(preparer: BatchPreparer, batch: Batch) -> PreparedBatch:
        if preparer.dist.rank == 1 and batch.epoch == 1:
            raise OSError("the storage is gone")
        return prepare_batch(preparer, batch)

    monkeypatch.setattr(BatchPreparer, "prepare", fail_on_one_rank)

    def work_on(dist: DistContext) -> tuple[bool, int]:
        finished = run_with(source, requests[dist.rank], results[dist.rank], dist, rows=4)
        # One rank's thread still waits in the group of samples; the other group is free.
        return finished, dist.all_reduce_max(dist.rank)

    assert run_threads(work_on, 2) == [(False, 1), (False, 1)]
    assert [each.saved for each in requests] == [[0], [0]]
    assert "the batch after the last step could not be prepared: the storage is gone" in caplog.text


def test_dist_context_of_one_worker_gathers_its_own_values() -> None:
    value = torch.tensor([1.0, 2.0])
    assert DistContext().all_gather(value).tolist() == [1.0, 2.0]
    assert DistContext().all_reduce_max(2) == 2


def test_trainer_repeats_a_run_exactly(make: Callable[..., Source]) -> None:
    source = make(data={"train_examples": 4}, training={"epochs": 2})
    first, second = run(source, trainers(8)), run(source, trainers(8))
    assert [record.as_dict() for record in first.records] == [record.as_dict() for record in second.records]


# --- the strategy


def test_torch_strategy_step_is_clipped_adamw_at_the_given_rate(make: Callable[..., Source]) -> None:
    """Against torch's own AdamW on a gradient clipped by hand."""
    source = make(training={"max_grad_norm": 0.01, "weight_decay": 0.1})
    settings = source.study.training
    strategy = TorchStrategy(source.study, trainers(4), CPU, source.study.model)
    strategy.optimizer.param_groups[0]["lr"] = 123.0  # what was set before does not count
    twin = load_model(source.study.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.5, betas=settings.betas, weight_decay=0.1, eps=1e-8)
    generator = torch.Generator().manual_seed(0)
    for own, other in zip(strategy.student.lm.parameters(), twin.parameters(), strict=True):
        own.grad = torch.randn(own.shape, generator=generator)
        other.grad = own.grad.clone()
    norm = torch.cat([parameter.grad.flatten() for parameter in twin.parameters()]).norm()  # type: ignore[union-attr]
    for parameter in twin.parameters():
        parameter.grad *= 0.01 / norm
    optimizer.step()
    assert strategy.step(0.5) == pytest.approx(float(norm), rel=1e-5)
    for own, other in zip(strategy.student.lm.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
        assert own.grad is None


def test_torch_strategy_in_bfloat16_errs_at_most_twice_as_much_as_plain_bfloat16(make: Callable[..., Source]) -> None:
    """Autocast over fp32 weights. The reference: the same weights cast to bfloat16, in plain torch."""
    exact = run(make(), trainers(32))
    rounded = run(make(training={"precision": "bfloat16"}), trainers(32))
    plain = prepare(make(), trainers(32))
    for parameter in plain.strategy.student.lm.parameters():
        parameter.data = parameter.data.bfloat16()
    work(plain, make(), trainers(32), DistContext())
    error = (rounded.gradient - exact.gradient).norm()
    reference_error = (plain.gradient.float() - exact.gradient).norm()
    assert 0 < error <= 2 * reference_error
    assert rounded.records[0].loss == pytest.approx(exact.records[0].loss, rel=0.1)
    assert rounded.strategy.student.lm.dtype == torch.float32
    assert torch.cosine_similarity(exact.gradient, rounded.gradient, dim=0) > 0.98


def test_torch_strategy_save_writes_a_folder_that_loads_in_the_models_dtype(
    make: Callable[..., Source], tmp_path: Path
) -> None:
    source = make(model={"dtype": "bfloat16"})
    result = run(source, trainers(32))
    weights = {name: value.bfloat16() for name, value in result.strategy.student.lm.state_dict().items()}
    result.strategy.save(tmp_path / "model")
    load_tokenizer(source.study.model).save_pretrained(tmp_path / "model")
    model = source.study.model.model_copy(update={"path": str(tmp_path / "model")})
    saved = load_model(model)
    assert saved.dtype == torch.bfloat16
    assert all(torch.equal(value, weights[name]) for name, value in saved.state_dict().items())
    assert load_tokenizer(model).chat_template
    before = load_model(source.study.model).state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in weights.items())


def test_build_strategy_makes_the_one_named(make: Callable[..., Source]) -> None:
    study = make().study
    assert isinstance(build_strategy(study, trainers(4), CPU, study.model), TorchStrategy)
