"""Real `ray start`s for a test: ports and a folder of their own, ended by the ids of their own processes."""

import contextlib
import itertools
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from ray._private.state import GlobalState
from ray._raylet import GcsClient, GcsClientOptions  # type: ignore[attr-defined]  # compiled
from ray.core.generated import autoscaler_pb2

# What the tests' own Ray session leaves behind must not reach another Ray, nor what runs on it.
_OWN = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_JOB_CONFIG_JSON_ENV_VAR")

_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Head:
    """A running head."""

    address: str  # address of its GCS, for RAY_ADDRESS
    dashboard: str
    environment: dict[str, str]  # for processes that are to use it
    pid: int

    def kill(self) -> None:
        """As a machine that loses its power: all processes at once, also those of the jobs on it."""
        kill_tree(self.pid)


@dataclass(frozen=True)
class Node:
    """A running worker node of a head."""

    pid: int
    node_id: str

    def kill(self) -> None:
        """As a machine that loses its power: all its processes at once."""
        kill_tree(self.pid)

    def give_notice(self, head: Head, seconds: int) -> None:
        """Tell Ray, as a cloud's handler for spot machines does, that the node will be taken away.

        In this process: `ray drain-node`, which calls the same, takes seconds to start.
        """
        deadline_ms = (time.time_ns() // 1_000_000) + 1000 * seconds
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        is_accepted, why_not = GcsClient(head.address).drain_node(self.node_id, reason, "a test", deadline_ms)
        assert is_accepted, why_not


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment of the tests without what it says of Ray, with these variables."""
    kept = {name: value for name, value in os.environ.items() if name not in _OWN}
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", **variables}


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, all different, and that the kernel gives to nobody who asks for any.

    A port of the kernel's range may be given to another process (Ray has many) before the server of a test binds it.
    """
    lowest, highest = (int(port) for port in _KERNELS_PORTS.read_text().split())
    others = [port for port in range(20_000, 65_536) if not lowest <= port <= highest]
    random.shuffle(others)
    return list(itertools.islice(filter(_is_free, others), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder for Ray's sessions, whose sockets bear no long paths."""
    folder = Path(tempfile.mkdtemp(prefix="p2d-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_head(
    options: Sequence[str] = (),
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    dashboard_port: int | None = None,
    variables: Mapping[str, str],
    start_variables: Mapping[str, str] | None = None,
) -> Iterator[Head]:
    """Start a head and end it, with all its processes.

    Args:
        options: options of `ray start`, beside ports, folder and the dashboard on loopback.
        host: the node's address. port: the GCS's port. dashboard_port: the dashboard's port. Default: free ones.
        variables: environment variables of the head and of its drivers, such as those of token authentication.
        start_variables: environment variables of the head only.
    """
    gcs, dashboard, client = free_ports(3)
    gcs = port or gcs
    dashboard = dashboard_port or dashboard
    environment = clean_environment(**variables)
    with short_folder() as folder:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={folder}"),
            *(f"--node-ip-address={host}", f"--port={gcs}", f"--ray-client-server-port={client}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--dashboard-agent-listen-port=0"),
            *("--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats", *options),
        ]
        with open(folder / "start.log", "w") as log:
            process = subprocess.Popen(
                command, env={**environment, **(start_variables or {})}, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            _wait_for(process, host, [gcs, dashboard], folder / "start.log")
            yield Head(f"{host}:{gcs}", f"http://127.0.0.1:{dashboard}", environment, process.pid)
        finally:
            if process.poll() is not None:
                print(f"the head ended by itself:\n{(folder / 'start.log').read_text()[-4000:]}")
            end_tree(process.pid)


@contextlib.contextmanager
def ray_node(head: Head, cpus: int) -> Iterator[Node]:
    """A worker node beside the head, ended with all its processes."""
    with cluster_state(head.address) as state:

        def workers() -> set[str]:
            """The head may have come up without being listed yet."""
            nodes = [node for node in state.node_table() if node["Alive"]]
            return {node["NodeID"] for node in nodes if "node:__internal_head__" not in node["Resources"]}

        known = workers()
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={head.address}"),
            *("--node-ip-address=127.0.0.1", f"--num-cpus={cpus}", "--object-store-memory=120000000"),
            *("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"),
        ]
        process = subprocess.Popen(command, env=head.environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 90
            while not (new := workers() - known):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the node does not come up")
                time.sleep(0.2)
            yield Node(process.pid, new.pop())
        finally:
            end_tree(process.pid)


@contextlib.contextmanager
def cluster_state(address: str) -> Iterator[GlobalState]:
    """What a cluster's GCS knows of nodes and actors, read without becoming one of its drivers."""
    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(address, None, True, True))
    try:
        yield state
    finally:
        state.disconnect()


def kill_tree(pid: int) -> None:
    """Kill a process and all that descends from it at once, by their ids."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=10)


def end_tree(pid: int) -> None:
    """End a process and all that descends from it, by their ids."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=10)


def _wait_for(process: "subprocess.Popen[bytes]", host: str, ports: list[int], log: Path) -> None:
    waiting, end = list(ports), time.monotonic() + 90
    while waiting:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"ray start does not come up:\n{log.read_text()[-4000:]}")
        for port in list(waiting):
            # The dashboard is on loopback whatever the node's address is.
            for address in {host, "127.0.0.1"}:
                with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
                    waiting = [each for each in waiting if each != port]
        time.sleep(0.2)
