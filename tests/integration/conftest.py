"""Fixtures of the integration tests: one local Ray for all of them, and studies on the built-in toy."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from pipelines.commands import run_study
from pipelines.executors.ray.session import ray_session
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe

PROJECT = Path(__file__).parents[2]
BENCHMARK_DATA = Path(os.environ.get("POS2DISTILL_BENCHMARK_DATA", PROJECT.parent / "shared" / "data"))

# The toy at a size that a test can afford: 12 documents, 3 of their slots eval_specs.
SMALL = [
    "data.documents=12",
    "data.train_examples=40",
    "data.eval_examples=8",
    "evaluation.slots=4",
    "evaluation.other_documents=[16]",
    "evaluation.other_slots=2",
    "evaluation.bootstrap_samples=200",
    "runtime.samplers.max=1",
    "runtime.samplers.min=1",
]


@pytest.fixture(scope="session", autouse=True)
def local_ray() -> Iterator[None]:
    """Ray on this machine, for the whole session."""
    with ray_session():
        yield
    ray.shutdown()


@pytest.fixture(scope="session")
def small_toy() -> Callable[..., Recipe]:
    """`small_toy(storage, "section.field=value", ...)`: the quickstart recipe in small."""

    def load(storage: Path, *overrides: str) -> Recipe:
        return load_recipe("quickstart", [*SMALL, f"runtime.storage={storage}", *overrides])

    return load


@pytest.fixture(scope="session")
def finished(small_toy: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The recipe of a study that ran from beginning to end. Tests leave its artifacts as they are."""
    recipe = small_toy(tmp_path_factory.mktemp("finished"))
    run_study(recipe)
    return recipe
