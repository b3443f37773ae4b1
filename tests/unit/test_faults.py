import errno
import json
import socket
import ssl
import urllib.error
from email.message import Message

import pytest
import requests
from aiohttp import InvalidURL
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ProfileNotFound
from botocore.exceptions import SSLError as BotocoreSSLError
from gcsfs.retry import HttpError, validate_response
from google.api_core.exceptions import PermissionDenied

from pos2distill.faults import describe, disk_is_full, is_transient, refuses_access

UNTRUSTED = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"
DEBUG = "; POS2DISTILL_DEBUG=1 shows the traceback"


def error_of_gcs(status: int, message: str) -> Exception:
    """What gcsfs raises for an answer of Google Cloud Storage."""
    try:
        validate_response(status, json.dumps({"error": {"code": status, "message": message}}), "https://storage/b/o")
    except (OSError, HttpError) as error:
        return error
    raise AssertionError("the answer is no error")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "/x"), "/x: No such file or directory"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "a disk: No space left on device; free space in runtime.storage and in TMPDIR, or choose others",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            "/x: No space left on device; free space there, or use another disk (runtime.storage; TMPDIR for temporary "
            "files)",
        ),
        (IsADirectoryError(21, "Is a directory", "/x"), "/x: Is a directory; expected a file, not a folder"),
        (
            ConnectionError("no Ray"),
            "ConnectionError: no Ray; check the network; run the same command again to continue",
        ),
        (
            EndpointConnectionError(endpoint_url="http://x"),
            'EndpointConnectionError: Could not connect to the endpoint URL: "http://x"; check the network and '
            "AWS_ENDPOINT_URL; run the same command again to continue",
        ),
        (
            NoCredentialsError(),
            "NoCredentialsError: Unable to locate credentials; check the credentials of the storage and their rights; "
            "run the same command again to continue",
        ),
        (
            error_of_gcs(403, "me@x does not have storage.objects.get access"),
            "OSError: Forbidden: https://storage/b/o me@x does not have storage.objects.get access; check the "
            "credentials of the storage and their rights",
        ),
        (
            error_of_gcs(401, "Anonymous caller does not have access"),
            "HttpError: Anonymous caller does not have access, 401; check the credentials of the storage and their "
            "rights",
        ),
        (
            PermissionDenied("no storage.folders.create"),
            "PermissionDenied: 403 no storage.folders.create; check the credentials of the storage and their rights",
        ),
        # As safetensors 0.8 raises it.
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            "a disk: I/O error: No space left on device (os error 28); free space in runtime.storage and in TMPDIR, or "
            "choose others",
        ),
    ],
)
def test_describe_is_one_line(error: Exception, line: str) -> None:
    assert describe(error) == line + DEBUG


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RuntimeError("x"), AssertionError()])
def test_describe_leaves_bugs_alone(error: Exception) -> None:
    assert describe(error) is None


def test_refuses_access_is_about_rights_and_settings_and_not_about_what_is_missing() -> None:
    def of_s3(code: str, status: int) -> ClientError:
        return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")

    assert refuses_access(of_s3("AccessDenied", 403))
    assert refuses_access(of_s3("ExpiredToken", 400))
    assert refuses_access(of_s3("KMS.DisabledException", 400))
    assert refuses_access(ProfileNotFound(profile="mine"))
    assert refuses_access(BotocoreSSLError(endpoint_url="https://x", error=UNTRUSTED))
    assert refuses_access(PermissionError(13, "Permission denied"))
    assert refuses_access(error_of_gcs(403, "denied"))
    assert not refuses_access(error_of_gcs(503, "try again"))
    # As gcsfs 2026.10 raises refusals to delete.
    assert refuses_access(OSError('{"error": {"code": 403, "message": "a hold"}}'))
    assert refuses_access(OSError("bucket/file: 403"))
    assert not refuses_access(OSError("bucket/file: 412"))
    assert not refuses_access(of_s3("NoSuchKey", 404))
    assert not refuses_access(of_s3("InvalidRange", 416))
    assert not refuses_access(of_s3("ConditionalRequestConflict", 409))
    assert not refuses_access(of_s3("SlowDown", 503))
    assert not refuses_access(EndpointConnectionError(endpoint_url="http://x"))
    assert not refuses_access(FileNotFoundError(2, "No such file or directory"))
    raised = RuntimeError("wrapped")
    raised.__cause__ = of_s3("AccessDenied", 403)
    assert refuses_access(raised)


def test_refuses_access_finds_a_refusal_that_from_none_hides() -> None:
    """`urls.storage_errors` raises so, and a checkpoint without rights must not be called corrupt."""
    raised = ValueError("not readable")
    raised.__context__ = PermissionError(13, "Permission denied")
    raised.__suppress_context__ = True
    assert refuses_access(raised)


def test_disk_is_full_knows_the_words_wherever_they_are() -> None:
    assert disk_is_full(RuntimeError("worker: OSError: [Errno 28] No space left on device"))
    assert not disk_is_full(OSError(13, "Permission denied"))


def test_describe_shortens_the_name_and_not_the_reason() -> None:
    line = describe(OSError(errno.ENAMETOOLONG, "File name too long", "x" * 3000))
    assert line == f"{'x' * 300}: File name too long; shorten the name{DEBUG}"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")), True),
        (urllib.error.URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")), True),
        (urllib.error.URLError(ssl.SSLCertVerificationError(1, "certificate verify failed")), False),
        (urllib.error.URLError(ssl.SSLEOFError(8, "EOF occurred in violation of protocol")), True),
        (urllib.error.URLError(OSError("Tunnel connection failed: 503 Service Unavailable")), True),
        (urllib.error.URLError(FileNotFoundError(errno.ENOENT, "No such file or directory")), False),
        (urllib.error.URLError("unknown url type: htp"), False),
        (urllib.error.HTTPError("http://a", 503, "Service Unavailable", Message(), None), True),
        (urllib.error.HTTPError("http://a", 429, "Too Many Requests", Message(), None), True),
        (urllib.error.HTTPError("http://a", 404, "Not Found", Message(), None), False),
        (urllib.error.HTTPError("http://a", 400, "Bad Request", Message(), None), False),
    ],
)
def test_is_transient_by_the_reason_why_an_address_could_not_be_opened(error: Exception, expected: bool) -> None:
    assert is_transient(error) is expected


def with_status(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(response=response)


def of_s3(status: int, code: str) -> ClientError:
    response = {"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "GetObject")  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_is_transient_accepts_statuses_of_overloaded_servers(status: int) -> None:
    assert is_transient(with_status(status))
    assert is_transient(of_s3(status, "SlowDown"))
    assert is_transient(urllib.error.HTTPError("http://a", status, "", Message(), None))


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 410, 451])
def test_is_transient_rejects_statuses_of_refused_requests(status: int) -> None:
    assert not is_transient(with_status(status))
    assert not is_transient(of_s3(status, "AccessDenied"))
    assert not is_transient(urllib.error.HTTPError("http://a", status, "", Message(), None))


def test_is_transient_accepts_a_request_timeout_of_s3() -> None:
    assert is_transient(of_s3(400, "RequestTimeout"))


@pytest.mark.parametrize(
    "error",
    [
        requests.exceptions.SSLError(UNTRUSTED),
        BotocoreSSLError(endpoint_url="https://x", error=UNTRUSTED),
        InvalidURL("htp://x"),
        ProfileNotFound(profile="x"),
    ],
)
def test_is_transient_rejects_errors_of_wrong_settings(error: Exception) -> None:
    assert not is_transient(error)


def test_is_transient_accepts_a_broken_ssl_connection() -> None:
    assert is_transient(requests.exceptions.SSLError("EOF occurred in violation of protocol"))
