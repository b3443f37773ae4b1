"""Fixtures of the integration tests: one local Ray, and one finished study on the built-in toy."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from pipelines.commands import run_study
from pipelines.executors.ray.session import ray_session
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from tests.support.tiny import write_examples
from tests.support.toy import SMALL


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Ray on this machine, started once for the tests that run stages in this process."""
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
def finished(local_ray: None, small_toy: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The recipe of a study that has run on Ray, once for all tests. They must not change its artifacts."""
    recipe = small_toy(tmp_path_factory.mktemp("finished"))
    run_study(recipe)
    return recipe


@pytest.fixture
def slow_study(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """`slow_study(storage, executor, delay_s=1)`: a streamed study on the tiny model, 24 examples and 12 steps.

    Its engine takes `delay_s` seconds for a batch of four, so that it is at work long enough to meet a fault.
    """
    write_examples(tmp_path / "data.jsonl", 72, 6)

    def make(storage: str, executor: str = "ray", *, delay_s: float = 1) -> Recipe:
        return make_recipe(
            model={"engine": "fake"},
            data={"train_examples": 24, "eval_examples": 2},
            method={"k": 1},
            training={"global_batch_rows": 8, "epochs": 4, "order": "fixed"},
            runtime={
                "storage": storage,
                "executor": executor,
                "fake": {"delay_s": delay_s},
                "samplers": {"batch_size": 4, "concurrent_batches": 1},
                "teachers": {"batch_size": 4, "concurrent_batches": 1},
                "trainers": {"micro_batch_tokens": 4096},
                "checkpoints": {"steps": 3},
            },
        )

    return make
