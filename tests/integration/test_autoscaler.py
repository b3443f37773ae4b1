"""The groups of a rendered manifest on Ray's own autoscaler: each kind of work gets its own nodes, and they scale."""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.render import render
from cluster.spec import load_cluster
from pos2distill.config import Recipe
from tests.support.autoscaler import autoscaling_cluster
from tests.support.drivers import Driver
from tests.support.results import read_steps, sample_store
from tests.support.tiny import write_examples

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]

# The groups of an example, small enough for two cores: idle samplers are removed soon, the trainer is kept.
SMALL = [
    *("sampling.max=2", "sampling.node.cpus=2", "sampling.node.gpus=1", "sampling.idle_timeout_s=5"),
    *("training.min=1", "training.max=1", "training.node.cpus=2", "training.node.gpus=1"),
]

EXAMPLES = 200
SAMPLER, TRAINER = "MapWorker(MapBatches(samplers))", "RayTrainWorker"  # as Ray names their classes


def test_autoscaler_adds_and_removes_samplers_while_training_stays(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """A streamed run on an empty cluster: nodes are added; samplers are removed after sampling; training continues."""
    write_examples(tmp_path / "data.jsonl", 600, 6)
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
    store = sample_store(recipe)
    with autoscaling_cluster(render(load_cluster("onprem", SMALL))[-1]) as cluster:
        assert cluster.wait_until(lambda groups: groups == Counter(training=1), 60), cluster.history
        driver = Driver(tmp_path / "recipe.yaml", Path(recipe.storage), cluster.environment)
        driver.wait_for(lambda: 4 * len(store.part_names()) == EXAMPLES)
        driver.wait_for(lambda: not cluster.groups()["sampling"])
        driver.wait_for(lambda: (steps := read_steps(recipe)) and steps[-1]["epoch"] > 1)
        assert driver.end(signal.SIGINT) == 130, driver.log.read_text()
        assert cluster.most("sampling") == 2, cluster.history
        assert cluster.groups() == Counter(training=1), cluster.history
        assert all(groups["training"] == 1 for _, groups in cluster.history[1:]), cluster.history
        where = cluster.actors
    assert where[SAMPLER] == {"sampling"}
    assert where[TRAINER] == {"training"}
    elsewhere = {name: groups for name, groups in where.items() if name not in (SAMPLER, TRAINER)}
    assert {"TrainController", "PreemptionWatcher", "SplitCoordinator", "RunCoordinatorActor"} <= elsewhere.keys()
    assert all(groups == {""} for groups in elsewhere.values()), elsewhere  # none keeps a node that has no work
