"""Whether the rendered network policy lets the pods connect to what a study needs.

Only a connection that no rule can allow is a fault. A policy sees the port of a pod, which may differ from that of its
Service, so a rule for a namespace may allow any server that may be in the cluster. Exceptions from proxies (`NO_PROXY`)
are not read.
"""

from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from .names import ENDPOINTS, PROXIES
from .network import NetworkSection
from .sections import PodsSection

_PORTS = {"http": 80, "https": 443}
_PROXY_PORTS = {**_PORTS, "socks5": 1080, "socks5h": 1080}
# The server of a URL without a host, unless a variable names another server.
_SERVICES = {"s3": "s3.amazonaws.com", "gs": "storage.googleapis.com", "hf": "huggingface.co"}
_IGNORE_PROXIES = ("gs", "http", "https")  # gcsfs 2026.10 and fsspec's http: aiohttp reads no variables by itself


@dataclass(frozen=True, slots=True)
class _Server:
    """A server that pods connect to. name: for messages."""

    name: str
    scheme: str
    host: str
    port: int


def check_addresses(network: NetworkSection, pods: PodsSection) -> None:
    """Reject invalid addresses of stores and proxies in `pods.env`, and proxies that no rule can allow.

    Raises:
        ValueError: naming the variable.
    """
    for variables in ENDPOINTS.values():
        for name in variables:
            if pods.env.get(name):
                _server(name, pods.env[name])
    for name in PROXIES:
        if pods.env.get(name):
            server = _server(name, pods.env[name])
            if not network.may_allow(server.host, server.port):
                raise ValueError(f"network.egress: {_no_rule(server)}")


def egress_problem(
    network: NetworkSection, pods: PodsSection, url: str, *, client_reads_proxies: bool = False
) -> str | None:
    """What keeps the pods from opening a URL, or a hub model as `hf://NAME`; None if a rule may allow it.

    Args:
        client_reads_proxies: whether the client of an http URL connects through the proxy that a variable names.
    """
    scheme = url.partition("://")[0]
    server = _destination(pods, scheme, url)
    if server is None:
        return None
    is_outside = server.host in _SERVICES.values()
    if network.allows_port(server.port) if is_outside else network.may_allow(server.host, server.port):
        return None
    reads_proxies = client_reads_proxies or scheme not in _IGNORE_PROXIES
    if reads_proxies and _has_proxy(pods, server.scheme):
        return None
    return _no_rule(server)


def _destination(pods: PodsSection, scheme: str, url: str) -> _Server | None:
    """The server that a URL is opened from; None if it is not known here."""
    if scheme in _PORTS:
        try:
            server = _server("it", url)
            return replace(server, name=server.host)
        except ValueError:  # the study's own checks reject the URL
            return None
    secrets = {secret.env for secret in pods.secrets}
    for name in ENDPOINTS[scheme]:
        if name in secrets:
            return None
        if pods.env.get(name):
            return _server(name, pods.env[name])
    return _Server("it", "https", _SERVICES[scheme], 443)


def _server(name: str, address: str) -> _Server:
    try:
        url = urlsplit(address)
        default = (_PROXY_PORTS if name in PROXIES else _PORTS)[url.scheme]
        server = _Server(name, url.scheme, url.hostname or "", default if url.port is None else url.port)
    except (KeyError, ValueError):
        server = None
    if server is None or not server.host or server.port == 0:
        example = "http://proxy.example.org:3128" if name in PROXIES else "http://minio.storage:9000"
        raise ValueError(f"pods.env: {name}: expected the URL of a server, for example {example}")
    return server


def _has_proxy(pods: PodsSection, scheme: str) -> bool:
    """Whether a variable names a proxy for connections of a scheme."""
    names = {name for name, value in pods.env.items() if value} | {secret.env for secret in pods.secrets}
    return any(name.lower() in (f"{scheme}_proxy", "all_proxy") for name in names)


def _no_rule(server: _Server) -> str:
    if server.host in _SERVICES.values() and server.port == 443:
        return "no rule lets the pods connect to it; add for example {cidr: 0.0.0.0/0}, which allows port 443"
    return (
        f"no rule lets the pods connect to port {server.port} of {server.name}; add for example {{cidr: 10.0.20.15/32, "
        f"ports: [{server.port}]}} with its address, or, if it runs in the cluster, its namespace and the port of its "
        f"pods"
    )
