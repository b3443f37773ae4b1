"""Ray's own autoscaler on this machine, with the groups of a rendered manifest: real raylets, real scaling, no GPUs.

The groups' labels, resources, limits and idle times are read from the manifest by the code with which Ray's autoscaler
reads them on Kubernetes, so manifest and routing cannot drift apart unseen.

    with autoscaling_cluster(render(spec)[-1]) as cluster:
        subprocess.run([...], env=cluster.environment)   # a driver; RAY_ADDRESS is set
        assert cluster.most("sampling") == 2

Ray's `AutoscalingCluster` does the like but is broken in the wheel (a file it needs is not packaged) and ends every Ray
of the machine.
"""

import contextlib
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ray._private.services import get_node_ip_address
from ray._private.state import GlobalState
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from tests.support.heads import cluster_state, free_ports, ray_head

_HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
_HEAD_TYPE = "ray.head.default"  # the fake provider knows it by this name
_STORE_BYTES = 120_000_000


class AutoscalingCluster:
    """A running cluster, and who has been there."""

    def __init__(self, address: str, environment: dict[str, str], state: GlobalState) -> None:
        self.address = address
        self.environment = environment
        self.history: list[tuple[float, Counter[str]]] = []
        self.actors: dict[str, set[str]] = {}  # the groups that actors of each class have run on; "" is the head
        self._start = time.monotonic()
        self._state = state

    def nodes(self) -> list[dict[str, Any]]:
        """The worker nodes that are there now: `group`, `labels` and `node_id`."""
        found = []
        for node in self._state.node_table():
            group = node["Labels"].get("ray.io/node-group", "")
            if node["Alive"] and group:
                found.append({"group": group, "labels": node["Labels"], "node_id": node["NodeID"]})
        return found

    def seconds(self) -> float:
        """Since the start, as in `history`."""
        return round(time.monotonic() - self._start, 1)

    def groups(self) -> Counter[str]:
        """How many nodes each group has now, without the head."""
        return Counter(node["group"] for node in self.nodes())

    def most(self, group: str) -> int:
        """The most nodes that a group has had at once."""
        return max((counts[group] for _, counts in self.history), default=0)

    def wait_until(self, happened: Callable[[Counter[str]], bool], timeout_s: float) -> bool:
        """Wait until `happened(groups())`; whether it did."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if happened(self.groups()):
                return True
            time.sleep(0.5)
        return False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Write every change of `groups()` into `history`, with the seconds since the start."""
        finished = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(finished,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            finished.set()
            watcher.join()

    def _watch(self, finished: threading.Event) -> None:
        while not finished.wait(0.3):
            groups = self.groups()
            if not self.history or self.history[-1][1] != groups:
                self.history.append((self.seconds(), groups))
            group_of = {
                node["NodeID"]: node["Labels"].get("ray.io/node-group", "") for node in self._state.node_table()
            }
            for actor in self._state.actor_table(None, None, "ALIVE").values():
                self.actors.setdefault(actor["ActorClassName"], set()).add(group_of[actor["Address"]["NodeID"]])


@contextlib.contextmanager
def autoscaling_cluster(manifest: dict[str, Any]) -> Iterator[AutoscalingCluster]:
    """A head and an autoscaler that adds and removes nodes of the groups of a RayCluster's manifest.

    Args:
        manifest: as `cluster.render.render` makes it of a spec without a recipe. GPUs and CPUs of its nodes are names
            only here, but keep CPUs few: Ray starts a process for each.
    """
    host, (port,) = get_node_ip_address(), free_ports(1)
    config = _config(manifest, f"{host}:{port}")
    head = config["available_node_types"][_HEAD_TYPE]
    identity = {"RAY_CLOUD_INSTANCE_ID": _HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID}
    variables = {"RAY_AUTH_MODE": "disabled"}
    of_start = {
        **identity,
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        options = [
            f"--autoscaling-config={file.name}",
            f"--num-cpus={head['resources']['CPU']}",
            f"--labels={','.join(f'{key}={value}' for key, value in head['labels'].items())}",
            f"--object-store-memory={_STORE_BYTES}",
        ]
        with (
            ray_head(options, host=host, port=port, variables=variables, start_variables=of_start) as head,
            cluster_state(head.address) as state,
        ):
            cluster = AutoscalingCluster(head.address, {**head.environment, "RAY_ADDRESS": head.address}, state)
            with cluster.watched():
                yield cluster


def _config(manifest: dict[str, Any], address: str) -> dict[str, Any]:
    config = _derive_autoscaling_config_from_ray_cr(manifest)
    types = config["available_node_types"]
    types[_HEAD_TYPE] = types.pop(config["head_node_type"])
    for name, each in types.items():
        if name != _HEAD_TYPE:
            each["labels"]["ray.io/node-group"] = name  # which pods get by a variable of KubeRay's
        each["resources"].pop("memory", None)
        each["resources"]["object_store_memory"] = _STORE_BYTES
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": _HEAD_ID,
        "gcs_address": address,
    }
    return {**config, "provider": provider, "head_node_type": _HEAD_TYPE, "docker": {}}
