"""What fails while sampling is recorded, borne up to a share, and never hangs the run. Real actors, the fake engine."""

import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.exceptions

from pipelines.commands import run_sample
from pipelines.plan import Plan, make_plan
from pipelines.stages.prepare import training_ids
from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.store.samples import SampleStore
from tests.integration.drivers import Driver

FAILURE = "the fake engine fails at every seed that 4 divides"


@pytest.fixture
def fake(small_toy: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """`fake("section.field=value", ...)`: 40 examples, in batches of 5, to an engine that answers at once."""
    settings = ("model.engine=fake", "method.name=seqkd", "sampling.keep=all", "runtime.samplers.batch_size=5")
    return lambda *overrides: small_toy(tmp_path, *settings, *overrides)


def sample(recipe: Recipe) -> dict[str, int]:
    """Run the stage. Returns its counts."""
    run_sample(recipe)
    manifest = make_plan(recipe).samples.manifest()
    assert manifest is not None
    return manifest.counts


def rows(plan: Plan) -> list[dict[str, Any]]:
    ids, store = training_ids(plan), SampleStore(plan.samples)
    return store.load(store.index(ids), ids, np.arange(len(ids)), ["outcome", "error", "response_ids"]).to_pylist()


def test_failed_rows_are_kept_with_their_error_and_counted(fake: Callable[..., Recipe]) -> None:
    recipe = fake("runtime.fake.fail_every=4", "runtime.max_failed_fraction=0.9")
    plan = make_plan(recipe)
    counts = sample(recipe)
    outcomes = Counter(row["outcome"] for row in rows(plan))
    assert counts["sampled"] == 40 == sum(counts[name] for name in ("kept", "wrong", "empty", "failed"))
    assert 0 < counts["failed"] == outcomes["failed"] < 40
    assert {row["error"] for row in rows(plan) if row["outcome"] == "failed"} == {FAILURE}
    assert all(row["error"] is None and row["response_ids"] for row in rows(plan) if row["outcome"] == "kept")


def test_too_many_failures_stop_the_run_in_one_line(fake: Callable[..., Recipe]) -> None:
    recipe = fake("runtime.fake.fail_every=4")
    with pytest.raises(UserError) as caught:
        run_sample(recipe)
    line = str(caught.value)
    assert "samples failed (more than runtime.max_failed_fraction=0.05): example " in line
    assert 2 <= line.count(FAILURE) <= 3
    assert "\n" not in line
    assert make_plan(recipe).samples.manifest() is None


def test_an_engine_that_dies_takes_its_actor_along_and_another_goes_on(fake: Callable[..., Recipe]) -> None:
    """Every engine answers 3 batches; 8 are to be answered."""
    recipe = fake("runtime.fake.die_at_call=4", "runtime.samplers.concurrent_batches=1")
    assert sample(recipe)["kept"] == 40 == len(rows(make_plan(recipe)))


def test_an_evaluation_that_is_terminated_says_how_to_go_on(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """As by the job that it runs in, or the pod; Ray's own handler would end it without a word."""
    recipe = make_recipe(model={"engine": "fake"}, runtime={"fake": {"delay_s": 300}})
    driver = Driver(tmp_path / "recipe.yaml", Path(recipe.storage), command="evaluate")
    driver.wait_for(lambda: "evaluate base:" in driver.log.read_text())
    assert driver.end(signal.SIGTERM) == 128 + signal.SIGTERM
    said = driver.log.read_text()
    assert said.splitlines()[-1] == "interrupted; run the same command again to go on"
    assert "Traceback" not in said


def test_an_engine_that_dies_at_every_start_ends_the_run(fake: Callable[..., Recipe]) -> None:
    start = time.monotonic()
    with pytest.raises(ray.exceptions.RayError, match="died"):
        run_sample(fake("runtime.fake.die_at_call=1", "runtime.samplers.max_restarts=1"))
    assert time.monotonic() - start < 120
