"""What training says where a GPU's memory does not hold it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pos2distill.config import Recipe, Study, TrainersSection
from pos2distill.errors import MachineError, UserError
from pos2distill.training.memory import translate_model_oom_error, translate_step_oom_error

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def study(make_recipe: Callable[..., Recipe]) -> Study:
    return make_recipe().study


def micro_batches(*rows: int) -> list[Any]:
    """Of so many rows of 7 tokens each."""
    return [
        SimpleNamespace(rows=range(count), batch=SimpleNamespace(packed=SimpleNamespace(query_lengths=[7] * count)))
        for count in rows
    ]


def trainers(**settings: Any) -> TrainersSection:
    return TrainersSection.model_validate({"micro_batch_tokens": 40, **settings})


@pytest.mark.parametrize(
    ("settings", "rows", "message"),
    [
        (
            {},
            (2, 3),
            "21 tokens; lower runtime.trainers.micro_batch_tokens (40), use more workers (runtime.trainers.workers) or "
            "train adapters (training.lora); the same command continues",
        ),
        (
            {"strategy": "torch", "gradient_checkpointing": False},
            (1, 1),
            "7 tokens; lower data.documents, set runtime.trainers.gradient_checkpointing to true, set "
            "runtime.trainers.strategy to zero3 with more workers or train adapters (training.lora); the same command "
            "continues",
        ),
    ],
)
def test_lack_of_memory_in_a_step_names_what_would_help(
    study: Study, settings: dict[str, Any], rows: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError) as caught:  # noqa: SIM117
        with translate_step_oom_error(study, trainers(**settings), micro_batches(*rows), 1, is_first=True):
            raise FULL
    before = "training: the memory of a GPU does not hold a step, whose largest micro-batch has "
    assert str(caught.value) == before + message
    assert not isinstance(caught.value, MachineError)


def test_lack_of_memory_in_a_later_step_may_pass(study: Study) -> None:
    with pytest.raises(MachineError):  # noqa: SIM117
        with translate_step_oom_error(study, trainers(), micro_batches(1), 1, is_first=False):
            raise torch.AcceleratorError("CUDA error: out of memory", 2)


def test_lack_of_memory_for_the_model_names_what_would_help(make_recipe: Callable[..., Recipe]) -> None:
    study = make_recipe(training={"lora": {"rank": 2}}).study
    with pytest.raises(UserError) as caught:  # noqa: SIM117
        with translate_model_oom_error(study, trainers(), 1):
            raise FULL
    assert str(caught.value) == (
        "training: the memory of a GPU does not hold the model and its optimizer; use more workers "
        "(runtime.trainers.workers)"
    )
    assert not isinstance(caught.value, MachineError)


@pytest.mark.parametrize(("workers", "may_pass"), [(4, True), (8, False)])
def test_lack_of_memory_may_pass_where_elastic_training_may_get_more_workers(
    study: Study, workers: int, may_pass: bool
) -> None:
    """After the loss of a node it continues with fewer, which divide the model."""
    elastic = trainers(workers=4, max_workers=8)
    with pytest.raises(UserError) as caught:  # noqa: SIM117
        with translate_model_oom_error(study, elastic, workers):
            raise FULL
    assert isinstance(caught.value, MachineError) == may_pass
    with pytest.raises(UserError) as caught:  # noqa: SIM117
        with translate_step_oom_error(study, elastic, micro_batches(1), workers, is_first=True):
            raise FULL
    assert isinstance(caught.value, MachineError) == may_pass


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), torch.AcceleratorError("CUDA error: assert", 710)])
def test_other_errors_stay_as_they_are(study: Study, error: RuntimeError) -> None:
    with pytest.raises(type(error)) as caught:  # noqa: SIM117
        with translate_step_oom_error(study, trainers(), micro_batches(1), 1, is_first=True):
            raise error
    assert caught.value is error
    with pytest.raises(type(error)) as caught:  # noqa: SIM117
        with translate_model_oom_error(study, trainers(), 1):
            raise error
    assert caught.value is error
