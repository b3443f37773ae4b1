import fcntl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.stages import sample
from pos2distill.config import PoolSection, Recipe
from pos2distill.sampling import generate
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.generate import GenerationOperator
from pos2distill.sampling.gpu_lock import gpu_start_lock
from pos2distill.scratch import user_folder


@pytest.mark.parametrize("device", ["3", "MIG-GPU-5c89/1/0"])
def test_gpu_start_lock_is_one_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", device)
    with gpu_start_lock(0.5):
        (path,) = user_folder("gpu-starts").iterdir()
        with path.open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
        with gpu_start_lock(0.25):
            assert len(list(user_folder("gpu-starts").iterdir())) == 2


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_gpu_start_lock_is_for_parts_of_a_gpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: float
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with gpu_start_lock(gpus):
        assert not list(tmp_path.iterdir())


def test_gpu_start_lock_is_held_while_a_sampler_or_a_teacher_loads(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    @contextmanager
    def lock(gpus: float) -> Iterator[None]:
        events.append(gpus)
        yield
        events.append("released")

    def load(*arguments: Any, **options: Any) -> Any:
        events.append("loaded")
        return SimpleNamespace(shutdown=lambda: None)

    monkeypatch.setattr(generate, "gpu_start_lock", lock)
    monkeypatch.setattr(generate, "build_engine", load)
    recipe = make_recipe(runtime={"samplers": {"gpus": 0.5}})
    GenerationOperator(recipe.study, recipe.runtime, SamplingParams(0.0, 1.0, 1, ())).close()
    assert events == [0.5, "loaded", "released"]
    monkeypatch.setattr(sample, "gpu_start_lock", lock)
    monkeypatch.setattr("pos2distill.sampling.teacher_encoder.TeacherEncoder", load)
    sample._create_teacher(recipe.study.model, recipe.study.method.alignment, PoolSection(gpus=0.25))
    assert events[3:] == [0.25, "loaded", "released"]
