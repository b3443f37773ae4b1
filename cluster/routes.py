"""Whether the rendered network policy lets the pods connect to what a study needs.

Only what no rule can allow is a fault. A policy sees the port of a pod, which may be another than that of its Service,
so that a rule for a namespace may allow any server in the cluster.
"""

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from .names import ENDPOINTS, PROXIES
from .network import NetworkSection
from .sections import PodsSection

_PORTS = {"http": 80, "https": 443}


class _Server(NamedTuple):
    """What a variable with the address of a server names."""

    scheme: str
    host: str
    port: int


def check_proxies(network: NetworkSection, pods: PodsSection) -> None:
    """Raises: ValueError if no rule can allow the connection to a proxy that `pods.env` names."""
    for name in PROXIES:
        if pods.env.get(name):
            problem = _closed(network, name, pods.env[name])
            if problem:
                raise ValueError(f"network.egress: {problem}")


def missing_route(network: NetworkSection, pods: PodsSection, url: str) -> str | None:
    """What keeps the pods from opening a URL; None if a rule may allow it. Also for hub models: `hf://`.

    Raises:
        ValueError: if a variable with the address of the store has none.
    """
    secrets = {secret.env for secret in pods.secrets}
    for name in ENDPOINTS.get(url.partition("://")[0], ()):
        if name in secrets:  # its value is not known here
            return None
        if pods.env.get(name):
            scheme = _server(name, pods.env[name]).scheme
            return None if _proxied(pods, scheme) else _closed(network, name, pods.env[name])
    if network.reaches_addresses or _proxied(pods, "https"):
        return None
    return "no rule lets the pods connect to it; add for example {cidr: 0.0.0.0/0}, which allows port 443"


def _closed(network: NetworkSection, name: str, value: str) -> str | None:
    """Why the pods cannot connect to the server that a variable names, or None."""
    server = _server(name, value)
    if network.may_reach(server.host, server.port):
        return None
    return (
        f"no rule lets the pods connect to port {server.port} of {name}; add for example {{cidr: 10.0.20.15/32, ports: "
        f"[{server.port}]}} with its address, or, if it runs in the cluster, its namespace and the port of its pods"
    )


def _server(name: str, value: str) -> _Server:
    """As libraries read the variable: without a scheme it is http."""
    try:
        url = urlsplit(value if "://" in value else f"http://{value}")
        server = _Server(url.scheme, url.hostname or "", url.port or _PORTS[url.scheme])
    except (KeyError, ValueError):
        server = None
    if server is None or not server.host:
        example = "http://proxy.example.org:3128" if name in PROXIES else "http://minio.storage:9000"
        raise ValueError(f"pods.env: {name}: expected the address of a server, for example {example}")
    return server


def _proxied(pods: PodsSection, scheme: str) -> bool:
    """Whether connections of a scheme go through a proxy, as far as the names of the variables tell."""
    variables: Mapping[str, str] = {**pods.env, **{secret.env: "in a Secret" for secret in pods.secrets}}
    names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    return any(variables.get(name) for name in names)
