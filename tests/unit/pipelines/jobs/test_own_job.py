"""A job of a RayJob that ends with a user error stops itself, so that KubeRay does not try it again."""

import errno
import json
import os
import time
from typing import Any
from urllib.error import URLError

import pytest
from ray.exceptions import RayTaskError

from pipelines.cli import command_line, recipes
from pipelines.executors.ray.errors import find_fault, find_user_error
from pipelines.jobs import own_job
from pos2distill.errors import GateError, TransientError, UserError
from pos2distill.node_pools import GATE_FAILED, JOB_DASHBOARD_VARIABLE, NOT_RETRIED


class Client:
    """Ray's job client, which records what is stopped."""

    stopped: list[tuple[str, str]]

    def __init__(self, address: str) -> None:
        self.address = address

    def stop_job(self, job: str) -> bool:
        Client.stopped.append((self.address, job))
        return True


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is the driver of a job."""
    Client.stopped = []
    monkeypatch.setattr(own_job, "connect", Client)
    monkeypatch.setattr(own_job, "_STOP_SECONDS", 0.0)
    monkeypatch.setenv(JOB_DASHBOARD_VARIABLE, "http://127.0.0.1:8265")
    config = {"metadata": {"job_submission_id": "nq-x7k2p"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(config))


def run(monkeypatch: pytest.MonkeyPatch, error: Exception) -> int:
    def fail(*_: Any) -> int:
        raise error

    monkeypatch.setattr(recipes, "_run", fail)
    return command_line.main(["recipes"])


def test_main_stops_its_own_job_after_a_user_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, UserError("data.path: not found")) == 2
    assert Client.stopped == [("http://127.0.0.1:8265", "nq-x7k2p")]
    assert capsys.readouterr().out == f"{NOT_RETRIED}\n"


def test_main_stops_its_own_job_once_the_dashboard_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise KubeRay would repeat the user error on new clusters."""
    errors: list[Exception] = [UserError("no cluster answers"), ConnectionResetError("reset"), RuntimeError("503")]

    def connect(address: str) -> Client:
        if errors:
            raise errors.pop()
        return Client(address)

    monkeypatch.setattr(own_job, "connect", connect)
    monkeypatch.setattr(own_job, "_RETRY_SECONDS", 0.0)
    assert run(monkeypatch, UserError("data.path: not found")) == 2
    assert Client.stopped == [("http://127.0.0.1:8265", "nq-x7k2p")]
    assert capsys.readouterr().out.splitlines() == [
        NOT_RETRIED,
        *(f"nq-x7k2p: {reason}; trying again" for reason in ("503", "reset", "no cluster answers")),
    ]


def test_main_says_so_if_its_own_job_cannot_be_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(address: str) -> Client:
        raise ConnectionResetError("reset")

    monkeypatch.setattr(own_job, "connect", connect)
    monkeypatch.setattr(own_job, "_TRY_SECONDS", -1.0)
    assert run(monkeypatch, UserError("data.path: not found")) == 2
    assert capsys.readouterr().out == f"{NOT_RETRIED}\nnq-x7k2p could not be stopped: reset\n"


def test_main_stops_its_own_job_where_its_gate_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, GateError("the GAP is 9 percentage points")) == 1
    assert Client.stopped == [("http://127.0.0.1:8265", "nq-x7k2p")]
    assert capsys.readouterr() == (f"{GATE_FAILED}\n", "gate failed: the GAP is 9 percentage points\n")


@pytest.mark.parametrize(
    "words", [["study", "quickstart", "--no-such-option"], ["stduy"], ["recipes", "quickstart", "x"]]
)
def test_main_stops_its_own_job_after_a_wrong_command_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(words)
    assert Client.stopped == [("http://127.0.0.1:8265", "nq-x7k2p")]
    assert capsys.readouterr().out == f"{NOT_RETRIED}\n"


def test_main_stops_nothing_after_the_help() -> None:
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["--help"])
    assert Client.stopped == []


@pytest.mark.parametrize(
    "error",
    [
        TransientError("s3://b: cannot be used (timeout)"),
        ConnectionResetError("reset"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENOTCONN, "Transport endpoint is not connected"),
        URLError(ConnectionRefusedError(111, "Connection refused")),
    ],
)
def test_main_leaves_an_error_that_may_pass_to_a_retry_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """Attempts are few, and without the pause an outage would use them up in seconds."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert run(monkeypatch, error) == 2
    assert Client.stopped == []
    assert pauses == [900]
    assert capsys.readouterr().err.endswith("this attempt ends in 15 minutes, since the cause may pass\n")


@pytest.mark.parametrize("on_ray", [False, True])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_main_leaves_other_faults_to_a_retry_at_once(
    monkeypatch: pytest.MonkeyPatch, number: int, on_ray: bool
) -> None:
    """They may be of this attempt's machine, whether the driver met them or another process of its cluster."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("paused"))
    error = OSError(number, os.strerror(number))
    wrapped = RayTaskError("f", "", error)
    met = find_user_error(wrapped) or find_fault(wrapped) if on_ray else error
    assert met is not None
    assert run(monkeypatch, met) == 2
    assert Client.stopped == []


def test_main_pauses_in_no_other_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_DASHBOARD_VARIABLE)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("paused"))
    assert run(monkeypatch, TransientError("s3://b: cannot be used (timeout)")) == 2


def test_main_outside_a_job_stops_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    assert run(monkeypatch, UserError("data.path: not found")) == 2
    monkeypatch.delenv(JOB_DASHBOARD_VARIABLE)
    assert run(monkeypatch, UserError("data.path: not found")) == 2
    assert Client.stopped == []
    assert NOT_RETRIED not in capsys.readouterr().out
