"""The client of the job API, between a dashboard and a proxy that are both on this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import ray

from pipelines.jobs.client import connect, is_this_machine
from tests.support.servers import running

Requests = list[str]
"""The address that each request names."""


@contextmanager
def dashboard() -> Iterator[tuple[str, Requests]]:
    """A server that answers every request as a dashboard does that is asked for its version."""
    requests: Requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            answer = json.dumps({"version": "4", "ray_version": ray.__version__, "ray_commit": "0"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            """Print nothing of each request."""

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url.removeprefix("http://"), requests


@pytest.fixture(autouse=True)
def no_exceptions_from_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_connect_sends_no_token_for_this_machine_to_a_proxy(
    monkeypatch: pytest.MonkeyPatch, host: str, variable: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    with dashboard() as (address, asked), dashboard() as (proxy, passed):
        monkeypatch.setenv(variable, f"http://{proxy}")
        connect(f"http://{address.replace('127.0.0.1', host)}")
        assert set(asked) == {"/api/version"}
        assert passed == []


def test_connect_asks_another_machine_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with dashboard() as (proxy, passed):
        for variable in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(variable, f"http://{proxy}")
        connect("http://head.example:8265")
        assert set(passed) == {"http://head.example:8265/api/version"}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("head", False),
    ],
)
def test_is_this_machine(host: str, expected: bool) -> None:
    assert is_this_machine(host) == expected
