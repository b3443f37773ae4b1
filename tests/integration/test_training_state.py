"""Training state of ZeRO-3 dist, loaded at other numbers of ranks and by the other strategy."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.integration.dist import process_group, run_ranks

from pos2distill.config import Recipe, TrainersSection
from pos2distill.models.chat import end_of_turn_id
from pos2distill.models.load import load_tokenizer, torch_dtype
from pos2distill.models.packing import collate
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.strategies import build_strategy
from pos2distill.training.strategies.protocol import Strategy

BATCH = 12  # rows
BEFORE, AFTER, AGAIN = 5, 20, 6  # steps before the state is saved, after it, and after going back to it
CPU = torch.device("cpu")


def make_batches(recipe: Recipe) -> list[tuple[Any, Any]]:
    """(prompts, responses) of each step: the data set's answers, gold document anywhere."""
    study = recipe.study
    tokenizer = load_tokenizer(study.model)
    build = PromptBuilder(tokenizer, study.data.prompt, max_length=1024, reserve=16)
    examples = load_split(study.data, documents=8, seed=0).train
    after = AFTER if study.training.precision == "float32" else AGAIN  # the full length is shown once
    chosen = [examples[index % len(examples)] for index in range(BATCH * (BEFORE + after))]
    prompts = [build(example, 8, (index % 8,)) for index, example in enumerate(chosen)]
    end = end_of_turn_id(tokenizer)
    responses = [np.asarray([*tokenizer(each.answers[0])["input_ids"], end], np.int32) for each in chosen]
    return [(prompts[at : at + BATCH], responses[at : at + BATCH]) for at in range(0, len(chosen), BATCH)]


def steps(strategy: Strategy, batches: Sequence[tuple[Any, Any]], rank: int = 0, world: int = 1) -> list[float]:
    """The global batch's mean loss before each step; every rank works on its share."""
    losses = []
    own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    for prompts, responses in batches:
        loss = strategy.forward(collate(prompts[own], responses[own]), None).sum() / BATCH
        strategy.backward(loss, last=True)
        total = loss.detach()
        if world > 1:
            torch.distributed.all_reduce(total)
        strategy.step(3e-4)
        losses.append(float(total))
    return losses


def rank_of(rank: int, world: int, work: Callable[..., Any], recipe: Recipe, folder: str) -> None:
    with process_group(rank, world, f"{folder}/{work.__name__}-{world}"):
        trainers = TrainersSection(strategy="zero3", workers=world, gradient_checkpointing=False)
        result = work(build_strategy(recipe.study, trainers, CPU), make_batches(recipe), Path(folder), rank, world)
        if rank == 0:
            torch.save(result, f"{folder}/{work.__name__}-{world}.pt")


def on_ranks(world: int, work: Callable[..., Any], recipe: Recipe, folder: Path) -> Any:
    """`work(strategy, batches, folder, rank, world)` on so many ZeRO-3 dist, each a process: rank 0's result."""
    run_ranks(rank_of, world, world, work, recipe, str(folder))
    return torch.load(f"{folder}/{work.__name__}-{world}.pt")


def begin(strategy: Any, batches: Any, folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Save after some steps and go on; then go back to what was saved and do it again."""
    steps(strategy, batches[:BEFORE], rank, world)
    strategy.save_state(folder / "state")
    torch.distributed.barrier()
    uninterrupted = steps(strategy, batches[BEFORE:], rank, world)
    strategy.load_state(folder / "state")
    strategy.save(folder / "model")
    return {"uninterrupted": uninterrupted, "again": steps(strategy, batches[BEFORE : BEFORE + AGAIN], rank, world)}


def resume(strategy: Any, batches: Any, folder: Path, rank: int, world: int) -> list[float]:
    """A fresh strategy goes on from the state; what it has read is saved beforehand."""
    strategy.load_state(folder / "state")
    strategy.save_state(folder / f"copy-{world}")
    strategy.save(folder / f"model-{world}")
    return steps(strategy, batches[BEFORE:], rank, world)


Saved = tuple[Recipe, Path, dict[str, list[float]]]


@pytest.fixture(scope="module")
def saved(small_toy: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """`saved(precision, lora)`: the state of two dist after `BEFORE` steps, and the uninterrupted run's losses."""

    @functools.cache
    def save(precision: str, lora: str = "null") -> Saved:
        folder = tmp_path_factory.mktemp("saved")
        settings = ("method.name=seqkd", "data.train_examples=300", "model.dtype=" + precision)
        recipe = small_toy(folder, *settings, f"training.precision={precision}", f"training.lora={lora}")
        return recipe, folder, on_ranks(2, begin, recipe, folder)

    return save


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_same_ranks_repeat_the_run_bit_for_bit(saved: Callable[[str], Saved], precision: str) -> None:
    recipe, folder, losses = saved(precision)
    assert losses["again"] == losses["uninterrupted"][:AGAIN]
    assert len(set(losses["again"])) == AGAIN
    assert_computes_with_its_state(recipe, folder / "model", folder / "state")


@pytest.mark.parametrize("world", [1, 3])
def test_other_numbers_of_ranks_go_on(saved: Callable[[str], Saved], world: int) -> None:
    recipe, folder, losses = saved("float32")
    resumed = on_ranks(world, resume, recipe, folder)
    assert_same_state(folder / "state", folder / f"copy-{world}")
    assert_computes_with_its_state(recipe, folder / f"model-{world}", folder / "state")
    assert len(resumed) == AFTER
    assert resumed == pytest.approx(losses["uninterrupted"], rel=1e-3)


def test_adapters_go_on_at_another_number_of_ranks_and_in_one_process(
    saved: Callable[..., Saved], tmp_path: Path
) -> None:
    recipe, folder, losses = saved("float32", "{rank: 4}")
    assert losses["again"] == losses["uninterrupted"][:AGAIN]
    assert all(".lora_" in key for key in tensors(folder / "state"))
    resumed = on_ranks(3, resume, recipe, folder)
    assert_same_state(folder / "state", folder / "copy-3")
    assert resumed == pytest.approx(losses["uninterrupted"], rel=1e-3)
    alone = build_strategy(recipe.study, TrainersSection(strategy="torch", gradient_checkpointing=False), CPU)
    alone.load_state(folder / "state")
    alone.save(tmp_path)
    exports = [load_file(each / "model.safetensors") for each in (tmp_path, folder / "model-3")]
    assert (
        exports[0].keys() == exports[1].keys() == load_file(Path(recipe.study.model.path) / "model.safetensors").keys()
    )
    for name, weight in exports[0].items():
        torch.testing.assert_close(exports[1][name], weight, rtol=0, atol=1e-6)
    alone.load_state(folder / "state")
    assert steps(alone, make_batches(recipe)[BEFORE:]) == pytest.approx(losses["uninterrupted"], rel=1e-3)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_the_other_strategy_goes_on(
    saved: Callable[[str], Saved], tmp_path: Path, precision: str, tolerance: float
) -> None:
    """In bf16 one strategy rounds weights and the other, under autocast, products: the same state, near losses."""
    recipe, folder, losses = saved(precision)
    strategy = build_strategy(recipe.study, TrainersSection(strategy="torch", gradient_checkpointing=False), CPU)
    strategy.load_state(folder / "state")
    strategy.save_state(tmp_path)
    assert_same_state(folder / "state", tmp_path)
    resumed = steps(strategy, make_batches(recipe)[BEFORE:])
    assert resumed == pytest.approx(losses["uninterrupted"], rel=tolerance)


def assert_same_state(one: Path, other: Path) -> None:
    want, got = tensors(one), tensors(other)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)
    counts = [json.loads((folder / "state.json").read_text())["adam_step"] for folder in (one, other)]
    assert counts == [BEFORE, BEFORE]


def assert_computes_with_its_state(recipe: Recipe, model: Path, state: Path) -> None:
    """The weights of a forward pass are the stored ones, rounded."""
    stored, dtype = tensors(state), torch_dtype(recipe.study.training.precision)
    weights = load_file(model / "model.safetensors")
    assert len(weights) * 3 == len(stored)
    assert all(torch.equal(weight, stored[f"weight/{name}"].to(dtype)) for name, weight in weights.items())


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in folder.glob("state-*") for key, tensor in load_file(path).items()}
