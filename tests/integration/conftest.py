"""Fixtures of the integration tests: one local Ray, one finished study, slow studies, a store that fails."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from s3fs import S3FileSystem

from pipelines.executors.ray.connection import connected_to_ray
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from tests.support.commands import run_distill, run_study
from tests.support.drivers import Driver
from tests.support.heads import end_tree
from tests.support.results import read_steps
from tests.support.s3_server import Faulty, s3_server
from tests.support.tiny import write_examples
from tests.support.toy import SMALL


@pytest.fixture(autouse=True)
def no_driver_outlives_its_test() -> Iterator[None]:
    """After a failure too: it would slow down all tests that follow."""
    Driver.started.clear()
    yield
    for driver in Driver.started:
        if driver.process.poll() is None:
            end_tree(driver.process.pid)


@contextmanager
def ray_in_this_process() -> Iterator[None]:
    """Ray on this machine, for stages that run in this process, unless it is started already."""
    if ray.is_initialized():
        yield
        return
    try:
        with connected_to_ray():
            yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray on this machine. It ends with the module, since all that it has started costs time while it is idle."""
    with ray_in_this_process():
        yield


@pytest.fixture(scope="session")
def small_toy() -> Callable[..., Recipe]:
    """`small_toy(storage, "section.field=value", ...)`: the quickstart recipe in small."""

    def load(storage: Path, *overrides: str) -> Recipe:
        return load_recipe("quickstart", [*SMALL, f"runtime.storage={storage}", *overrides])

    return load


@pytest.fixture(scope="session")
def finished(small_toy: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The recipe of a study that has run on Ray, once for all tests. They must not change its artifacts."""
    recipe = small_toy(tmp_path_factory.mktemp("finished"))
    with ray_in_this_process():
        run_study(recipe)
    return recipe


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """A server that fails at random, found through the environment."""
    with s3_server(fault_probability=0.05, seed=0) as (url, app):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        S3FileSystem.clear_instance_cache()  # an instance keeps its endpoint
        yield app
        S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(faulty: Faulty) -> str:
    name = f"bucket-{uuid.uuid4().hex}"
    S3FileSystem().mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def slow_study(make_shared_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """`slow_study(storage, delay_s=1)`: a streamed study on the tiny model on Ray, 24 examples and 24 steps.

    Its engine takes `delay_s` seconds for a batch of four, so that it is at work long enough to meet a fault.
    """

    def make(storage: str, *, delay_s: float = 1) -> Recipe:
        return _slow_study(make_shared_recipe, tmp_path, storage=storage, fake={"delay_s": delay_s})

    return make


@pytest.fixture(scope="session")
def undisturbed_steps(
    make_shared_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The training steps of `slow_study` in one process, without faults and delays."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = _slow_study(make_shared_recipe, folder, storage=str(folder / "run"), executor="local")
    run_distill(recipe)
    return read_steps(recipe)


def _slow_study(make: Callable[..., Recipe], folder: Path, **runtime: Any) -> Recipe:
    write_examples(folder / "data.jsonl", 72, 6)
    return make(
        folder,
        model={"engine": "fake"},
        data={"train_examples": 24, "eval_examples": 2},
        method={"k": 1},
        training={"global_batch_rows": 8, "epochs": 4, "order": "fixed"},
        runtime={
            **runtime,
            "samplers": {"batch_size": 4, "concurrent_batches": 1},
            "teachers": {"batch_size": 4, "concurrent_batches": 1},
            "trainers": {"micro_batch_tokens": 4096},
            "checkpoints": {"steps": 3},
        },
    )
