"""Failures while sampling are recorded, tolerated up to a fraction, and never hang. Real actors, the fake engine."""

import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.executors import build_executor
from pipelines.plan import make_plan
from pipelines.stages.sample import coordinator_spec
from pipelines.stages.stage import RunContext
from pos2distill.config import Recipe
from pos2distill.errors import MachineError, UserError
from pos2distill.store.lease import Lease
from tests.support.commands import run_distill, run_sample
from tests.support.drivers import Driver
from tests.support.results import artifact_of, counts_of, sample_store, training_ids
from tests.support.toy import LOCAL

pytestmark = pytest.mark.xdist_group("compute")

FAILURE = "the fake engine fails at every seed that 4 divides"


@pytest.fixture
def fake(small_toy: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """`fake("section.field=value", ...)`: 40 examples, in batches of 5, to an engine that answers at once."""
    settings = ("model.engine=fake", "method.name=seqkd", "sampling.keep=all", "runtime.samplers.batch_size=5")
    return lambda *overrides: small_toy(tmp_path, *settings, *overrides)


def sample(recipe: Recipe) -> dict[str, int]:
    """Run the stage. Returns its counts."""
    run_sample(recipe)
    return counts_of(recipe, "sample")


def stored(recipe: Recipe) -> list[dict[str, Any]]:
    ids, store = training_ids(recipe), sample_store(recipe)
    return store.load(store.index(ids), np.arange(len(ids)), ["outcome", "error", "response_ids"]).to_pylist()


def test_sample_keeps_and_counts_failed_rows_with_their_error(fake: Callable[..., Recipe]) -> None:
    recipe = fake(LOCAL, "runtime.fake.fail_every=4", "runtime.max_failed_fraction=0.9")
    counts = sample(recipe)
    rows = stored(recipe)
    outcomes = Counter(row["outcome"] for row in rows)
    assert counts["sampled"] == 40 == sum(counts[name] for name in ("kept", "wrong", "empty", "failed"))
    assert 0 < counts["failed"] == outcomes["failed"] < 40
    assert {row["error"] for row in rows if row["outcome"] == "failed"} == {FAILURE}
    assert all(row["error"] is None and row["response_ids"] for row in rows if row["outcome"] == "kept")


def test_sample_stops_in_one_line_after_too_many_failures(fake: Callable[..., Recipe]) -> None:
    recipe = fake(LOCAL, "runtime.fake.fail_every=4")
    with pytest.raises(UserError) as caught:
        run_sample(recipe)
    line = str(caught.value)
    assert "samples failed (more than runtime.max_failed_fraction=0.05): sample " in line
    assert 2 <= line.count(FAILURE) <= 3
    assert "\n" not in line
    assert artifact_of(recipe, "sample").manifest() is None


@pytest.mark.parametrize("command", [run_sample, run_distill])
def test_a_run_with_too_many_failures_in_the_end_does_not_pass_the_second_time(
    fake: Callable[..., Recipe], command: Callable[[Recipe], object]
) -> None:
    """Three of forty, more than 5 %, but not by more than chance: all are sampled before it is known."""
    settings = (LOCAL, "runtime.fake.fail_every=17", "seed=3")
    recipe = fake(*settings)
    samples = artifact_of(recipe, "sample")
    with pytest.raises(UserError, match=r"3 of 40 samples failed \(more than runtime.max_failed_fraction=0.05\)"):
        command(recipe)
    assert len(stored(recipe)) == 40
    with pytest.raises(UserError) as caught:
        command(recipe)
    assert str(caught.value) == (
        f"{samples.url}: 3 of 40 samples failed (more than runtime.max_failed_fraction=0.05); `inspect "
        f"{samples.url} --samples --outcome failed` shows them; with a larger limit they are left out; to sample "
        f"again, delete {samples.url}"
    )
    assert not samples.is_finished
    command(fake(*settings, "runtime.max_failed_fraction=0.1"))
    assert samples.is_finished
    # What was accepted is not judged again by a lower limit, should a corrupt part of it be sampled again.
    context = RunContext(recipe.name, {}, recipe.runtime, build_executor(recipe.runtime), Lease())
    coordinator_spec(make_plan(recipe).first_sample, context, "distill", counts="trained").guard.finish()


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_sample_continues_with_another_actor_after_an_engine_died(fake: Callable[..., Recipe]) -> None:
    """Every engine generates 3 batches; 8 are needed."""
    recipe = fake("runtime.fake.die_at_call=4", "runtime.samplers.concurrent_batches=1")
    assert sample(recipe)["kept"] == 40 == len(stored(recipe))


@pytest.mark.slow
def test_evaluate_that_is_terminated_prints_how_to_resume(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """As by its job or its pod. Ray's own handler of SIGTERM would end the process without a message."""
    recipe = make_recipe(model={"engine": "fake"}, runtime={"fake": {"delay_s": 300}})
    driver = Driver(tmp_path / "recipe.yaml", Path(recipe.storage), command="evaluate")
    driver.wait_for(lambda: "evaluate base:" in driver.log.read_text())
    assert driver.end(signal.SIGTERM) == 128 + signal.SIGTERM
    said = driver.log.read_text()
    assert said.splitlines()[-1] == "interrupted; run the same command again to continue"
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_sample_ends_if_the_engine_dies_at_every_start(fake: Callable[..., Recipe]) -> None:
    start = time.monotonic()
    with pytest.raises(MachineError) as caught:
        run_sample(fake("runtime.fake.die_at_call=1", "runtime.samplers.max_restarts=1"))
    line = r"the engine of a sampler died \d+ times, the last time of this: the fake engine ends at call 1"
    assert re.fullmatch(line, str(caught.value))
    assert time.monotonic() - start < 120
