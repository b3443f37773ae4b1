"""Training on samples while they are made, and processes and nodes die: nothing is lost or trained on twice."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private.state import GlobalState

from pos2distill.config import FakeSection, Recipe
from pos2distill.errors import UserError
from pos2distill.node_pools import DRAIN_VARIABLE
from tests.support.commands import run_distill
from tests.support.drivers import Driver
from tests.support.heads import cluster_state, ray_head, ray_node
from tests.support.paths import PROJECT
from tests.support.results import (
    artifact_of,
    assert_exactly_once,
    flip_bit,
    read_steps,
    sample_store,
    saved_states,
    step_of_state,
    stored_samples,
)
from tests.support.tiny import write_examples

pytestmark = pytest.mark.xdist_group("cluster")

EXAMPLES = 72


@pytest.fixture
def streamed(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """A streamed study on the tiny model: a slow fake engine, a real teacher, a real trainer."""
    write_examples(tmp_path / "data.jsonl", 3 * EXAMPLES, 6)

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


def with_runtime(recipe: Recipe, **settings: Any) -> Recipe:
    return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update=settings)})


def run_undisturbed(recipe: Recipe, storage: Path) -> Recipe:
    """The same study in one process, without faults and delays, after it has run."""
    undisturbed = with_runtime(recipe, storage=str(storage), executor="local", fake=FakeSection())
    run_distill(undisturbed)
    return undisturbed


def assert_same_training(recipe: Recipe, reference: Recipe) -> None:
    """Steps and weights are equal bit for bit, and no training state is left."""
    assert read_steps(recipe) == read_steps(reference)
    weights, expected = (
        Path(artifact_of(each, "distill").path) / "model" / "model.safetensors" for each in (recipe, reference)
    )
    assert weights.read_bytes() == expected.read_bytes()
    assert not (Path(artifact_of(recipe, "distill").path) / "training").exists()


def test_distill_interrupted_and_run_again_with_corrupt_files_ends_as_if_uninterrupted(
    streamed: Callable[..., Recipe], tmp_path: Path
) -> None:
    """A real driver on Ray gets a SIGINT while it samples and trains. Then files that it has stored are corrupt.

    They are the newest training state and two parts of samples. The reference runs on the local executor.
    """
    recipe = streamed(
        data={"train_examples": 24, "eval_examples": 2},
        training={"global_batch_rows": 8, "epochs": 4, "order": "fixed"},
        runtime={
            "fake": {"delay_s": 0.5},
            "samplers": {"batch_size": 4, "concurrent_batches": 1},
            "teachers": {"batch_size": 4, "concurrent_batches": 1},
            "trainers": {"micro_batch_tokens": 4096},
            "checkpoints": {"steps": 1},
        },
    )
    interrupted = with_runtime(recipe, storage=str(tmp_path / "interrupted"))
    driver = Driver(tmp_path / "recipe.yaml", tmp_path / "interrupted")
    driver.wait_for(lambda: len(saved_states(interrupted)) == 2)
    assert driver.end(signal.SIGINT) == 130
    last_line = driver.log.read_text().splitlines()[-1]
    assert "run the same command again to continue" in last_line
    assert "; its checkpoint is kept" in last_line
    samples = artifact_of(interrupted, "sample")
    assert not artifact_of(interrupted, "distill").is_finished
    assert not samples.is_finished
    steps = read_steps(interrupted)
    intact, corrupt = sorted(saved_states(interrupted), key=step_of_state)
    file = next(corrupt.parent.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    step = step_of_state(intact)
    parts = corrupt_two_parts(Path(samples.path))

    driver = Driver(tmp_path / "recipe.yaml", tmp_path / "interrupted")
    assert driver.end() == 0, driver.log.read_text()
    (warning,) = (line for line in driver.log.read_text().splitlines() if "training continues" in line)
    assert warning.startswith(f"warning: {file}: corrupt (")
    assert warning.endswith(f"; training continues from an earlier state, at step {step}")
    assert sorted(path.name for path in Path(samples.path, "quarantine").iterdir()) == parts
    assert f"{parts[0]}: corrupt" in driver.log.read_text()
    assert_exactly_once(interrupted)
    assert read_steps(interrupted)[: len(steps)] == steps

    reference = run_undisturbed(recipe, tmp_path / "reference")
    assert_same_training(interrupted, reference)


def corrupt_two_parts(samples: Path) -> list[str]:
    """Truncate one, which the index finds; flip a bit of another, which only a worker that reads it finds."""
    first, second, *_ = sorted((samples / "parts").iterdir())
    first.write_bytes(first.read_bytes()[:-100])
    flip_bit(second, "hidden")
    return [first.name, second.name]


@pytest.mark.slow
def test_distill_interrupted_twice_ends_at_once(streamed: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = streamed()
    driver = Driver(tmp_path / "recipe.yaml", Path(recipe.storage))
    driver.wait_for(lambda: saved_states(recipe))
    assert stored_samples(recipe) < EXAMPLES  # training starts with the first samples
    driver.process.send_signal(signal.SIGINT)
    driver.wait_for(lambda: "saving a checkpoint; press Ctrl-C again to force quit" in driver.log.read_text())
    second_signal = time.monotonic()
    assert driver.end(signal.SIGINT) == 130
    assert driver.ended - second_signal < 10
    assert "run the same command again" not in driver.log.read_text()  # it did not wait for a checkpoint
    assert not artifact_of(recipe, "distill").is_finished
    assert not artifact_of(recipe, "sample").is_finished


def started_here(title: str) -> list[psutil.Process]:
    """Processes of the actors of that class in the Ray that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
def test_distill_survives_killed_actors_and_workers(local_ray: None, streamed: Callable[..., Recipe]) -> None:
    """In one run: a sampler twice in the middle of a batch, a teacher, a training worker."""
    recipe = streamed(training={"global_batch_rows": 8, "epochs": 2, "order": "arrival"})
    store = sample_store(recipe)
    killed: list[str] = []

    over = threading.Event()

    def kill_when_seen(title: str, parts: int) -> None:
        while not over.is_set():
            seen = started_here(title) if len(store.part_names()) >= parts else []
            try:
                seen[0].kill()
            except (IndexError, psutil.NoSuchProcess):
                over.wait(0.1)  # not there yet, or just on its way out
            else:
                killed.append(title)
                return

    def storm() -> None:
        # In the order in which they end: a training worker may start after the last sample on a slow machine.
        kill_when_seen("MapWorker(MapBatches(samplers))", 1)
        kill_when_seen("MapWorker(MapBatches(samplers))", 4)
        kill_when_seen("MapWorker(MapBatches(teachers))", 4)
        kill_when_seen("RayTrainWorker", 7)

    thread = threading.Thread(target=storm, daemon=True)
    thread.start()
    try:
        run_distill(recipe)
    finally:
        over.set()  # the actors of later tests have the same names
        thread.join()
    assert len(killed) == 4
    assert_exactly_once(recipe)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_distill_survives_a_node_that_is_preempted_in_the_middle_of_a_long_step(
    streamed: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Two workers save at a notice of 30 s; the node dies with all its processes, and one worker continues.

    The third step, of 24 passes on each worker, takes 48 s or more, since each pass is slowed down. Meanwhile samples
    are still made.
    """
    examples, batch = 32, 4
    recipe = streamed(
        data={"train_examples": examples, "eval_examples": 2},
        method={"k": 3},
        training={"global_batch_rows": 24, "epochs": 1, "order": "arrival"},
        runtime={
            "fake": {"delay_s": 8.0},
            "samplers": {"batch_size": batch, "concurrent_batches": 1},
            "trainers": {"strategy": "zero3", "workers": 1, "max_workers": 2, "cpus": 3.5, "micro_batch_tokens": 1},
        },
    )
    store = sample_store(recipe)
    slow = tmp_path / "slow"
    slow.touch()
    variables = {
        "RAY_AUTH_MODE": "disabled",
        DRAIN_VARIABLE: "15",  # as rendered for pods with 30 s
        "PYTHONPATH": str(PROJECT / "tests" / "support" / "slow_passes"),
        "SLOW_PASSES_WHILE": str(slow),
        "SLOW_PASSES_FROM": "2",
    }
    with (
        ray_head(["--num-cpus=0", "--object-store-memory=120000000"], variables=variables) as head,
        ray_node(head, cpus=6) as stays,
        ray_node(head, cpus=6) as lost,
        cluster_state(head.address) as state,
    ):
        driver = Driver(
            tmp_path / "recipe.yaml", Path(recipe.storage), {**head.environment, "RAY_ADDRESS": head.address}
        )
        driver.wait_for(lambda: "step 2, loss" in driver.log.read_text())
        assert sorted(trainers_nodes(state)) == sorted([stays.node_id, lost.node_id])
        assert not saved_states(recipe)
        assert len(store.part_names()) < examples / batch
        notice = time.monotonic()
        lost.give_notice(head, seconds=30)
        driver.wait_for(lambda: saved_states(recipe))
        saved_s = time.monotonic() - notice
        step = json.loads(saved_states(recipe)[0].read_text())["step"]
        print(f"the state of step {step} was saved after {saved_s:.0f} s")
        assert step == 2  # not that of the end of the step that was under way
        assert saved_s < 30
        time.sleep(max(0, notice + 30 - time.monotonic()))
        lost.kill()
        slow.unlink()
        driver.wait_for(lambda: trainers_nodes(state) == [stays.node_id])
        assert driver.end() == 0, driver.log.read_text()
    assert_exactly_once(recipe)


def trainers_nodes(state: GlobalState) -> list[str]:
    """The nodes of the training workers that run now."""
    actors = state.actor_table(None, None, "ALIVE").values()
    return [actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"] == "RayTrainWorker"]


@pytest.mark.slow
def test_distill_on_several_workers_ends_after_too_many_failures(
    local_ray: None, streamed: Callable[..., Recipe]
) -> None:
    """The workers learn of it at different times, and must not wait for each other for ever."""
    recipe = streamed(
        runtime={
            "fake": {"fail_every": 2},
            "samplers": {"batch_size": 4},
            "trainers": {"strategy": "zero3", "workers": 2},
        }
    )
    with pytest.raises(UserError, match=r"\d+ of \d+ samples failed \(more than runtime.max_failed_fraction"):
        run_distill(recipe)
    assert artifact_of(recipe, "distill").manifest() is None
