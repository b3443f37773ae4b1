import pytest
import ray

from pipelines.executors.ray.session import require_resources
from pos2distill.errors import UserError


@pytest.mark.parametrize("address", [None, "local"])
def test_require_resources_refuses_what_this_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    require_resources("sampling", cpus=4, gpus=0)
    with pytest.raises(UserError, match="sampling needs 1 GPUs at the same time, this machine has 0; lower"):
        require_resources("sampling", cpus=4, gpus=1)


def test_require_resources_leaves_a_cluster_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    require_resources("sampling", cpus=4, gpus=100)
