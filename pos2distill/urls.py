"""Paths and URLs that a user gave, opened through fsspec or rejected with one line."""

import contextlib
import functools
import http
import http.client
import logging
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pos2distill.errors import TransientError, UserError
from pos2distill.faults import (
    error_file,
    error_text,
    fix_hint,
    is_about_credentials,
    is_fault,
    is_missing,
    is_permanent,
)

_ANSWER_SECONDS = 10.0

# It logs the traceback of every failed request, which is raised as well.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def open_url(url: str, setting: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system and the path in it.

    Args:
        setting: the setting that holds the URL, for the message.
    Raises:
        UserError: for an unknown protocol, or one whose package is not installed; if the storage refuses to be opened.
    """
    with storage_errors(url, setting):
        address = _address(url)
        if address is not None:
            require_answer(address, _ANSWER_SECONDS)
        try:
            # No cached listings: other processes write to the same folders.
            fs, path = fsspec.url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError, TypeError) as error:  # TypeError: options in a URL that its storage lacks
            raise UserError(f"{url}: cannot be opened ({error}) ({setting})") from None
    return fs, path


def as_url(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """A path in a file system as a user writes it: with its protocol, if it is not of this machine."""
    return path if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(path))


@contextmanager
def storage_errors(url: str, setting: str) -> Iterator[None]:
    """Turn what a storage raises into one line with the likely fix (see `faults`). Other exceptions pass.

    Args:
        setting: as in `open_url`.
    Raises:
        UserError: instead of the storage's own exception, if the permission or the file is missing.
        TransientError: instead of any other exception of the storage.
    """
    try:
        yield
    except Exception as error:
        cause = why_not_found(error) or error
        if not is_fault(cause):
            raise
        source = cause.__cause__
        # s3fs 2026.9 makes OSErrors of botocore's errors, without their status and code.
        if not is_permanent(cause) and source is not None and is_about_credentials(source):
            cause = source
        kind = UserError if is_permanent(cause) else TransientError
        reason = f"{error_text(cause)}{error_file(cause, url)}"
        raise kind(f"{url}: cannot be used ({reason}) ({setting}){fix_hint(cause, url)}") from None


def why_not_found(error: BaseException) -> BaseException | None:
    """Why a file was not found, if it may well be there: fsspec's HTTP 2026.9 says so of any that it cannot fetch."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None or isinstance(cause, FileNotFoundError):
        return None
    return cause if is_fault(cause) and not is_missing(cause) else None


def _address(url: str) -> str | None:
    """The address of a server whose package would try for a minute or more to reach it; else None.

    Raises:
        UserError: if AWS_ENDPOINT_URL is not a URL.
    """
    protocol = url.partition("://")[0]
    # gcsfs 2026.10 retries for 50 s; botocore waits 60 s for a connection, several times.
    if protocol in ("gs", "gcs"):
        indirect = any(os.environ.get(name) for name in ("STORAGE_EMULATOR_HOST", "HTTPS_PROXY", "https_proxy"))
        return None if indirect else "https://storage.googleapis.com"
    if protocol in ("http", "https"):
        return url
    own = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if protocol in ("s3", "s3a") and own:
        try:
            address = urllib.parse.urlsplit(own)
            _ = address.port  # raises ValueError for an invalid port
        except ValueError:
            address = urllib.parse.urlsplit("")
        if address.scheme not in ("http", "https") or not address.hostname:
            raise UserError(f"AWS_ENDPOINT_URL: expected http://HOST:PORT or https://HOST:PORT, got '{own}'")
        return own
    return None


class _FaultOfServer(Exception):
    """The server can be reached, but fails: it may be silent the next time."""


def require_answer(address: str, timeout_s: float) -> None:
    """Any answer will do, also a refusal: what it says is for the package that sends the actual requests.

    Raises:
        OSError: if the server cannot be reached; a TimeoutError if it is silent.
        ValueError: if the address is not a URL.
    """
    with contextlib.suppress(_FaultOfServer):
        _ask(address, timeout_s)


@functools.lru_cache(maxsize=64)  # caches answers only: a failure raises
def _ask(address: str, timeout_s: float) -> None:
    request = urllib.request.Request(address, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=timeout_s).close()
    except urllib.error.HTTPError as answer:
        answer.close()
        # A server without HEAD is in order.
        if answer.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR and answer.code != http.HTTPStatus.NOT_IMPLEMENTED:
            raise _FaultOfServer from None
    except urllib.error.URLError as error:
        # An answer too: certificates are checked by that package, which may know others.
        if isinstance(error.reason, ssl.SSLError):
            return
        # It also repeats requests whose connection was lost.
        if isinstance(error.reason, OSError) and not isinstance(error.reason, (ConnectionResetError, BrokenPipeError)):
            raise error.reason from None
        raise _FaultOfServer from None
    except (http.client.HTTPException, ConnectionResetError, BrokenPipeError):
        raise _FaultOfServer from None
