"""The client of a Ray cluster's job API."""

import ipaddress
import logging
import os
import urllib.parse
from pathlib import Path
from typing import Any

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from pos2distill.environment import ignore_ray_addresses
from pos2distill.errors import UserError, collapse_whitespace

TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")

REQUEST_ERRORS = (OSError, RuntimeError, AuthenticationError)
"""What a request can raise. In Ray 2.60 an AuthenticationError, of status 401 or 403, is neither of the others: a token
or a session can expire while a job is followed."""

_ANSWER_SECONDS = 60.0
_REASON_LENGTH = 200


def reason_of(error: Exception) -> str:
    """What an error of the job API says, in one line."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, AuthenticationError):
        # Ray 2.60 appends advice about tokens, which does not fit a proxy's refusal.
        text = error.message
    else:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Ray 2.60 answers with the traceback of the head, whose last line says what is wrong. A proxy's page follows
        # the status code.
        text = lines[-1 if "Traceback" in lines[0] else 0]
    return collapse_whitespace(text, _REASON_LENGTH)


class RequestFailures:
    """Prints each error once, until requests succeed or the error changes: the log's end says how the job ended."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._shown = ""

    def show(self, error: Exception) -> None:
        """Print the error, unless it is the one that was printed last."""
        reason = reason_of(error)
        if reason != self._shown:
            print(f"{self._job}: {reason}; trying again", flush=True)
            self._shown = reason

    def end(self) -> None:
        """Requests succeed again, so that the next error is a new one."""
        self._shown = ""


class _Client(JobSubmissionClient):
    """Waits for an answer no longer than a minute: a head whose machine was lost closes no connection."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        # Ray 2.60 passes further options to `requests.request`.
        options["timeout"] = _ANSWER_SECONDS
        host = urllib.parse.urlsplit(self._address).hostname or ""
        if is_this_machine(host):
            # Otherwise the proxy of HTTP_PROXY would get the request, and with it the token, without encryption.
            options["proxies"] = {"no_proxy": host}
        response: requests.Response = super()._do_request(method, endpoint, **options)
        return response


def is_this_machine(host: str) -> bool:
    """Whether requests to this host stay on this machine, if no proxy gets them."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, whatever it resolves to today


def connect(address: str) -> JobSubmissionClient:
    """A client of the cluster's job API.

    Raises:
        UserError: if no cluster answers, or it refuses the token.
    """
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", ""))
    if token.name and not os.environ.get("RAY_AUTH_TOKEN") and not token.is_file():
        raise UserError(f"{token}: no such file (RAY_AUTH_TOKEN_PATH)")
    ignore_ray_addresses()
    # Their own messages would be mixed with the job's log.
    for module in ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{module}").setLevel(logging.WARNING)
    try:
        return _Client(address)
    except AuthenticationError as error:
        # Ray 2.60 raises the same error for a missing and for a wrong token; only its text distinguishes them.
        if "401" in str(error) or "Missing" in str(error):
            raise UserError(f"{address}: requires a token; set {TOKENS[0]} or {TOKENS[1]}") from None
        raise UserError(f"{address}: refuses the token of {TOKENS[0]} or {TOKENS[1]}") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{address}: no Ray cluster answers at this address ({reason_of(error)})") from None
