"""Samples straight into training, while everything that can die dies: nothing lost, nothing done twice."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from pipelines.plan import Plan, make_plan
from pipelines.stages.distill import make_checkpoint, read_steps
from pipelines.stages.prepare import make_examples, training_ids
from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.store.samples import SampleStore
from tests.conftest import _write_examples
from tests.integration.drivers import Driver
from tests.integration.heads import cluster_state, ray_head, ray_node

EXAMPLES = 72


@pytest.fixture
def streamed(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """A streamed study on the tiny model: a fake engine that takes its time, a real teacher, a real trainer."""
    _write_examples(tmp_path / "data.jsonl", 3 * EXAMPLES, 6)

    def make(**overrides: Any) -> Recipe:
        return make_recipe(
            **{
                "model": {"engine": "fake"},
                "data": {"train_examples": EXAMPLES, "eval_examples": 2},
                "method": {"k": 1},
                "training": {"global_batch_rows": 8, "epochs": 2, "order": "fixed"},
                "runtime": {
                    "fake": {"delay_s": 1.0},
                    "samplers": {"batch_size": 4, "concurrent_batches": 1},
                    "teachers": {"batch_size": 4, "concurrent_batches": 1},
                    "trainers": {"micro_batch_tokens": 4096},
                    "checkpoints": {"steps": 3},
                },
            }
            | overrides
        )

    return make


def assert_exactly_once(recipe: Recipe, plan: Plan) -> None:
    """Every example in the store once, as readers see it, and every row trained on once an epoch."""
    ids = training_ids(plan)
    store = SampleStore(plan.samples)
    index = store.index(ids)
    assert not len(index.missing)
    assert store.tally(index, ids).outcomes.total() == EXAMPLES
    counts = plan.samples.manifest().counts  # type: ignore[union-attr]
    assert counts["sampled"] == counts["kept"] == EXAMPLES
    steps = read_steps(plan)
    assert [step["step"] for step in steps] == list(range(len(steps)))
    for epoch in range(recipe.study.training.epochs):
        ledger = Counter(each for step in steps if step["epoch"] == epoch for each in step["examples"])
        assert ledger == Counter(ids.to_pylist())
        assert sum(step["rows"] for step in steps if step["epoch"] == epoch) == 2 * EXAMPLES


@pytest.mark.timeout(1800)
def test_a_run_that_is_stopped_killed_and_damaged_ends_as_if_nothing_had_happened(
    streamed: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = streamed()

    def at(storage: Path) -> tuple[Recipe, Plan]:
        own = recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"storage": str(storage)})})
        return own, make_plan(own)

    calm, calm_plan = at(tmp_path / "calm")
    run_in_calm(tmp_path / "recipe.yaml", calm_plan)
    assert_exactly_once(calm, calm_plan)
    stormy, plan = at(tmp_path / "stormy")
    run_in_storm(tmp_path / "recipe.yaml", plan)
    assert_exactly_once(stormy, plan)

    assert read_steps(plan) == read_steps(calm_plan)  # bit for bit
    model = "model/model.safetensors"
    assert (Path(plan.checkpoint.path) / model).read_bytes() == (Path(calm_plan.checkpoint.path) / model).read_bytes()
    assert not (Path(plan.checkpoint.path) / "training").exists()


def run_in_calm(recipe: Path, plan: Plan) -> None:
    """Undisturbed, but for a second driver on the same storage, which waits. Training starts with the first samples."""
    storage = Path(plan.samples.path).parent
    drivers = [Driver(recipe, storage) for _ in range(2)]
    steps = Path(plan.checkpoint.path) / "steps"
    drivers[0].wait_for(lambda: list(steps.glob("*.jsonl")))
    assert stored(plan) <= EXAMPLES / 2
    assert [driver.end() for driver in drivers] == [0, 0]
    said = [driver.log.read_text() for driver in drivers]
    assert sum("in use by" in each and "waiting for its end" in each for each in said) == 1
    assert sum("done before" in each for each in said) == 1


def run_in_storm(recipe: Path, plan: Plan) -> None:
    """Stopped in good order; told twice, so that it leaves at once; killed before it could publish; with damage."""
    storage = Path(plan.samples.path).parent
    driver = Driver(recipe, storage)
    driver.wait_for(lambda: list((Path(plan.checkpoint.path) / "training").rglob("progress.json")))
    assert stored(plan) < EXAMPLES
    assert driver.end(signal.SIGINT) == 130
    said = driver.log.read_text()
    assert "stopping after a checkpoint; once more to leave at once" in said
    assert "run the same command again to go on" in said.splitlines()[-1]
    assert "; its checkpoint is kept" in said.splitlines()[-1]

    before = stored(plan)
    driver = Driver(recipe, storage)
    driver.wait_for(lambda: stored(plan) >= min(before + 12, EXAMPLES - 12))
    driver.process.send_signal(signal.SIGINT)
    driver.wait_for(lambda: "once more to leave at once" in driver.log.read_text())
    told = time.monotonic()
    assert driver.end(signal.SIGINT) == 130
    assert driver.ended - told < 10
    assert "run the same command again" not in driver.log.read_text()  # it did not wait for a checkpoint

    driver = Driver(recipe, storage)
    driver.wait_for(lambda: stored(plan) == EXAMPLES)
    assert driver.end(signal.SIGKILL) == -signal.SIGKILL
    assert plan.samples.manifest() is None

    damaged = damage_two_parts(plan)
    driver = Driver(recipe, storage)
    assert driver.end() == 0
    assert sorted(path.name for path in (Path(plan.samples.path) / "damaged").iterdir()) == damaged
    assert f"{damaged[0]}: damaged" in driver.log.read_text()


def stored(plan: Plan) -> int:
    parts = Path(plan.samples.path) / "parts"
    return sum(pq.read_metadata(part).num_rows for part in parts.glob("part-*.parquet"))


def damage_two_parts(plan: Plan) -> list[str]:
    """Cut one off, which the first look tells; flip a bit of another, which only a worker that reads it sees."""
    first, second, *_ = sorted((Path(plan.samples.path) / "parts").iterdir())
    first.write_bytes(first.read_bytes()[:-100])
    column = pq.ParquetFile(second).schema_arrow.names.index("hidden")
    chunk = pq.ParquetFile(second).metadata.row_group(0).column(column)
    data = bytearray(second.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 4
    second.write_bytes(data)
    return [first.name, second.name]


def started_here(title: str) -> list[psutil.Process]:
    """Ray's actors of that class that this process's Ray has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_actors_and_workers_may_die(streamed: Callable[..., Recipe]) -> None:
    """A sampler twice in the middle of a batch, a teacher, a training worker: all in one run."""
    recipe = streamed(training={"global_batch_rows": 8, "epochs": 2, "order": "arrival"})
    plan = make_plan(recipe)
    make_examples(recipe, plan.examples)
    killed: list[str] = []

    def kill_when_seen(title: str, parts: int) -> None:
        while True:
            seen = started_here(title) if len(SampleStore(plan.samples).part_names()) >= parts else []
            try:
                seen[0].kill()
            except (IndexError, psutil.NoSuchProcess):
                time.sleep(0.1)  # not there yet, or just on its way out
            else:
                killed.append(title)
                return

    def storm() -> None:
        kill_when_seen("MapWorker(MapBatches(Generate))", 1)
        kill_when_seen("MapWorker(MapBatches(EncodeTeacher))", 4)
        kill_when_seen("RayTrainWorker", 7)
        kill_when_seen("MapWorker(MapBatches(Generate))", 10)

    thread = threading.Thread(target=storm, daemon=True)
    thread.start()
    make_checkpoint(recipe, plan)
    thread.join(1)
    assert len(killed) == 4
    assert_exactly_once(recipe, plan)


@pytest.mark.timeout(1200)
def test_a_node_gives_notice_and_is_gone(streamed: Callable[..., Recipe], tmp_path: Path) -> None:
    """Two workers write a checkpoint at the notice; the node dies with all that was on it; one worker goes on."""
    recipe = streamed(
        training={"global_batch_rows": 8, "epochs": 2, "order": "arrival"},
        runtime={
            "fake": {"delay_s": 2.0},
            "samplers": {"batch_size": 4, "concurrent_batches": 1},
            "trainers": {"strategy": "zero3", "workers": 1, "max_workers": 2, "cpus": 3.5},  # one a node
        },
    )
    plan = make_plan(recipe)
    checkpoints = Path(plan.checkpoint.path) / "training"
    with (
        ray_head(["--num-cpus=0", "--object-store-memory=120000000"], variables={"RAY_AUTH_MODE": "disabled"}) as head,
        ray_node(head, cpus=6) as stays,
        ray_node(head, cpus=6) as lost,
        cluster_state(head.address) as state,
    ):
        driver = Driver(
            tmp_path / "recipe.yaml", Path(recipe.storage), {**head.environment, "RAY_ADDRESS": head.address}
        )

        def trainers_nodes() -> list[str]:
            actors = state.actor_table(None, None, "ALIVE").values()
            return [actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"] == "RayTrainWorker"]

        driver.wait_for(lambda: len(trainers_nodes()) == 2 and len(SampleStore(plan.samples).part_names()) > 4)
        assert sorted(trainers_nodes()) == sorted([stays.node_id, lost.node_id])
        assert not list(checkpoints.rglob("progress.json"))
        lost.give_notice(head, seconds=15)
        driver.wait_for(lambda: list(checkpoints.rglob("progress.json")))
        lost.kill()
        driver.wait_for(lambda: trainers_nodes() == [stays.node_id])
        assert driver.end() == 0, driver.log.read_text()
    assert_exactly_once(recipe, plan)


def test_too_many_failures_end_a_run_of_several_workers(streamed: Callable[..., Recipe]) -> None:
    """The workers learn of it at different times, and must not wait for each other for ever."""
    recipe = streamed(
        runtime={
            "fake": {"fail_every": 2},
            "samplers": {"batch_size": 4},
            "trainers": {"strategy": "zero3", "workers": 2},
        }
    )
    plan = make_plan(recipe)
    make_examples(recipe, plan.examples)
    with pytest.raises(UserError, match=r"\d+ of \d+ samples failed \(more than runtime.max_failed_fraction"):
        make_checkpoint(recipe, plan)
    assert plan.checkpoint.manifest() is None
