from typing import Any

import pytest
import ray

from pipelines.executors.ray.connection import (
    actor_arguments,
    pool_arguments,
    require_resources,
    trainer_arguments,
    warn_of_unused_cluster_gpus,
)
from pos2distill.config import EndpointSection, PoolSection, Runtime, TrainersSection
from pos2distill.errors import UserError, warn_once
from pos2distill.node_pools import POOLS_LABEL, SAMPLER_UNITS_PER_ACTOR, SAMPLING, TRAINING


@pytest.mark.parametrize("has_pools", [False, True])
def test_settings_of_the_runtime_become_rays_resources(monkeypatch: pytest.MonkeyPatch, *, has_pools: bool) -> None:
    labels = POOLS_LABEL if has_pools else {}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Labels": labels}])
    pool = PoolSection(min=2, max=5, batch_size=7, concurrent_batches=3, cpus=2, gpus=0.5, max_restarts=1)
    arguments = pool_arguments(pool)
    actors = arguments.pop("compute")
    assert (actors.min_size, actors.max_size, actors.max_concurrent_calls_per_actor) == (2, 5, 3)
    of_one: dict[str, Any] = {"num_cpus": 2, "num_gpus": 0.5, "max_restarts": 1, "max_task_retries": 1}
    of_one |= {"resources": {SAMPLING.resource: SAMPLER_UNITS_PER_ACTOR}} if has_pools else {}
    assert arguments == {"batch_size": 7, "batch_format": "pyarrow", **of_one}
    assert actor_arguments(pool) == of_one | ({"label_selector": SAMPLING.labels} if has_pools else {})
    assert trainer_arguments(TrainersSection(workers=2, max_workers=4, cpus=3, gpus=1)) == {
        "num_workers": (2, 4),
        "use_gpu": True,
        "resources_per_worker": {"CPU": 3, "GPU": 1} | ({TRAINING.resource: 1} if has_pools else {}),
        "label_selector": TRAINING.labels if has_pools else None,
    }


@pytest.mark.parametrize("address", [None, "local"])
def test_require_resources_rejects_what_this_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    require_resources("sampling", cpus=4, gpus=0)
    with pytest.raises(UserError, match="sampling needs 1 GPUs at the same time, this machine has 0; lower"):
        require_resources("sampling", cpus=4, gpus=1)


@pytest.mark.parametrize("has_pools", [False, True])
def test_require_resources_leaves_a_cluster_to_grow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_pools: bool
) -> None:
    warn_once.cache_clear()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 8.0})
    labels = POOLS_LABEL if has_pools else {}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Labels": labels}])
    for _ in range(2):
        require_resources("training while sampling", cpus=4, gpus=10)
    line = (
        "warning: training while sampling needs 10 GPUs at the same time, the cluster has 8 and must grow; if it "
        "cannot, lower the actors, workers or gpus under runtime\n"
    )
    assert capsys.readouterr().err == ("" if has_pools else line)


@pytest.mark.parametrize(
    ("address", "gpus", "runtime", "warns"),
    [
        ("10.0.0.1:6379", 8.0, Runtime(storage="s"), True),
        ("10.0.0.1:6379", 0.0, Runtime(storage="s"), False),
        ("10.0.0.1:6379", 8.0, Runtime(storage="s", samplers=PoolSection(gpus=1)), False),
        ("10.0.0.1:6379", 8.0, Runtime(storage="s", endpoint=EndpointSection(base_url="http://h")), False),
        ("local", 8.0, Runtime(storage="s"), False),  # checked before Ray starts
    ],
)
def test_warn_of_unused_cluster_gpus(
    address: str,
    gpus: float,
    runtime: Runtime,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    warn_once.cache_clear()
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0} | ({"GPU": gpus} if gpus else {}))
    for _ in range(2):
        warn_of_unused_cluster_gpus(runtime)
    line = (
        "warning: the cluster has 8 GPUs that this run does not use; add runtime.samplers.gpus=1 "
        "runtime.teachers.gpus=1 runtime.trainers.gpus=1 (docs/running.md)\n"
    )
    assert capsys.readouterr().err == (line if warns else "")
