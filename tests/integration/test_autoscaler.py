"""The pools of a rendered manifest on Ray's own autoscaler: work finds its nodes, and nodes come and go with it."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cluster.render import render
from cluster.spec import load_cluster
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


def test_samplers_come_and_go_and_work_finds_its_nodes(tmp_path: Path) -> None:
    with autoscaling_cluster(render(load_cluster("onprem", SMALL))[-1]) as cluster:
        assert cluster.wait_until(lambda groups: groups == Counter(training=1), 120), cluster.history
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.drive", str(tmp_path)],
            cwd=PROJECT,
            env=cluster.environment,
            capture_output=True,
            text=True,
            timeout=340,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        where = json.loads(done.stdout.splitlines()[-1])
        assert (where["trained"], where["prompted"], where["sampled"]) == (["training"], ["sampling"], ["sampling"])
        assert len(where["sampler"]) == 2
        assert cluster.most("sampling") == 2
        assert cluster.wait_until(lambda groups: groups == Counter(training=1), 110), cluster.history
        # The trainer's node was there all the time.
        assert all(groups["training"] == 1 for _, groups in cluster.history[1:]), cluster.history
