"""Strategies zero3 and torch: equal losses, gradients and curves, however the global batch is split."""

import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from pos2distill.config import ModelSection, Recipe
from pos2distill.models.architecture import non_persistent_buffers
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.batches import Batch
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import BatchLoader
from pos2distill.training.loop import TrainingLoop
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.rows import RowBuilder
from pos2distill.training.state import StoredState
from pos2distill.training.strategies import build_strategy
from pos2distill.training.strategies.protocol import Strategy
from pos2distill.training.student import trainable
from pos2distill.training.teachers import build_teacher
from scripts.model_families import save_tiny
from tests.support.commands import run_distill, run_sample
from tests.support.experts import mixture_in_bfloat16, tensors_of
from tests.support.hub_server import COMMIT
from tests.support.ranks import process_group, run_processes
from tests.support.results import artifact_of, read_steps, training_ids
from tests.support.samples import no_stream
from tests.support.toy import LOCAL
from tests.support.training import train_to_end

pytestmark = pytest.mark.xdist_group("compute")

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
    run_distill(recipe)
    return read_steps(recipe)


@pytest.fixture(scope="module")
def sampled(small_toy: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with fp32 samples and no checkpoint."""
    storage = tmp_path_factory.mktemp("sampled")
    run_sample(small_toy(storage, *STEPS, LOCAL))
    return storage


@pytest.mark.slow
def test_two_workers_give_the_curve_of_one(
    local_ray: None, small_toy: Callable[..., Recipe], sampled: Path, tmp_path: Path
) -> None:
    # 8 rows on one worker, 7 and a padding row on the other.
    short = (*STEPS, "training.epochs=2", "training.global_batch_rows=15")
    two_workers = ("workers=2", "micro_batch_tokens=1000", "threads=1", "gradient_checkpointing=true")
    runs = {
        "one": ("strategy=torch",),
        "zero3": ("strategy=zero3", *two_workers),
        "torch": ("strategy=torch", *two_workers),
    }
    curves = {}
    for name, settings in runs.items():
        storage = tmp_path / name
        shutil.copytree(sampled, storage)
        curves[name] = steps_of(small_toy(storage, *short, *(f"runtime.trainers.{item}" for item in settings)))
    assert len(curves["one"]) >= 20
    # In many steps the loss is 4e-5 nats. Rounding is then a larger part of it than elsewhere, and depends on the
    # processor: on an AMD Zen 4, 6e-5 of such a loss and 1.1e-4 of its gradient's norm of .0065, but at most 4e-5 where
    # the loss is above .001. So the smallest values have a floor.
    floors = {"loss": 1e-8, "loss_trivial": 1e-8, "grad_norm": 2e-6}
    for name in ("zero3", "torch"):
        for reference, step in zip(curves["one"], curves[name], strict=True):
            for field, floor in floors.items():
                expected = pytest.approx(reference[field], rel=1e-4, abs=floor)
                assert step[field] == expected, (name, field, step["step"])


@pytest.mark.slow
def test_top_k_teacher_gives_the_curve_of_the_exact_teacher(
    small_toy: Callable[..., Recipe], sampled: Path, tmp_path: Path
) -> None:
    """64 of the toy's 197 tokens hold nearly all of its probability. They are sampled here, streamed into training.

    The first losses are those of one student, and differ by the probability that the bound leaves out; later losses
    also depend on how the students have diverged.
    """
    curves = {}
    for teacher in ("cached", "topk"):
        shutil.copytree(sampled, tmp_path / teacher)
        settings = (LOCAL, f"method.teacher={teacher}", "training.order=fixed", "runtime.trainers.strategy=torch")
        curves[teacher] = steps_of(small_toy(tmp_path / teacher, *STEPS, "training.epochs=1", *settings))
    (first, *_), (bound, *_) = curves["cached"], curves["topk"]
    assert bound["loss"] == pytest.approx(first["loss"], rel=1e-3)
    assert bound["loss"] <= first["loss"] * (1 + 1e-6)
    for exact, step in zip(curves["cached"], curves["topk"], strict=True):
        assert step["examples"] == exact["examples"]
        assert step["loss"] == pytest.approx(exact["loss"], abs=1e-2 * first["loss"]), step["step"]


# Changes to the section `method` and `training.lora` of the recipe whose first step is compared.
Case = tuple[Mapping[str, str], str]

FAST: dict[str, Case] = {
    "r1-cached": ({"teacher": "cached"}, "null"),
    "r1-resident-lora": ({"teacher": "resident"}, "{rank: 4}"),
    "r2-adaptive": ({"name": "r2", "weights": "adaptive"}, "null"),
}
SLOW: dict[str, Case] = {
    "r1-resident": ({"teacher": "resident"}, "null"),
    "r1-cached-lora": ({"teacher": "cached"}, "{rank: 4}"),
    "seqkd": ({"name": "seqkd"}, "null"),
    **{f"seqkd-{view}": ({"name": "seqkd", "view": view}, "null") for view in ("skip", "cyclic", "pose")},
}
CASES = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@dataclass(frozen=True)
class Samples:
    """The samples of the fixture `sampled`: ids of the training examples in order, and where their samples are."""

    ids: pa.Array
    artifact: Artifact


Job = tuple[Callable[[Recipe, Samples, DistContext], Any], Recipe]
Zero3Results = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def base(small_toy: Callable[..., Recipe], sampled: Path) -> Recipe:
    return small_toy(sampled, *STEPS)


@pytest.fixture(scope="module")
def samples(base: Recipe) -> Samples:
    return Samples(training_ids(base), artifact_of(base, "sample"))


def with_sections(recipe: Recipe, **sections: Mapping[str, Any]) -> Recipe:
    """The recipe with settings of its study changed, by section."""
    changed = {name: getattr(recipe.study, name).model_copy(update=dict(each)) for name, each in sections.items()}
    return recipe.model_copy(update={"study": recipe.study.model_copy(update=changed)})


def recipe_of_case(small_toy: Callable[..., Recipe], sampled: Path, case: Case) -> Recipe:
    method, lora = case
    settings = [f"method.{name}={value}" for name, value in method.items()]
    return small_toy(sampled, *STEPS, f"training.lora={lora}", *settings)


@pytest.fixture(scope="module")
def bf16_recipe(small_toy: Callable[..., Recipe], sampled: Path) -> Recipe:
    """20 examples: the error of fewer depends too much on single roundings."""
    return small_toy(sampled, *STEPS, "training.global_batch_rows=120")


@pytest.fixture(scope="module")
def rope_recipe(small_toy: Callable[..., Recipe], sampled: Path) -> Recipe:
    return small_toy(sampled, "training.precision=bfloat16", "method.teacher=resident", "model.dtype=bfloat16")


@pytest.fixture(scope="module")
def zero3_results(
    small_toy: Callable[..., Recipe],
    sampled: Path,
    samples: Samples,
    bf16_recipe: Recipe,
    rope_recipe: Recipe,
    tmp_path_factory: pytest.TempPathFactory,
) -> Zero3Results:
    """`zero3_results(tier)`: the results of rank 0 of two, which are started once and run all cases of the tier."""

    @functools.cache
    def run(tier: str) -> dict[str, Any]:
        cases = FAST if tier == "fast" else SLOW
        jobs: dict[str, Job] = {
            name: (first_step_of_zero3, recipe_of_case(small_toy, sampled, case)) for name, case in cases.items()
        }
        if tier == "slow":
            jobs["bfloat16"] = (first_step_of_zero3, with_sections(bf16_recipe, training={"precision": "bfloat16"}))
            jobs["buffers"] = (model_buffers, rope_recipe)
        folder = tmp_path_factory.mktemp("zero3")
        run_processes(run_jobs, 2, jobs, samples, str(folder))
        return dict(torch.load(folder / "results.pt"))

    return run


def test_torch_with_adapters_on_two_ranks_trains_and_saves_as_on_one(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Each rank computes some of the rows; the state is in files of both, and resumes on any number of ranks."""
    recipe = make_recipe(method={"name": "seqkd"}, training={"lora": {"rank": 4}, "learning_rate": 1e-2})
    run_processes(adapters_by_torch, 2, recipe, str(tmp_path / "two"))
    adapters_by_torch(0, recipe, str(tmp_path / "one"))
    for folder in ("exported", "adapter", "exported again"):
        one, two = (load_file(*(tmp_path / ranks / folder).glob("*.safetensors")) for ranks in ("one", "two"))
        assert one.keys() == two.keys()
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)
    assert len(list((tmp_path / "two" / "state").glob("*.safetensors"))) == 2


def adapters_by_torch(rank: int, recipe: Recipe, folder: str) -> None:
    """Two steps of 8 rows divided between the ranks, saved; then one more from the saved state, in a new strategy."""
    world_size = 2 if folder.endswith("two") else 1
    with process_group(rank, 2, f"{folder}-rendezvous") if world_size == 2 else contextlib.nullcontext():
        trainers = recipe.runtime.trainers.model_copy(update={"strategy": "torch", "workers": world_size})

        def begin() -> Strategy:
            return build_strategy(recipe.study, trainers, torch.device("cpu"), recipe.study.model)

        def train(strategy: Strategy, steps: range) -> None:
            for step in steps:
                for row in range(rank, 8, world_size):
                    loss_B = strategy.forward(collate_row(8 * step + row), None)
                    strategy.backward(loss_B.sum() / 8, last=row + world_size >= 8)
                strategy.step(1e-2)

        strategy = begin()
        train(strategy, range(2))
        strategy.save_state(Path(folder, "state"))
        strategy.save_adapter(Path(folder, "adapter"))
        strategy.save(Path(folder, "exported"))
        if world_size == 2:
            torch.distributed.barrier()
        strategy = begin()
        strategy.load_state(StoredState(Path(folder, "state"), strategy.state_shapes(), folder))
        train(strategy, range(2, 3))
        strategy.save(Path(folder, "exported again"))


def collate_row(seed: int) -> ResponseBatch:
    generator = np.random.default_rng(seed)
    prompt, response = (generator.integers(5, 250, size).astype(np.int32) for size in (12, 4))
    return collate([prompt], [response])


@pytest.mark.parametrize("name", CASES)
def test_zero3_loss_and_gradient_of_two_ranks_equal_one_torch_process(
    small_toy: Callable[..., Recipe], sampled: Path, samples: Samples, zero3_results: Zero3Results, name: str
) -> None:
    """2 ranks x 16 rows, in micro-batches that split examples."""
    method, lora = (FAST | SLOW)[name]
    cached_teacher = {key: "cached" if key == "teacher" else value for key, value in method.items()}
    recipe = recipe_of_case(small_toy, sampled, (cached_teacher, lora))
    reference = first_step(recipe, samples, DistContext(), "torch", micro_batch_tokens=100000)
    result = zero3_results("fast" if name in FAST else "slow")[name]
    assert result["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert set(result["gradients"]) == set(reference["gradients"])
    scale = max(gradient.abs().max() for gradient in reference["gradients"].values())
    for parameter, gradient in reference["gradients"].items():
        assert (result["gradients"][parameter] - gradient).abs().max() <= 1e-5 * scale, parameter


@pytest.mark.slow
def test_zero3_in_bf16_errs_at_most_twice_as_much_as_plain_bf16(
    bf16_recipe: Recipe, samples: Samples, zero3_results: Zero3Results
) -> None:
    """The reference: the same weights cast to bf16 in plain torch."""
    exact = first_step(bf16_recipe, samples, DistContext(), "torch", micro_batch_tokens=100000)["gradients"]
    recipe = with_sections(bf16_recipe, training={"precision": "bfloat16"})
    plain_bf16 = first_step(recipe, samples, DistContext(), "torch", micro_batch_tokens=100000, cast=True)["gradients"]
    zero3_bf16 = zero3_results("slow")["bfloat16"]["gradients"]

    def error(gradients: dict[str, torch.Tensor]) -> float:
        return sum(float((gradients[name] - exact[name]).square().sum()) for name in exact) ** 0.5

    assert 0 < error(zero3_bf16) <= 2 * error(plain_bf16)


@pytest.mark.slow
def test_zero3_in_bf16_keeps_the_frequencies_of_rope_exact(rope_recipe: Recipe, zero3_results: Zero3Results) -> None:
    exact = non_persistent_buffers(rope_recipe.study.model, torch.float32)
    assert {"model.rotary_emb.inv_freq"} <= exact.keys()
    of_student_and_teacher = zero3_results("slow")["buffers"]
    assert len(of_student_and_teacher) == 2
    for buffers in of_student_and_teacher:
        for name, buffer in exact.items():
            torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_zero3_exports_the_dtypes_of_the_initial_model(
    make_recipe: Callable[..., Recipe], tmp_path: Path, precision: str
) -> None:
    """The corrections of DeepSeek's routers, in float32."""
    model = mixture_in_bfloat16("deepseek_v3", tmp_path / "initial")
    training = {"precision": precision}
    recipe = make_recipe(model=model.model_dump(), method={"name": "seqkd"}, training=training)
    run_processes(export_by_zero3, 2, recipe, str(tmp_path))
    initial, exported = tensors_of(tmp_path / "initial"), tensors_of(tmp_path / "exported")
    assert initial.keys() == exported.keys()
    for name, weight in initial.items():
        assert exported[name].dtype == weight.dtype
        assert torch.equal(exported[name], weight), name
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_zero3_exports_the_scales_of_the_model(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = with_sections(make_recipe(method={"name": "seqkd"}), model={"rope_scales": (1.5, 1.2)})
    run_processes(export_by_zero3, 2, recipe, str(tmp_path))
    exported = ModelSection(path=str(tmp_path / "exported"), dtype="float32")
    plain = recipe.study.model.model_copy(update={"rope_scales": ()})
    ids = torch.arange(5, 60)[None]
    with torch.no_grad():
        scaled, found, unscaled = (load_model(each)(ids).logits for each in (recipe.study.model, exported, plain))
    assert torch.equal(found, scaled)
    assert not torch.allclose(found, unscaled, atol=1e-3)


def export_by_zero3(rank: int, recipe: Recipe, folder: str) -> None:
    with process_group(rank, 2, f"{folder}/rendezvous"):
        trainers = recipe.runtime.trainers.model_copy(update={"strategy": "zero3"})
        build_strategy(recipe.study, trainers, torch.device("cpu"), recipe.study.model).save(Path(folder, "exported"))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_zero3_loads_experts_on_one_rank(make_recipe: Callable[..., Recipe], tmp_path: Path, family: str) -> None:
    """Every rank then has its part of the same weights as without ZeRO-3, and all of DeepSeek's corrections."""
    model = save_tiny(family, tmp_path / "model")
    recipe = make_recipe(model=model.model_dump(), method={"name": "seqkd"})
    run_processes(load_by_zero3, 2, recipe, str(tmp_path))
    expected = load_model(model).state_dict()
    for rank, merged_on in enumerate(("cpu", "meta")):
        loaded = torch.load(tmp_path / f"{rank}.pt")
        assert loaded["merged on"] == {merged_on}
        assert loaded["weights"].keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(loaded["weights"][name], weight), name


def load_by_zero3(rank: int, recipe: Recipe, folder: str) -> None:
    """Save all weights as this rank sees them, and where it has merged experts."""
    import deepspeed
    from transformers.integrations import deepspeed as integration

    convert = integration._apply_weight_conversions_to_state_dict
    devices: set[str] = set()

    def recording(*args: Any) -> dict[str, torch.Tensor]:
        converted: dict[str, torch.Tensor] = convert(*args)
        devices.update(weight.device.type for name, weight in converted.items() if ".experts." in name)
        return converted

    integration._apply_weight_conversions_to_state_dict = recording
    with process_group(rank, 2, f"{folder}/rendezvous"):
        trainers = recipe.runtime.trainers.model_copy(update={"strategy": "zero3"})
        lm = build_strategy(recipe.study, trainers, torch.device("cpu"), recipe.study.model).student.lm
        with deepspeed.zero.GatheredParameters(list(lm.parameters())):
            weights = {name: weight.detach().clone() for name, weight in lm.state_dict().items()}
        torch.save({"weights": weights, "merged on": devices}, f"{folder}/{rank}.pt")


def test_zero3_loads_a_hub_model_that_this_machine_has_not_checked(
    make_recipe: Callable[..., Recipe], tiny_model_path: str, tmp_path: Path
) -> None:
    """As on a machine that only trains. The check builds the model without weights, which DeepSpeed must not shard."""
    repository = tmp_path / "cache" / "models--me--a-model"
    shutil.copytree(tiny_model_path, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (tmp_path / "temporary").mkdir()
    recipe = make_recipe(model={"path": "me/a-model", "dtype": "float32"}, method={"name": "seqkd"})
    run_processes(export_hub_model_by_zero3, 2, recipe, str(tmp_path))
    assert len(list((tmp_path / "temporary").glob("*/checked-models/*.lock"))) == 1
    initial, exported = tensors_of(Path(tiny_model_path)), tensors_of(tmp_path / "exported")
    assert initial.keys() == exported.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in initial.items())


def export_hub_model_by_zero3(rank: int, recipe: Recipe, folder: str) -> None:
    huggingface_hub.constants.HF_HUB_CACHE = f"{folder}/cache"
    tempfile.tempdir = f"{folder}/temporary"
    export_by_zero3(rank, recipe, folder)


class GradientRecorder:
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


def first_step(
    recipe: Recipe, samples: Samples, dist: DistContext, strategy: str, *, micro_batch_tokens: int, cast: bool = False
) -> dict[str, Any]:
    """Loss and gradients of the first global batch. The method may need less of the samples than they hold."""
    study = with_sections(recipe, training={"epochs": 1}).study
    update = {"strategy": strategy, "workers": dist.world_size, "micro_batch_tokens": micro_batch_tokens, "threads": 1}
    trainers = recipe.runtime.trainers.model_copy(update=update)
    recorder: Any = GradientRecorder(build_strategy(study, trainers, torch.device("cpu"), study.model))
    if cast:
        for parameter in recorder.student.lm.parameters():
            parameter.data = parameter.data.bfloat16()
    loader = FirstBatch(study, samples.ids, SampleStore(samples.artifact), no_stream, dist)
    prompts = PromptBuilder(load_tokenizer(study.model), study.data.prompt, max_length=1024, reserve=0)
    teacher = build_teacher(study, recorder.base_states, torch.device("cpu"))
    progress = TrainingProgress.at_start(len(samples.ids))
    build = RowBuilder(prompts, study)
    trainer = TrainingLoop(study, trainers, build, recorder, teacher, dist)
    records = train_to_end(trainer, loader, progress)
    return {"loss": records[0].loss, "gradients": recorder.gradients}


def first_step_of_zero3(recipe: Recipe, samples: Samples, dist: DistContext) -> dict[str, Any]:
    return first_step(recipe, samples, dist, "zero3", micro_batch_tokens=1500)


def model_buffers(recipe: Recipe, samples: Samples, dist: DistContext) -> list[dict[str, torch.Tensor]]:
    """The buffers of the student and of the resident teacher."""
    trainers = recipe.runtime.trainers.model_copy(update={"strategy": "zero3"})
    strategy: Any = build_strategy(recipe.study, trainers, torch.device("cpu"), recipe.study.model)
    return [dict(lm.named_buffers()) for lm in (strategy.student.lm, strategy.base.module.lm)]


def run_jobs(rank: int, jobs: dict[str, Job], samples: Samples, folder: str) -> None:
    """One rank of two: run all jobs, one after another; rank 0 saves the results."""
    with process_group(rank, 2, f"{folder}/rendezvous"):
        results = {name: work(recipe, samples, DistContext(rank, 2)) for name, (work, recipe) in jobs.items()}
        if rank == 0:
            torch.save(results, f"{folder}/results.pt")
