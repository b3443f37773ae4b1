import errno
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import aiohttp
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ProfileNotFound
from gcsfs.retry import HttpError
from google.auth.exceptions import DefaultCredentialsError
from s3fs.errors import translate_boto_error

from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.errors import TransientError, UserError
from pos2distill.store.storage import check_storage
from pos2distill.tasks.data_files import file_digest
from pos2distill.urls import open_url, require_answer, storage_errors

CREDENTIALS = "; check the credentials of the storage and their rights"
DISK = "; free space there, or use another disk (runtime.storage; TMPDIR for temporary files)"
RIGHTS = "; check the permissions of the file and of its folder"
PROFILE = "; set AWS_PROFILE to a profile of ~/.aws/config, or unset it"
GCS_MESSAGE = "Forbidden: https://storage/b storage.objects.list access denied"
NETWORK = "; check the network and AWS_ENDPOINT_URL"


def test_open_url_rejects_an_unknown_protocol() -> None:
    with pytest.raises(UserError, match=r"^nope://x: cannot be opened \(Protocol not known: nope\) \(data.path\)$"):
        open_url("nope://x", "data.path")


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (NoCredentialsError(), "Unable to locate credentials", CREDENTIALS),
        (DefaultCredentialsError("no default\nsee the documentation"), "no default", CREDENTIALS),
        (
            EndpointConnectionError(endpoint_url="http://127.0.0.1:9"),
            'Could not connect to the endpoint URL: "http://127.0.0.1:9"',
            NETWORK,
        ),
        (PermissionError(13, "Permission denied"), "Permission denied", CREDENTIALS),
        (OSError(28, "No space left on device"), "No space left on device", DISK),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused", NETWORK),
        (ProfileNotFound(profile="nope"), "The config profile (nope) could not be found", PROFILE),
        (PermissionError(13, "Permission denied", "/x"), "Permission denied: /x", RIGHTS),
        (TimeoutError(), "TimeoutError", NETWORK),
        (aiohttp.ClientConnectionError("Connection closed"), "Connection closed", NETWORK),
        (OSError("Forbidden: https://storage/b\nstorage.objects.list access denied"), GCS_MESSAGE, CREDENTIALS),
    ],
)
def test_storage_errors_become_one_line(error: Exception, reason: str, remedy: str) -> None:
    with pytest.raises(UserError) as raised, storage_errors("s3://b", "data.path"):
        raise error
    assert str(raised.value) == f"s3://b: cannot be used ({reason}) (data.path){remedy}"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "https://127.0.0.1:9/x", "gs://b/x", "hf://b/x"])
def test_storage_errors_names_the_endpoint_of_s3_for_s3_only(url: str) -> None:
    with pytest.raises(UserError) as raised, storage_errors(url, "data.path"):
        raise aiohttp.ClientConnectionError("Connection closed")
    assert str(raised.value) == f"{url}: cannot be used (Connection closed) (data.path); check the network"


@pytest.mark.parametrize(
    ("error", "is_transient"),
    [
        (NoCredentialsError(), True),  # a pod gets them from a server of its node, which may not answer yet
        (PermissionError(13, "Permission denied"), False),
        (FileNotFoundError(2, "No such file or directory"), False),
        (OSError("Forbidden: https://storage/b\ndenied"), False),  # as gcsfs 2026.10 raises it
        (HttpError({"code": 503, "message": "try again"}), True),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:9"), True),
        (TimeoutError(), True),
    ],
)
def test_storage_errors_tell_what_may_pass_from_what_does_not(error: Exception, is_transient: bool) -> None:
    with pytest.raises(UserError) as raised, storage_errors("s3://b", "data.path"):
        raise error
    assert isinstance(raised.value, TransientError) is is_transient


@pytest.mark.parametrize(
    ("code", "status", "reason", "is_transient"),
    [
        ("400", 400, "cannot be used (An error occurred (400) when calling the HeadObject operation: Why)", False),
        ("InvalidToken", 400, "cannot be used (An error occurred (InvalidToken) when calling", False),
        ("ExpiredToken", 400, "cannot be used (Why)", False),
        ("AccessDenied", 403, "cannot be used (Why)", False),
        ("SlowDown", 503, "cannot be used (Why)", True),
        ("OperationAborted", 409, "cannot be used (Why)", True),
        ("PreconditionFailed", 412, "cannot be used (Why)", True),
        ("Throttling", 400, "cannot be used (An error occurred (Throttling) when calling", True),
        ("QuotaExceeded", 403, "cannot be used (An error occurred (QuotaExceeded) when calling", True),
    ],
)
def test_storage_errors_looks_for_the_refusal_of_s3_behind_an_error_of_s3fs(
    code: str, status: int, reason: str, is_transient: bool
) -> None:
    refusal = ClientError(
        {"Error": {"Code": code, "Message": "Why"}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "HeadObject",
    )
    with pytest.raises(UserError) as raised, storage_errors("s3://b", "data.path"):
        raise translate_boto_error(refusal)
    assert str(raised.value).startswith(f"s3://b: {reason}")
    assert isinstance(raised.value, TransientError) is is_transient
    assert str(raised.value).endswith(CREDENTIALS) is not is_transient
    assert "check the disk" not in str(raised.value)


def test_storage_errors_reports_the_error_and_not_what_was_handled_before_it() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    full.__context__ = PermissionError(errno.EACCES, "Permission denied", "/root/.aws/credentials")
    message = r"^s3://b: cannot be used \(No space left on device\)"
    with pytest.raises(TransientError, match=message), storage_errors("s3://b", "data.path"):
        raise full


@pytest.mark.parametrize("error", [UserError("its own line"), ValueError("a fault of ours")])
def test_storage_errors_lets_other_exceptions_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, storage_errors("s3://b", "data.path"):
        raise error
    assert raised.value is error


def test_s3_without_credentials_is_one_line_wherever_it_is_first_used(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    # No file of the user, and no request to a cloud's metadata service.
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    message = "cannot be used (Unable to locate credentials)"
    with pytest.raises(UserError) as data:
        file_digest("s3://bucket/data.jsonl")
    assert str(data.value) == f"s3://bucket/data.jsonl: {message} (data.path){CREDENTIALS}"
    with pytest.raises(UserError) as model:
        make_plan(make_recipe(model={"path": "s3://bucket/model"}))
    assert str(model.value) == f"s3://bucket/model: {message} (model.path){CREDENTIALS}"
    with pytest.raises(UserError) as storage:
        check_storage("s3://bucket/run", "name")
    assert str(storage.value) == f"s3://bucket/run: {message} (runtime.storage){CREDENTIALS}"


class Refuses(BaseHTTPRequestHandler):
    """Answers with 403, or as a test sets it."""

    requests: list[str]
    status = 403

    def do_HEAD(self) -> None:
        self.requests.append(self.path)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_require_answer_takes_a_refusal_and_sends_no_further_request() -> None:
    Refuses.requests = []
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/data"
        for _ in range(3):
            require_answer(address, 10.0)
        server.shutdown()
        thread.join()
    assert Refuses.requests == ["/data"]


def test_require_answer_asks_again_after_a_lost_connection() -> None:
    """A server in an outage closes a connection, and is silent afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"

        def close_one() -> None:
            connection, _ = server.accept()
            connection.close()

        closing = threading.Thread(target=close_one)
        closing.start()
        require_answer(address, 1.0)
        closing.join()
        with pytest.raises(TimeoutError):
            require_answer(address, 1.0)


@pytest.mark.parametrize(("status", "requests"), [(501, 1), (503, 2)])
def test_require_answer_asks_a_server_that_fails_again(
    monkeypatch: pytest.MonkeyPatch, status: int, requests: int
) -> None:
    """501: it does not know HEAD, and is in order."""
    Refuses.requests = []
    monkeypatch.setattr(Refuses, "status", status)
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for _ in range(2):
            require_answer(f"http://127.0.0.1:{server.server_port}/data", 10.0)
        server.shutdown()
        thread.join()
    assert Refuses.requests == ["/data"] * requests


def test_require_answer_raises_for_a_silent_server_each_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                require_answer(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.2)
