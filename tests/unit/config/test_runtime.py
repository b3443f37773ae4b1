import re
from collections.abc import Callable
from typing import Any

import pytest

from pos2distill.config import (
    ModelSection,
    Recipe,
    Runtime,
    TrainersSection,
)
from pos2distill.errors import UserError


def test_runtime_defaults_to_one_worker() -> None:
    runtime = Runtime()
    assert (runtime.samplers.max, runtime.teachers.max, runtime.trainers.workers) == (1, 1, 1)
    assert ModelSection(path="m").trust_remote_code is False


@pytest.mark.parametrize("trainers", [{}, {"trainers": {"threads": 2}}, {"trainers": {"strategy": None}}])
def test_runtime_trains_with_torch_in_one_process(trainers: dict[str, Any]) -> None:
    local = Runtime.model_validate({"executor": "local", **trainers})
    assert local.trainers.strategy == "torch"
    assert Runtime.model_validate(local.model_dump()) == local
    assert Runtime(executor="local", trainers=TrainersSection(threads=2)).trainers.strategy == "torch"
    assert Runtime.model_validate({"executor": "ray", **trainers}).trainers.strategy == "zero3"


def test_trainers_max_workers_above_workers_is_valid(make_recipe: Callable[..., Recipe]) -> None:
    trainers = {"strategy": "zero3", "workers": 1, "max_workers": 2}
    assert make_recipe(runtime={"trainers": trainers}).runtime.trainers.max_workers == 2


def test_recipe_rejects_zero3_that_rounds_the_model(make_recipe: Callable[..., Recipe]) -> None:
    settings: dict[str, Any] = {"training": {"precision": "bfloat16"}, "model": {"dtype": "float32"}}
    assert make_recipe(**settings).study.training.precision == "bfloat16"  # torch keeps float32 weights
    with pytest.raises(UserError, match=r"training.precision: zero3 would round the float32 weights of model.dtype"):
        make_recipe(**settings, runtime={"trainers": {"strategy": "zero3"}})


def test_trainers_reject_max_workers_below_workers(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"max_workers: 1 is less than workers, 2"):
        make_recipe(runtime={"trainers": {"strategy": "zero3", "workers": 2, "max_workers": 1}})


@pytest.mark.parametrize(
    ("engine", "runtime", "message"),
    [
        ("hf", {"teachers": {"gpus": 2}}, "teachers.gpus: 2, but each of them uses one GPU; set 1, and raise max"),
        ("hf", {"samplers": {"gpus": 4}}, "samplers.gpus: 4, but each of them uses one GPU; set 1, and raise max"),
        ("hf", {"trainers": {"gpus": 8}}, "trainers.gpus: input should be less than or equal to 1, got 8"),
        (
            "hf",
            {"trainers": {"strategy": "zero3", "gpus": 0.5, "max_workers": 2}},
            "trainers.gpus: 0.5, but several workers cannot share a GPU; set 1",
        ),
        (
            "vllm",
            {"samplers": {"gpus": 0.5}},
            "vllm.gpu_memory_utilization: 0.9, but one sampler has 0.5 of a GPU (runtime.samplers.gpus); set 0.5 or",
        ),
    ],
)
def test_recipe_rejects_gpus_that_would_be_idle_or_shared(
    make_recipe: Callable[..., Recipe], engine: str, runtime: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(f"runtime.{message}")):
        make_recipe(model={"engine": engine}, runtime=runtime)


def test_recipe_rejects_tensor_parallel_size_unlike_gpus(make_recipe: Callable[..., Recipe]) -> None:
    def load(gpus: float, parts: int) -> Recipe:
        return make_recipe(
            model={"engine": "vllm"},
            runtime={
                "samplers": {"gpus": gpus},
                "vllm": {"tensor_parallel_size": parts, "gpu_memory_utilization": 0.5},
            },
        )

    assert load(2, 2).runtime.vllm.tensor_parallel_size == 2
    assert load(0.5, 1).runtime.samplers.gpus == 0.5
    for gpus, parts in ((1, 2), (4, 1), (0.5, 2)):
        message = (
            rf"tensor_parallel_size: {parts}, but one sampler has {gpus:g} GPUs \(runtime.samplers.gpus\); set both"
        )
        with pytest.raises(UserError, match=message):
            load(gpus, parts)
