"""The pools of a rendered manifest on Ray's own autoscaler: work finds its nodes, and nodes come and go with it."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.render import render
from cluster.spec import load_cluster
from pos2distill.config import Recipe
from tests.conftest import _write_examples
from tests.integration.autoscaler import autoscaling_cluster
from tests.integration.conftest import PROJECT

# An example's groups at a size that two cores can play: idle nodes go soon, the trainer's stays.
SMALL = [
    *("sampling.max=2", "sampling.node.cpus=2", "sampling.node.gpus=1", "sampling.idle_timeout_s=5"),
    *("training.min=1", "training.max=1", "training.node.cpus=2", "training.node.gpus=1"),
]


@pytest.fixture(scope="session")
def local_ray() -> None:
    """Not wanted here."""


def test_samplers_come_and_go_while_training_stays(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """A streamed run from an empty cluster: nodes come for work, samplers go once all is sampled, training goes on."""
    _write_examples(tmp_path / "data.jsonl", 600, 6)
    make_recipe(
        model={"engine": "fake"},
        data={"train_examples": 200, "evaluation_examples": 2},
        method={"name": "seqkd", "k": 1},
        training={"batch_rows": 8, "epochs": 18},
        runtime={
            "fake": {"delay_s": 0.7},
            "samplers": {"min": 1, "max": 2, "batch_size": 4, "concurrent_batches": 1, "gpus": 1},
            "trainers": {"micro_batch_rows": 8},
        },
    )
    with autoscaling_cluster(render(load_cluster("onprem", SMALL))[-1]) as cluster:
        assert cluster.wait_until(lambda groups: groups == Counter(training=1), 60), cluster.history
        done = subprocess.run(
            [sys.executable, "run.py", "distill", str(tmp_path / "recipe.yaml")],
            cwd=PROJECT,
            env=cluster.environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        ended = cluster.seconds()
        assert cluster.most("sampling") == 2
        last = max(place for place, (_, groups) in enumerate(cluster.history) if groups["sampling"])
        gone, _ = cluster.history[last + 1]
        assert cluster.groups() == Counter(training=1), cluster.history
        assert all(groups["training"] == 1 for _, groups in cluster.history[1:]), cluster.history
        assert gone < ended - 5, (gone, ended, cluster.history)  # while later epochs still trained
        where = cluster.actors
        assert where["MapWorker(MapBatches(Answer))"] == {"sampling"}
        assert where["RayTrainWorker"] == {"training"}
        for name in ("TrainController", "DatasetManager", "SplitCoordinator", "_Board"):
            assert where[name] == {""}, where
