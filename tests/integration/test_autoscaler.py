"""The pools of a rendered manifest on Ray's own autoscaler: work finds its nodes, and nodes come and go with it."""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.render import render
from cluster.spec import load_cluster
from pipelines.plan import make_plan
from pipelines.stages.distill import read_steps
from pos2distill.config import Recipe
from pos2distill.store.samples import SampleStore
from tests.conftest import _write_examples
from tests.integration.autoscaler import autoscaling_cluster
from tests.integration.drivers import Driver

# An example's groups at a size that two cores can play: idle nodes go soon, the trainer's stays.
SMALL = [
    *("sampling.max=2", "sampling.node.cpus=2", "sampling.node.gpus=1", "sampling.idle_timeout_s=5"),
    *("training.min=1", "training.max=1", "training.node.cpus=2", "training.node.gpus=1"),
]

EXAMPLES = 200
SAMPLER, TRAINER = "MapWorker(MapBatches(Generate))", "RayTrainWorker"  # as Ray names their classes


@pytest.fixture(scope="session")
def local_ray() -> None:
    """Not wanted here."""


def test_samplers_come_and_go_while_training_stays(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """A streamed run from an empty cluster: nodes come for work, samplers go once all is sampled, training goes on."""
    _write_examples(tmp_path / "data.jsonl", 600, 6)
    recipe = make_recipe(
        model={"engine": "fake"},
        data={"train_examples": EXAMPLES, "eval_examples": 2},
        method={"name": "seqkd", "k": 1},
        training={"global_batch_rows": 8, "epochs": 1000},  # until it is stopped
        runtime={
            "fake": {"delay_s": 0.7},
            "samplers": {"min": 1, "max": 2, "batch_size": 4, "concurrent_batches": 1, "gpus": 1},
            "trainers": {"micro_batch_tokens": 4096},
            "checkpoints": {"steps": 20},  # with each, the steps so far can be read
        },
    )
    plan = make_plan(recipe)
    with autoscaling_cluster(render(load_cluster("onprem", SMALL))[-1]) as cluster:
        assert cluster.wait_until(lambda groups: groups == Counter(training=1), 60), cluster.history
        driver = Driver(tmp_path / "recipe.yaml", Path(recipe.storage), cluster.environment)
        driver.wait_for(lambda: 4 * len(SampleStore(plan.samples).part_names()) == EXAMPLES)
        driver.wait_for(lambda: not cluster.groups()["sampling"])
        driver.wait_for(lambda: (steps := read_steps(plan)) and steps[-1]["epoch"] > 1)  # training goes on
        assert driver.end(signal.SIGINT) == 130, driver.log.read_text()
        assert cluster.most("sampling") == 2, cluster.history
        assert cluster.groups() == Counter(training=1), cluster.history
        assert all(groups["training"] == 1 for _, groups in cluster.history[1:]), cluster.history
        where = cluster.actors
    assert where[SAMPLER] == {"sampling"}
    assert where[TRAINER] == {"training"}
    elsewhere = {name: groups for name, groups in where.items() if name not in (SAMPLER, TRAINER)}
    assert {"TrainController", "PreemptionWatcher", "SplitCoordinator", "ProgressTracker"} <= elsewhere.keys()
    assert all(groups == {""} for groups in elsewhere.values()), elsewhere  # none keeps a node that has no work
