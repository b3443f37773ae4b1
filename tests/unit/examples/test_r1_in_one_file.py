"""The method in one file against the pipeline: equal prompts, losses and gradients."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import r1_in_one_file as twin
from pos2distill.config import ModelSection, Recipe, Study, TrainingSection
from pos2distill.losses.objectives import ANCHOR
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.training.distributed import DistContext
from pos2distill.training.loop import TrainingLoop
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.schedule import learning_rate
from pos2distill.training.step_record import StepRecord
from pos2distill.training.strategies.torch import TorchStrategy
from pos2distill.training.teachers import build_teacher
from tests.support.paths import PROJECT
from tests.support.samples import Source
from tests.support.training import train_to_end

FILE = PROJECT / "examples" / "r1_in_one_file.py"
TOY = PROJECT / "examples" / "toy"


class RecordedGradient(TorchStrategy):
    """Keeps the gradient of the last step before it is clipped."""

    gradient: Tensor

    def step(self, learning_rate: float) -> float:
        self.gradient = gradient_of(self.student.lm)
        return super().step(learning_rate)


def gradient_of(lm: Any) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in lm.parameters()])


def move(lm: Any) -> None:
    """Away from the teacher, so that anchor rows have a loss too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def source(make_recipe: Callable[..., Recipe], make_source: Callable[[Study], Source]) -> Source:
    """Six questions of the toy, with 8 documents each, as one batch."""
    recipe = make_recipe(
        model={"path": str(TOY / "base")},
        data={"path": str(TOY / "data.jsonl.gz"), "documents": 8, "train_examples": 6},
        method={"k": 4, "advantageous_slot": "last"},
        training={"global_batch_rows": 30},
    )
    return make_source(recipe.study)


def one_step_of_the_pipeline(source: Source, recipe: Recipe) -> tuple[StepRecord, Tensor]:
    trainers = recipe.runtime.trainers
    strategy = RecordedGradient(source.study, trainers, torch.device("cpu"), source.study.model)
    move(strategy.student.lm)
    teacher = build_teacher(source.study, strategy.base_states, torch.device("cpu"))
    trainer = TrainingLoop(source.study, trainers, source.build, strategy, teacher, DistContext())
    (record,) = train_to_end(trainer, source.loader(), TrainingProgress.at_start(len(source.ids)))
    return record, strategy.gradient


def test_r1_in_one_file_has_the_loss_and_the_gradient_of_the_pipeline(
    source: Source, make_recipe: Callable[..., Recipe]
) -> None:
    record, expected = one_step_of_the_pipeline(source, make_recipe())
    rows = [source.build.row(key) for key in source.row_keys()]
    assert len(rows) == record.rows == 30
    slot_N = torch.tensor([row.slots[0] for row in rows])
    teacher, student = load_model(source.study.model), load_model(source.study.model)
    move(student)
    kl_N = twin.kl_of_rows(
        student,
        teacher,
        [
            (row.slots[0], row.sample.teacher_prompt_ids.tolist(), row.prompt_ids.tolist(), row.response_ids.tolist())
            for row in rows
        ],
    )
    anchor_N = torch.tensor([row.slot_id == ANCHOR for row in rows])
    assert torch.equal(anchor_N, slot_N == 7)
    assert kl_N.min() > 1e-2
    loss = twin.r1_loss(kl_N, slot_N, 7)
    assert loss.item() == pytest.approx(record.loss, rel=1e-5)
    assert kl_N[anchor_N].mean().item() == pytest.approx(record.loss_anchor, rel=1e-5)
    loss.backward()
    assert (gradient_of(student) - expected).norm() < 1e-5 * expected.norm()


def test_learning_rate_equals_that_of_the_pipeline() -> None:
    settings = TrainingSection(learning_rate=1e-3)
    for step in range(1, 108):
        expected = learning_rate(step / 107, settings)
        assert twin.learning_rate(step / 107, 1e-3) == pytest.approx(expected, rel=1e-12)


def test_distil_takes_steps_at_the_rates_of_the_pipeline(
    source: Source, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six examples in batches of four, so that an epoch ends with a smaller batch."""
    study = source.study.model_copy(update={"training": TrainingSection(global_batch_rows=20, learning_rate=1e-3)})
    loader = replace(source, study=study).loader()
    expected = [learning_rate(batch.fraction, study.training) for batch in loader.batches(TrainingProgress.at_start(6))]
    rates: list[float] = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda optimizer: rates.append(optimizer.param_groups[0]["lr"]))
    student = torch.nn.Linear(1, 1)
    student.device = torch.device("cpu")  # type: ignore[assignment]
    monkeypatch.setattr(twin, "kl_of_rows", lambda _, __, rows: student.weight.sum() * torch.ones(len(rows)))
    rows: list[twin.Row] = [(7, [], [], []), (0, [], [], [])]
    twin.distill(student, None, [4 * rows, 2 * rows, 4 * rows, 2 * rows], 7, 1e-3)
    assert rates == pytest.approx(expected)


def test_main_samples_until_enough_responses_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second response is wrong, so 6 + 3 + 1 are sampled for 6 that are kept."""
    for name, size in {"TRAIN_EXAMPLES": 6, "EVAL_EXAMPLES": 2}.items():
        monkeypatch.setattr(twin, name, size)
    sampled: list[int] = []

    def answer(_model: Any, _tokenizer: Any, examples: list[Any], *_: Any, do_sample: bool, **__: Any) -> list[Any]:
        if do_sample:
            sampled.append(len(examples))
        return [([1], [2], index % 2 == 0) for index in range(len(examples))]

    trained: list[int] = []
    monkeypatch.setattr(twin, "answer", answer)
    monkeypatch.setattr(twin, "distill", lambda student, teacher, batches, *_: trained.extend(map(len, batches)))
    twin.main(**{**twin.DEFAULTS, "documents": 8, "out": str(tmp_path / "out")})  # type: ignore[arg-type]
    assert sampled == [6, 3, 1]
    # Two epochs of two batches, of three examples with K + 1 rows.
    assert trained == [15] * 4


def test_main_ends_in_one_line_if_no_response_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"TRAIN_EXAMPLES": 2, "EVAL_EXAMPLES": 2}.items():
        monkeypatch.setattr(twin, name, size)
    monkeypatch.setattr(
        twin, "answer", lambda _model, _tokenizer, examples, *_, **__: [([1], [2], False)] * len(examples)
    )
    with pytest.raises(SystemExit, match=r"^[^\n]+: no response is correct, so there is nothing to train on$"):
        twin.main(**{**twin.DEFAULTS, "documents": 8, "out": str(tmp_path / "out")})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_make_prompt_equals_that_of_the_pipeline(source: Source) -> None:
    tokenizer = load_tokenizer(source.study.model)
    for example in source.examples:
        record = {
            "question": example.question,
            "documents": [
                {"title": document.title, "text": document.text, "gold": document in example.golds}
                for document in (*example.golds, *example.distractors)
            ],
        }
        for slot in (0, 3, 7):
            expected = source.build.build_prompt(example, 8, (slot,)).tolist()
            assert twin.make_prompt(tokenizer, record, 8, slot) == expected


def test_r1_in_one_file_imports_nothing_of_the_package_and_is_short() -> None:
    text = FILE.read_text()
    assert "import pos2distill" not in text
    assert "from pos2distill" not in text
    assert len(text.splitlines()) <= 150
    assert max(len(line) for line in text.splitlines()) <= 120


def test_main_distils_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few and short prompts."""
    sizes = {"TRAIN_EXAMPLES": 6, "EVAL_EXAMPLES": 4, "EVAL_SLOTS": 2, "K": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(twin, name, size)
    out = tmp_path / "out"
    twin.main(**{**twin.DEFAULTS, "documents": 4, "out": str(out)})  # type: ignore[arg-type]
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("[")]  # DeepSpeed's
    assert lines[0].startswith("before: {0: ")
    assert lines[1] == "kept 6 of 6 responses"
    assert lines[2].startswith("step 1 of 4: loss 0.")
    assert lines[-1].startswith("after: {0: ")
    before, after = (load_model(ModelSection(path=path)).state_dict() for path in (str(TOY / "base"), str(out)))
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)
    assert load_tokenizer(ModelSection(path=str(out))).chat_template
