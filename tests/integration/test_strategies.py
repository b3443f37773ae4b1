"""zero3 and torch: one loss, one gradient, one curve, however the global batch is cut."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.dist import process_group, run_ranks

from pipelines.executors.ray.train_worker import make_prompt_builder
from pipelines.plan import make_plan
from pipelines.stages.distill import make_checkpoint, read_steps
from pipelines.stages.prepare import training_ids
from pos2distill.config import MethodSection, Recipe
from pos2distill.models.load import non_persistent_buffers
from pos2distill.store.samples import SampleStore
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import Batch, BatchLoader, TrainingProgress
from pos2distill.training.loop import train
from pos2distill.training.rows import RowBuilder
from pos2distill.training.strategies import build_strategy
from pos2distill.training.strategies.protocol import Strategy
from pos2distill.training.student import trainable
from pos2distill.training.teachers import build_teacher
from tests.unit.conftest import no_stream

# 20 documents, where the KL is far from zero, and a rate at which fp32 rounding does not grow from step to step.
STEPS = [
    *(
        "training.epochs=4",
        "training.learning_rate=1e-4",
        "training.global_batch_rows=32",
        "runtime.trainers.micro_batch_tokens=100000",
    ),
    *("model.dtype=float32", "data.documents=20"),
]


def steps_of(recipe: Recipe) -> list[dict[str, Any]]:
    make_checkpoint(recipe, make_plan(recipe))
    return read_steps(make_plan(recipe))


@pytest.fixture(scope="module")
def sampled(small_toy: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with fp32 samples and no checkpoint."""
    from pipelines.commands import run_sample

    storage = tmp_path_factory.mktemp("sampled")
    run_sample(small_toy(storage, *STEPS))
    return storage


def test_zero3_on_two_workers_gives_the_curve_of_torch_on_one(
    small_toy: Callable[..., Recipe], sampled: Path, tmp_path: Path
) -> None:
    short = (
        *STEPS,
        "training.epochs=2",
        "training.global_batch_rows=15",
    )  # 8 rows on one worker, 7 and a filler on the other
    two_workers = ("strategy=zero3", "workers=2", "micro_batch_tokens=1000", "threads=1", "gradient_checkpointing=true")
    curves = {}
    for name, settings in {"torch": ("strategy=torch",), "zero3": two_workers}.items():
        storage = tmp_path / name
        shutil.copytree(sampled, storage)
        curves[name] = steps_of(small_toy(storage, *short, *(f"runtime.trainers.{item}" for item in settings)))
    assert len(curves["torch"]) == len(curves["zero3"]) >= 20
    for reference, step in zip(curves["torch"], curves["zero3"], strict=True):
        for field in ("loss", "loss_trivial", "grad_norm"):
            assert step[field] == pytest.approx(reference[field], rel=1e-4), (field, step["step"])


def test_the_samplers_likeliest_tokens_give_the_curve_of_the_exact_teacher(
    small_toy: Callable[..., Recipe], sampled: Path, tmp_path: Path
) -> None:
    """64 of the toy's 197 tokens hold nearly all of its probability. They are sampled here, streamed into training.

    The first losses are of one student, and differ by what the bound leaves out; later ones also by where it went.
    """
    curves = {}
    for teacher in ("cached", "topk"):
        shutil.copytree(sampled, tmp_path / teacher)
        settings = (f"method.teacher={teacher}", "training.order=fixed", "runtime.trainers.strategy=torch")
        curves[teacher] = steps_of(small_toy(tmp_path / teacher, *STEPS, "training.epochs=1", *settings))
    (first, *_), (bound, *_) = curves["cached"], curves["topk"]
    assert bound["loss"] == pytest.approx(first["loss"], rel=1e-3)
    assert bound["loss"] <= first["loss"] * (1 + 1e-6)
    for exact, step in zip(curves["cached"], curves["topk"], strict=True):
        assert step["examples"] == exact["examples"]
        assert step["loss"] == pytest.approx(exact["loss"], abs=1e-2 * first["loss"]), step["step"]


METHODS: list[dict[str, Any]] = [
    {"teacher": "cached"},
    {"teacher": "resident"},
    {"name": "r2", "weights": "adaptive"},
    {"name": "seqkd"},
]


@pytest.mark.parametrize(
    ("method", "lora"),
    [*((method, "null") for method in METHODS), *((method, "{rank: 4}") for method in METHODS[:2])],
    ids=lambda each: "-".join(each.values()) if isinstance(each, dict) else each,
)
def test_loss_and_gradient_of_two_zero3_ranks_equal_one_torch_process(
    small_toy: Callable[..., Recipe], sampled: Path, tmp_path: Path, method: dict[str, str], lora: str
) -> None:
    recipe = small_toy(sampled, *STEPS, f"training.lora={lora}")
    reference = first_gradient(
        recipe, method | {"teacher": "cached"}, DistContext(), "torch", micro_batch_tokens=100000
    )
    out = tmp_path / "gradient.pt"
    # 2 dist x 15 rows, in micro-batches that cut examples
    run_ranks(zero3_rank, 2, recipe, method, str(tmp_path / "rendezvous"), str(out))
    cut = torch.load(out)
    assert cut["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert set(cut["gradients"]) == set(reference["gradients"])
    scale = max(gradient.abs().max() for gradient in reference["gradients"].values())
    for name, gradient in reference["gradients"].items():
        assert (cut["gradients"][name] - gradient).abs().max() <= 1e-5 * scale, name


def test_bf16_zero3_errs_at_most_twice_as_much_as_plain_bf16(
    small_toy: Callable[..., Recipe], sampled: Path, tmp_path: Path
) -> None:
    """The reference: the same weights cast to bf16 in plain torch. 20 examples: fewer are a draw of their roundings."""
    recipe = small_toy(sampled, *STEPS, "training.global_batch_rows=120")
    exact = first_gradient(recipe, {}, DistContext(), "torch", micro_batch_tokens=100000)["gradients"]
    training = recipe.study.training.model_copy(update={"precision": "bfloat16"})
    recipe = recipe.model_copy(update={"study": recipe.study.model_copy(update={"training": training})})
    plain_bf16 = first_gradient(recipe, {}, DistContext(), "torch", micro_batch_tokens=100000, cast=True)["gradients"]
    out = tmp_path / "gradient.pt"
    run_ranks(zero3_rank, 2, recipe, {}, str(tmp_path / "rendezvous"), str(out))
    zero3_bf16 = torch.load(out)["gradients"]

    def error(gradients: dict[str, torch.Tensor]) -> float:
        return sum(float((gradients[name] - exact[name]).square().sum()) for name in exact) ** 0.5

    assert 0 < error(zero3_bf16) <= 2 * error(plain_bf16)


def test_zero3_in_bf16_keeps_the_frequencies_of_rope_exact(small_toy: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = small_toy(tmp_path, "training.precision=bfloat16", "method.teacher=resident", "model.dtype=bfloat16")
    out = tmp_path / "buffers.pt"
    run_ranks(buffers_rank, 1, recipe, str(tmp_path / "rendezvous"), str(out))
    exact = non_persistent_buffers(recipe.study.model, torch.float32)
    assert {"model.rotary_emb.inv_freq"} <= exact.keys()
    for buffers in torch.load(out):
        for name, buffer in exact.items():
            torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0)


class Inspected:
    """A strategy that keeps its gradients instead of using them."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.gradients: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, learning_rate: float) -> float:
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in trainable(self.inner.student.lm).items():
            self.gradients[name] = safe_get_full_grad(parameter).float().cpu().clone()
        return 0.0


class FirstBatch(BatchLoader):
    """The first global batch alone."""

    def batches(self, progress: TrainingProgress) -> Iterator[Batch]:
        yield next(super().batches(progress))


def first_gradient(
    recipe: Recipe,
    changes: dict[str, str],
    dist: DistContext,
    strategy: str,
    micro_batch_tokens: int,
    *,
    cast: bool = False,
) -> dict[str, Any]:
    """Of the recipe's samples, with a method that may need less of them than they hold."""
    resolved = {"weights", "anchor_weight", "teacher", "teacher_topk"}  # by the recipe's own method
    method = MethodSection(**recipe.study.method.model_dump(exclude=resolved) | changes)
    training = recipe.study.training.model_copy(update={"epochs": 1})
    study = recipe.study.model_copy(update={"method": method, "training": training})
    update = {"strategy": strategy, "workers": dist.world, "micro_batch_tokens": micro_batch_tokens, "threads": 1}
    trainers = recipe.runtime.trainers.model_copy(update=update)
    strategy = Inspected(build_strategy(study, trainers, torch.device("cpu")))
    if cast:
        for parameter in strategy.student.lm.parameters():
            parameter.data = parameter.data.bfloat16()
    plan = make_plan(recipe)
    ids = training_ids(plan)
    loader = FirstBatch(study, ids, SampleStore(plan.samples), no_stream, dist)
    build = RowBuilder(make_prompt_builder(study), study)
    teacher = build_teacher(study, strategy.frozen_states, torch.device("cpu"))
    records = []
    train(
        study, trainers, loader, build, strategy, teacher, dist, TrainingProgress.at_start(len(ids)), [records.append]
    )
    return {"loss": records[0].loss, "gradients": strategy.gradients}


def buffers_rank(rank: int, recipe: Recipe, rendezvous: str, out: str) -> None:
    """Of the student and of the resident teacher."""
    with process_group(rank, 1, rendezvous):
        trainers = recipe.runtime.trainers.model_copy(update={"strategy": "zero3"})
        strategy: Any = build_strategy(recipe.study, trainers, torch.device("cpu"))
        torch.save([dict(lm.named_buffers()) for lm in (strategy.student.lm, strategy.frozen.module.lm)], out)


def zero3_rank(rank: int, recipe: Recipe, changes: dict[str, str], rendezvous: str, out: str) -> None:
    with process_group(rank, 2, rendezvous):
        result = first_gradient(recipe, changes, DistContext(rank, 2), "zero3", micro_batch_tokens=1500)
        if rank == 0:
            torch.save(result, out)
