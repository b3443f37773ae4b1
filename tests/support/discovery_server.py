"""A Kubernetes API on loopback that knows kinds and no objects: enough for the client side of kubectl."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.servers import running

# Kinds with the names of their resources, by API version.
_RESOURCES = {
    "v1": {
        "serviceaccounts": "ServiceAccount",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
    },
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "monitoring.coreos.com/v1": {"podmonitors": "PodMonitor"},
    "ray.io/v1": {"rayjobs": "RayJob", "rayclusters": "RayCluster"},
}


def _groups() -> dict[str, Any]:
    groups = []
    for version in _RESOURCES:
        name, slash, number = version.partition("/")
        if slash:
            entry = {"groupVersion": version, "version": number}
            groups.append({"name": name, "versions": [entry], "preferredVersion": entry})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(version: str) -> dict[str, Any]:
    verbs = ["create", "get", "patch"]
    resources = [
        {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
        for name, kind in _RESOURCES[version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if path == "/api":
            self._send(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            self._send(200, _groups())
        elif version in _RESOURCES:
            self._send(200, _resources(version))
        else:
            failure = {"status": "Failure", "reason": "NotFound", "code": 404, "message": "not found"}
            self._send(404, {"kind": "Status", "apiVersion": "v1", **failure})

    def _send(self, code: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of each request."""


@contextmanager
def discovery_server() -> Iterator[str]:
    """The URL of a running server."""
    with running(ThreadingHTTPServer(("127.0.0.1", 0), _Handler)) as url:
        yield url
