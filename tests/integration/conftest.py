"""Fixtures of the integration tests: one local Ray, and one finished study on the built-in toy."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from pipelines.commands import run_study
from pipelines.executors.ray.session import ray_session
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
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
