import pytest
import ray

from pipelines.executors.ray.connection import require_resources, warn_of_unused_cluster_gpus
from pos2distill.config import EndpointSection, PoolSection, Runtime
from pos2distill.errors import UserError, warn_once
from pos2distill.node_pools import POOLS_LABEL


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
