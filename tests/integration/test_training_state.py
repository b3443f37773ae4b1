"""Training state of ZeRO-3 ranks, loaded at other numbers of ranks and by the other strategy."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pos2distill.config import Recipe, TrainersSection
from pos2distill.models.architecture import torch_dtype
from pos2distill.models.chat import end_of_turn_id
from pos2distill.models.load import load_tokenizer
from pos2distill.models.packing import collate
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.state import StoredState
from pos2distill.training.strategies import build_strategy
from pos2distill.training.strategies.protocol import Strategy
from tests.support.ranks import process_group, run_processes

BATCH = 12  # rows
BEFORE, AFTER, AGAIN = 5, 20, 6  # steps before the state is saved, after it, and after going back to it
CPU = torch.device("cpu")

pytestmark = pytest.mark.xdist_group("compute")


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


def steps(
    strategy: Strategy,
    batches: Sequence[tuple[Any, Any]],
    rank: int = 0,
    world_size: int = 1,
    within: Path | None = None,
) -> list[float]:
    """The global batch's mean loss before each step; every rank computes its part of the rows, in two micro-batches.

    Args:
        within: where to save the state between the first two micro-batches.
    """
    losses: list[float] = []
    start, stop = rank * BATCH // world_size, (rank + 1) * BATCH // world_size
    middle = (start + stop) // 2
    for prompts, responses in batches:
        total = torch.zeros(())
        for rows in (slice(start, middle), slice(middle, stop)):
            loss = strategy.forward(collate(prompts[rows], responses[rows]), None).sum() / BATCH
            is_last = rows.stop == stop
            strategy.backward(loss, last=is_last)
            total += loss.detach()
            if within is not None and not losses and not is_last:
                strategy.save_state(within)
        if world_size > 1:
            torch.distributed.all_reduce(total)
        strategy.step(3e-4)
        losses.append(float(total))
    return losses


# Recipes by name, each with its folder. Ranks are started once for all recipes of a tier.
Jobs = dict[str, tuple[Recipe, Path]]


def rank_of(rank: int, world_size: int, work: Callable[..., Any], jobs: Jobs, rendezvous: str) -> None:
    with process_group(rank, world_size, rendezvous):
        trainers = TrainersSection(strategy="zero3", workers=world_size, gradient_checkpointing=False)
        for recipe, folder in jobs.values():
            # Not kept: as long as a strategy lives, transformers shards every model that is made.
            result = work(
                build_strategy(recipe.study, trainers, CPU, recipe.study.model),
                make_batches(recipe),
                folder,
                rank,
                world_size,
            )
            if rank == 0:
                torch.save(result, folder / f"{work.__name__}-{world_size}.pt")


def on_ranks(world_size: int, work: Callable[..., Any], jobs: Jobs) -> dict[str, Any]:
    """Run `work` for each job on `world_size` ZeRO-3 ranks. Returns the results of rank 0."""
    first_folder = next(iter(jobs.values()))[1]
    run_processes(
        rank_of, world_size, world_size, work, jobs, str(first_folder / f"rendezvous-{work.__name__}-{world_size}")
    )
    return {name: torch.load(folder / f"{work.__name__}-{world_size}.pt") for name, (_, folder) in jobs.items()}


def begin(strategy: Any, batches: Any, folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Save after some steps, and again within the next one, and continue; then load what was saved and repeat."""
    steps(strategy, batches[:BEFORE], rank, world_size)
    strategy.save_state(folder / "state")
    torch.distributed.barrier()
    uninterrupted = steps(strategy, batches[BEFORE:], rank, world_size, within=folder / "within")
    strategy.load_state(StoredState(folder / "state", strategy.state_shapes(), str(folder / "state")))
    if strategy.study.training.lora:
        strategy.save_adapter(folder / "adapter")
    strategy.save(folder / "model")
    return {
        "uninterrupted": uninterrupted,
        "again": steps(strategy, batches[BEFORE : BEFORE + AGAIN], rank, world_size),
    }


def resume(strategy: Any, batches: Any, folder: Path, rank: int, world_size: int) -> list[float]:
    """Continue from the state with a fresh strategy; first save what it has read."""
    strategy.load_state(StoredState(folder / "state", strategy.state_shapes(), str(folder / "state")))
    strategy.save_state(folder / f"copy-{world_size}")
    strategy.save(folder / f"model-{world_size}")
    return steps(strategy, batches[BEFORE:], rank, world_size)


@dataclass(frozen=True)
class Saved:
    """The state of two ranks after `BEFORE` steps, in `folder`, and the losses of the uninterrupted run."""

    recipe: Recipe
    folder: Path
    losses: dict[str, list[float]]


# precision and training.lora
CASES = {
    "float32": ("float32", "null"),
    "bfloat16": ("bfloat16", "null"),
    "lora": ("float32", "{rank: 4}"),
}
TIERS = {"fast": ("float32",), "slow": ("bfloat16", "lora")}
SLOW_BFLOAT16 = pytest.param("bfloat16", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def saved(small_toy: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """`saved(case)`: the state that two ranks have saved. All cases of a tier are made by the same two processes."""

    @functools.cache
    def save_tier(tier: str) -> dict[str, Saved]:
        jobs: Jobs = {}
        for name in TIERS[tier]:
            precision, lora = CASES[name]
            folder = tmp_path_factory.mktemp(name)
            settings = (
                "method.name=seqkd",
                "data.train_examples=300",
                "data.train_candidates=300",
                f"model.dtype={precision}",
            )
            jobs[name] = (
                small_toy(folder, *settings, f"training.precision={precision}", f"training.lora={lora}"),
                folder,
            )
        losses = on_ranks(2, begin, jobs)
        return {name: Saved(recipe, folder, losses[name]) for name, (recipe, folder) in jobs.items()}

    def save(name: str) -> Saved:
        return save_tier("fast" if name in TIERS["fast"] else "slow")[name]

    return save


@pytest.mark.parametrize("case", ["float32", SLOW_BFLOAT16])
def test_load_state_at_the_same_ranks_repeats_the_run_bit_for_bit(saved: Callable[[str], Saved], case: str) -> None:
    state = saved(case)
    assert state.losses["again"] == state.losses["uninterrupted"][:AGAIN]
    assert len(set(state.losses["again"])) == AGAIN
    assert_same_state(state.folder / "state", state.folder / "within")
    assert_computes_with_its_state(state.recipe, state.folder / "model", state.folder / "state")


@pytest.mark.parametrize("world_size", [1, 3])
def test_load_state_at_other_numbers_of_ranks(saved: Callable[[str], Saved], world_size: int) -> None:
    state = saved("float32")
    resumed = on_ranks(world_size, resume, {"float32": (state.recipe, state.folder)})["float32"]
    assert_same_state(state.folder / "state", state.folder / f"copy-{world_size}")
    assert_computes_with_its_state(state.recipe, state.folder / f"model-{world_size}", state.folder / "state")
    assert len(resumed) == AFTER
    assert resumed == pytest.approx(state.losses["uninterrupted"], rel=1e-3)


@pytest.mark.slow
def test_load_state_of_adapters_at_another_number_of_ranks_and_in_one_process(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    state = saved("lora")
    recipe, folder, losses = state.recipe, state.folder, state.losses
    assert losses["again"] == losses["uninterrupted"][:AGAIN]
    assert all(".lora_" in key for key in tensors(folder / "state"))
    assert_same_state(folder / "state", folder / "within")
    resumed = on_ranks(3, resume, {"lora": (recipe, folder)})["lora"]
    assert_same_state(folder / "state", folder / "copy-3")
    assert resumed == pytest.approx(losses["uninterrupted"], rel=1e-3)
    alone = build_strategy(
        recipe.study, TrainersSection(strategy="torch", gradient_checkpointing=False), CPU, recipe.study.model
    )
    alone.load_state(StoredState(folder / "state", alone.state_shapes(), str(folder / "state")))
    alone.save_adapter(tmp_path / "adapter")
    # Both read the same state, so that the adapters of two ranks must be these bit for bit.
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (folder / "adapter" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()
    alone.save(tmp_path)
    exports = [load_file(each / "model.safetensors") for each in (tmp_path, folder / "model-3")]
    assert (
        exports[0].keys() == exports[1].keys() == load_file(Path(recipe.study.model.path) / "model.safetensors").keys()
    )
    for name, weight in exports[0].items():
        torch.testing.assert_close(exports[1][name], weight, rtol=0, atol=1e-6)
    alone.load_state(StoredState(folder / "state", alone.state_shapes(), str(folder / "state")))
    assert steps(alone, make_batches(recipe)[BEFORE:]) == pytest.approx(losses["uninterrupted"], rel=1e-3)


@pytest.mark.parametrize(
    ("case", "tolerance"), [("float32", 1e-3), pytest.param("bfloat16", 0.05, marks=pytest.mark.slow)]
)
def test_load_state_by_the_other_strategy(
    saved: Callable[[str], Saved], tmp_path: Path, case: str, tolerance: float
) -> None:
    """In bf16 one strategy rounds weights and the other, under autocast, products: the same state, similar losses."""
    state = saved(case)
    trainers = TrainersSection(strategy="torch", gradient_checkpointing=False)
    strategy = build_strategy(state.recipe.study, trainers, CPU, state.recipe.study.model)
    strategy.load_state(StoredState(state.folder / "state", strategy.state_shapes(), str(state.folder / "state")))
    strategy.save_state(tmp_path)
    assert_same_state(state.folder / "state", tmp_path)
    resumed = steps(strategy, make_batches(state.recipe)[BEFORE:])
    assert resumed == pytest.approx(state.losses["uninterrupted"], rel=tolerance)


def assert_same_state(one: Path, other: Path) -> None:
    expected, found = tensors(one), tensors(other)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
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
