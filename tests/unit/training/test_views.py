"""RPSD's second view and PoSE: positions by hand, and loss and gradient against two plain forward passes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig

from pos2distill.config import ModelSection, Recipe, Study
from pos2distill.errors import UserError
from pos2distill.models.architecture import load_config
from pos2distill.models.check_rope import require_position_room
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import PositionView, ResponseBatch
from pos2distill.training import views
from pos2distill.training.micro_batches import pack
from pos2distill.training.rows import Row
from pos2distill.training.student import Student
from pos2distill.training.views import POSITIONS, view_of
from tests.support.models import HEADS, SMALL
from tests.support.samples import Source

Make = Callable[..., Recipe]
MakeSource = Callable[[Study], Source]


def study_with(make_recipe: Make, view: str, **method: Any) -> Study:
    return make_recipe(method={"name": "seqkd", "view": view, **method}).study


def rows_of(study: Study, make_source: MakeSource, count: int = 6) -> list[Row]:
    source = make_source(study)
    return [source.build.row(key) for key in source.row_keys()[:count]]


def fixed_draw(monkeypatch: pytest.MonkeyPatch, start: int, shift: int, modulus: int = 0) -> None:
    monkeypatch.setattr(views, "_draw", lambda *arguments: (start, shift, modulus))


def as_rows(batch: ResponseBatch, value_S: Tensor) -> list[list[int]]:
    """A value of every packed token, by row; a row's shared prefix is that of the row that added it."""
    spans = value_S.split(batch.packed.span_lengths)
    return [torch.cat([spans[span] for span in row]).tolist() for row in batch.packed.row_spans]


# --- positions


def test_skip_and_cyclic_positions_by_hand(
    make_recipe: Make, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_with(make_recipe, "none")
    rows = rows_of(study, make_source, 1)
    batch = pack(rows, study, epoch=0)
    length = rows[0].length
    fixed_draw(monkeypatch, start=3, shift=10)
    skipped = view_of(rows, batch, "skip", seed=0, epoch=0)
    assert skipped.position_S.tolist() == [0, 1, 2, *range(13, length + 10)]
    assert skipped.is_shifted_T.all()
    fixed_draw(monkeypatch, start=0, shift=2, modulus=length)
    cyclic = view_of(rows, batch, "cyclic", seed=0, epoch=0)
    assert cyclic.position_S.tolist() == [*range(2, length), 0, 1]
    # A skip inside the response: tokens that are predicted before it do not count.
    start = len(rows[0].prompt_ids) + 1
    fixed_draw(monkeypatch, start=start, shift=5)
    is_shifted = view_of(rows, batch, "skip", seed=0, epoch=0).is_shifted_T.tolist()
    assert is_shifted == [False, False] + [True] * (len(rows[0].response_ids) - 2)


@pytest.mark.parametrize("kind", ["skip", "cyclic", "pose"])
def test_view_does_not_depend_on_the_cut_and_is_the_same_for_a_shared_prefix(
    make_recipe: Make, make_source: MakeSource, kind: Any
) -> None:
    study = study_with(make_recipe, "none")
    rows = rows_of(study, make_source)
    together = pack(rows, study, epoch=0)
    assert any(together.packed.shared_lengths)
    view = view_of(rows, together, kind, seed=1, epoch=2)
    for row, positions in zip(rows, as_rows(together, view.position_S), strict=True):
        alone = pack([row], study, epoch=0)
        assert positions == view_of([row], alone, kind, seed=1, epoch=2).position_S.tolist()
        assert len(set(positions)) == len(positions)


def test_draws_differ_by_epoch_and_example_and_stay_within_their_range(
    make_recipe: Make, make_source: MakeSource
) -> None:
    study = study_with(make_recipe, "none")
    rows = rows_of(study, make_source, 8)
    drawn = {}
    for row in rows:
        batch = pack([row], study, epoch=0)
        for epoch in range(40):
            skip_S = view_of([row], batch, "skip", seed=0, epoch=epoch).position_S - batch.position_S
            start = int((skip_S > 0).nonzero()[0])
            drawn[row.sample.example.example_id, epoch] = (start, int(skip_S[-1]))
    assert len(set(drawn.values())) > 0.9 * len(drawn)
    length = max(row.length for row in rows)
    starts = np.array([start for start, _ in drawn.values()]) / length
    shifts = np.array([shift for _, shift in drawn.values()]) / length
    for fractions in (starts, shifts):
        assert 0 <= fractions.min() < 0.1
        assert 0.9 < fractions.max() <= 1
    assert starts.max() < 1
    assert shifts.min() > 0


# --- loss


def shifted_student(study: Study) -> Student:
    """A student with weights of its own, so that no divergence is zero by chance."""
    return Student(load_model(study.model, packed=True), study)


def plain_logits(lm: Any, row: Row, positions: list[int]) -> Tensor:
    """The logits that predict one row's response, by a forward pass with an explicit mask and these positions."""
    ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
    length = ids.shape[1]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    logits = lm(ids, attention_mask=mask, position_ids=torch.tensor([positions]), use_cache=False).logits[0]
    return logits[len(row.prompt_ids) - 1 : -1]


def gradient(lm: Any, loss: Tensor) -> Tensor:
    lm.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in lm.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("kind", ["skip", "cyclic"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradient_equal_two_plain_forward_passes(
    make_recipe: Make, make_source: MakeSource, kind: str, checkpointing: bool
) -> None:
    study = study_with(make_recipe, kind, view_weight=0.7)
    rows = rows_of(study, make_source)
    batch = pack(rows, study, epoch=0)
    assert batch.view is not None
    student = shifted_student(study)
    if checkpointing:
        student.lm.train()
        student.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weight_B = torch.linspace(0.1, 1, len(rows))
    ours_B = student(batch, None)
    ours = gradient(student.lm, (weight_B * ours_B).sum())

    lm = load_model(study.model.model_copy(update={"attention": "eager"}))
    losses, plain_losses, start = [], [], 0
    for row, positions in zip(rows, as_rows(batch, batch.view.position_S), strict=True):
        plain = plain_logits(lm, row, list(range(row.length)))
        view = plain_logits(lm, row, positions).log_softmax(-1)
        target = plain.detach().log_softmax(-1)
        is_shifted = batch.view.is_shifted_T[start : start + len(row.response_ids)]
        start += len(row.response_ids)
        divergence = (view.exp() * (view - target)).sum(-1)[is_shifted].sum() / is_shifted.sum().clamp_min(1)
        plain_losses.append(cross_entropy(plain, torch.from_numpy(row.response_ids.astype(np.int64))))
        losses.append(plain_losses[-1] + 0.7 * divergence)
    expected_B = torch.stack(losses)
    torch.testing.assert_close(ours_B, expected_B, rtol=1e-5, atol=1e-5)
    assert (expected_B - torch.stack(plain_losses)).max() > 1e-2
    expected = gradient(lm, (weight_B * expected_B).sum())
    assert (ours - expected).norm() < 1e-4 * expected.norm()
    # The loss under the plain view is that of the method without a second view.
    without = student(replace(batch, view=None), None)
    torch.testing.assert_close(without, torch.stack(plain_losses), rtol=1e-5, atol=1e-5)


def test_a_view_that_shifts_nothing_has_no_divergence(make_recipe: Make, make_source: MakeSource) -> None:
    study = study_with(make_recipe, "skip")
    batch = pack(rows_of(study, make_source), study, epoch=0)
    student = shifted_student(study)
    everything = torch.ones_like(batch.target_T, dtype=torch.bool)
    same = replace(batch, view=PositionView(batch.position_S, everything))
    nothing = replace(batch, view=PositionView(batch.position_S + 7, ~everything))
    with torch.no_grad():
        plain = student(replace(batch, view=None), None)
        assert torch.equal(student(same, None), plain)
        assert torch.equal(student(nothing, None), plain)


@pytest.mark.parametrize("kind", ["skip", "cyclic"])
def test_view_of_a_shift_of_0_has_no_divergence(
    make_recipe: Make, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    study = study_with(make_recipe, kind)
    rows = rows_of(study, make_source)
    fixed_draw(monkeypatch, start=3 if kind == "skip" else 0, shift=0, modulus=max(row.length for row in rows) + 1)
    batch = pack(rows, study, epoch=0)
    assert batch.view is not None
    assert torch.equal(batch.view.position_S, batch.position_S)
    assert batch.view.is_shifted_T.all()
    student = shifted_student(study)
    with torch.no_grad():
        assert torch.equal(student(batch, None), student(replace(batch, view=None), None))


def test_pose_is_the_cross_entropy_at_skipped_positions(make_recipe: Make, make_source: MakeSource) -> None:
    study = study_with(make_recipe, "pose")
    rows = rows_of(study, make_source)
    batch = pack(rows, study, epoch=0)
    assert batch.view is None
    lm = load_model(study.model.model_copy(update={"attention": "eager"}))
    with torch.no_grad():
        ours_B = shifted_student(study)(batch, None)
        for row, positions, ours in zip(rows, as_rows(batch, batch.position_S), ours_B, strict=True):
            target = torch.from_numpy(row.response_ids.astype(np.int64))
            torch.testing.assert_close(
                ours, cross_entropy(plain_logits(lm, row, positions), target), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["skip", "cyclic", "pose"])
def test_an_early_token_still_moves_a_late_logit_across_a_jump(
    make_recipe: Make, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch, kind: str, attention: str
) -> None:
    """transformers takes a jump in positions for the start of another row, unless it gets a mask."""
    study = study_with(make_recipe, kind)
    model = study.model.model_copy(update={"attention": attention})
    study = study.model_copy(update={"model": model})
    (row,) = rows_of(study, make_source, 1)
    # Of the cyclic view the jump is in the middle of the prompt too.
    middle = len(row.prompt_ids) // 2
    shift = row.length - middle if kind == "cyclic" else 30
    fixed_draw(monkeypatch, start=0 if kind == "cyclic" else middle, shift=shift, modulus=row.length)
    student = shifted_student(study)
    changed = row.prompt_ids.copy()
    changed[1] += 1
    last = []
    for each in (row, replace(row, prompt_ids=changed)):
        batch = pack([each], study, epoch=0)
        positions = batch.position_S if batch.view is None else batch.view.position_S
        assert (positions.diff() != 1).nonzero().flatten().tolist() == [middle - 1]
        with torch.no_grad():
            hidden_TH = response_hidden_states(student.lm, replace(batch, position_S=positions))
            last.append(student.head.raw_logits(hidden_TH[-1:]))
    assert (last[0] - last[1]).abs().max() > 1e-3


# --- errors


def require_room(model: ModelSection, view: str) -> None:
    require_position_room(model, load_config(model), POSITIONS[view])


def test_views_need_positions(tiny_model_path: str) -> None:
    require_room(ModelSection(path=tiny_model_path, max_length=256), "skip")
    require_room(ModelSection(path=tiny_model_path, max_length=465), "cyclic")
    with pytest.raises(UserError) as caught:
        require_room(ModelSection(path=tiny_model_path), "skip")
    assert str(caught.value) == (
        f"method.view: shifted rows need 1024 positions, {tiny_model_path} has 512; set model.max_length to 256 or less"
    )
    with pytest.raises(UserError, match=r"need 514 positions, .* has 512; set model.max_length to 465 or less"):
        require_room(ModelSection(path=tiny_model_path, max_length=467), "cyclic")


def test_views_need_positions_of_the_smallest_rope_scale(tiny_model_path: str) -> None:
    """A layer of scale s rotates position p as p / s."""

    def require(length: int, *scales: float) -> None:
        require_room(ModelSection(path=tiny_model_path, max_length=length, rope_scales=scales), "skip")

    require(512, 2.0)
    require(256, 1.0, 4.0)
    with pytest.raises(UserError, match=r"need 1024 positions, .* has 512; set model.max_length to 128 or less"):
        require(256, 0.5, 4.0)


def test_views_need_positions_whose_frequencies_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    LlamaConfig(**SMALL, **HEADS, max_position_embeddings=512, rope_parameters=rope).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"need 600 positions, .* has 512"):
        require_room(ModelSection(path=str(tmp_path), max_length=300), "skip")
