"""One training step of each strategy on a GPU, against the torch strategy on a CPU in float32."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pos2distill.config import Recipe, Study, TrainersSection
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.training.strategies import build_strategy
from tests.support.ranks import process_group, run_processes

DEVICE = "cuda"


def make_batch() -> ResponseBatch:
    """Rows of two examples; those of the first begin alike."""
    random = np.random.default_rng(0)
    documents, *endings = (random.integers(5, 250, size).astype(np.int32) for size in (200, 60, 50, 170))
    responses = [random.integers(5, 250, size).astype(np.int32) for size in (14, 9, 5)]
    prompts = [np.concatenate([documents, endings[0]]), np.concatenate([documents, endings[1]]), endings[2]]
    return collate(prompts, responses, group_ids=[0, 0, 1])


def one_step(study: Study, name: str, device: str) -> tuple[Tensor, float]:
    """Row losses, and the gradient's norm."""
    trainers = TrainersSection.model_validate({"strategy": name})
    strategy = build_strategy(study, trainers, torch.device(device), study.model)
    loss_B = strategy.forward(make_batch(), None)
    strategy.backward(loss_B.mean(), last=True)
    return loss_B.detach().float().cpu(), strategy.step(1e-3)


def zero3_rank(rank: int, study: Study, rendezvous: str, out: str) -> None:
    with process_group(rank, 1, rendezvous, backend="nccl" if DEVICE == "cuda" else "gloo"):
        torch.save(one_step(study, "zero3", DEVICE), out)


@pytest.fixture
def on_the_gpu(tmp_path: Path) -> Callable[[Study, str], tuple[Tensor, float]]:
    """`on_the_gpu(study, strategy)`: a step; of zero3 in a process of its own."""

    def run(study: Study, strategy: str) -> tuple[Tensor, float]:
        if strategy == "torch":
            return one_step(study, strategy, DEVICE)
        run_processes(zero3_rank, 1, study, str(tmp_path / "rendezvous"), str(tmp_path / "step.pt"))
        found: tuple[Tensor, float] = torch.load(tmp_path / "step.pt")
        return found

    return run


def study_of(make_recipe: Callable[..., Recipe], precision: str) -> Study:
    return make_recipe(model={"dtype": precision}, method={"name": "seqkd"}, training={"precision": precision}).study


@pytest.mark.parametrize("strategy", ["torch", "zero3"])
def test_strategy_step_in_float32_equals_that_of_a_cpu(
    make_recipe: Callable[..., Recipe], on_the_gpu: Callable[[Study, str], tuple[Tensor, float]], strategy: str
) -> None:
    study = study_of(make_recipe, "float32")
    loss_B, norm = on_the_gpu(study, strategy)
    expected_B, expected_norm = one_step(study, "torch", "cpu")
    torch.testing.assert_close(loss_B, expected_B, rtol=1e-5, atol=0)
    assert norm == pytest.approx(expected_norm, rel=1e-4)


@pytest.mark.parametrize("strategy", ["torch", "zero3"])
def test_strategy_step_in_bfloat16_errs_at_most_twice_as_much_as_on_a_cpu(
    make_recipe: Callable[..., Recipe], on_the_gpu: Callable[[Study, str], tuple[Tensor, float]], strategy: str
) -> None:
    exact_B, exact_norm = one_step(study_of(make_recipe, "float32"), "torch", "cpu")
    study = study_of(make_recipe, "bfloat16")
    plain_B, _ = one_step(study, "torch", "cpu")
    loss_B, norm = on_the_gpu(study, strategy)
    assert 0 < (loss_B - exact_B).norm() <= 2 * (plain_B - exact_B).norm()
    assert norm == pytest.approx(exact_norm, rel=0.05)
