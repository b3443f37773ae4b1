"""An S3-compatible store on loopback that fails at random: moto's server behind a middleware."""

import io
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from tests.support.servers import running

FAULTS = ("refused", "answer lost", "connection dropped", "answer cut")


class Faulty:
    """Fails some requests at random, before or after the store processed them, by each kind of fault in turn.

    Args:
        app: the store.
        fault_probability: the probability that a request fails, 0 to 1.
        seed: the seed of the random numbers; the clients determine the order of the requests.

    While `is_down` is true, every request is refused. While `hides_bucket` is true, this user may neither see whether
    the bucket exists nor create it, but list and change what is in it.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], fault_probability: float, seed: int) -> None:
        self.app = app
        self.fault_probability = fault_probability
        self.random = random.Random(seed)
        self.kinds = itertools.cycle(FAULTS)
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.is_down = False
        self.hides_bucket = False

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self.lock:
            fault = "answered"
            if self.is_down:
                fault = "refused"
            elif self.random.random() < self.fault_probability:
                fault = next(self.kinds)
            self.requests[fault] += 1
        if fault == "answered" and self.hides_bucket and _is_about_bucket(environ):
            start_response("403 Forbidden", [("Content-Length", "0")])
            return []
        if fault == "answered":
            return self.app(environ, start_response)
        # Werkzeug 3.1 waits for a body that was not read, and the client for the connection to close: both for ever.
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        if fault == "refused":
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return []
        if fault == "answer lost":
            list(self.app(environ, lambda *arguments: None))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []
        answer = b""
        if fault == "answer cut":
            answer = b"".join(self.app(environ, start_response))
        return self._drop(answer[: len(answer) // 2])

    def _drop(self, data: bytes) -> Iterator[bytes]:
        if data:
            yield data
        raise ConnectionAbortedError


def _is_about_bucket(environ: dict[str, Any]) -> bool:
    """Whether a request is about the bucket itself: HeadBucket, CreateBucket or GetBucketLocation."""
    is_for_bucket = "/" not in environ["PATH_INFO"].strip("/")
    return is_for_bucket and (environ["REQUEST_METHOD"] in ("HEAD", "PUT") or "location" in environ["QUERY_STRING"])


@contextmanager
def s3_server(fault_probability: float = 0.0, seed: int = 0, port: int = 0) -> Iterator[tuple[str, Faulty]]:
    """A running server: its URL, and the application, which counts the requests by what happened to them."""
    app = Faulty(DomainDispatcherApplication(create_backend_app), fault_probability, seed)
    server = make_server("127.0.0.1", port, app, threaded=True, request_handler=Quiet)
    with running(server) as url:
        yield url, app


class Quiet(MotoRequestHandler):
    def log(self, *arguments: Any) -> None:
        """Say nothing of each request."""

    def connection_dropped(self, *arguments: Any) -> None:
        """A dropped connection is closed without an answer."""
        self.close_connection = True
