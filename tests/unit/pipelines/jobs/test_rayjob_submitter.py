"""The submitter's pod, against a server that answers as Ray's dashboard does and closes the log's stream early."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from ray.exceptions import AuthenticationError

from pipelines.jobs import client, follow, rayjob_submitter
from pos2distill.errors import UserError
from pos2distill.node_pools import JOB_DEADLINE_VARIABLE

JOB = "nq-mistral-x7k2p"
ENTRYPOINT = "env --chdir=/opt/pos2distill python run.py study quickstart"


class Dashboard:
    """The part of Ray 2.60's job API that is used. A job runs until the log was requested `streams` times."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submitted: list[str] = []
        self.opened = 0
        self.forget_after: int | None = None  # the head is replaced after this many streams
        self.ignored_stops = 0  # requests to stop that come while the job is being submitted
        self.refusals = 0  # requests that a proxy whose session has expired refuses
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/api/version", self._version)
        app.router.add_get("/api/jobs/", self._list)
        app.router.add_post("/api/jobs/", self._submit)
        app.router.add_get("/api/jobs/{job}", self._info)
        app.router.add_post("/api/jobs/{job}/stop", self._stop)
        app.router.add_get("/api/jobs/{job}/logs", self._logs)
        app.router.add_get("/api/jobs/{job}/logs/tail", self._tail)
        runner = web.AppRunner(app, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "x"})

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(list(self.jobs.values()))

    async def _submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        job = body["submission_id"]
        if job in self.jobs:
            return web.Response(status=500, text=f"Job with submission_id {job} already exists")
        self.submitted.append(body["entrypoint"])
        self.jobs[job] = {
            **{"type": "SUBMISSION", "submission_id": job, "job_id": job, "entrypoint": body["entrypoint"]},
            **{"status": "RUNNING", "message": "", "metadata": {}},
        }
        return web.json_response({"job_id": job, "submission_id": job})

    async def _info(self, request: web.Request) -> web.Response:
        job = request.match_info["job"]
        if self.refusals:
            self.refusals -= 1
            return web.Response(status=403, text="session expired")
        if job not in self.jobs:
            return web.Response(status=404, text=f"Job {job} does not exist")
        return web.json_response(self.jobs[job])

    async def _stop(self, request: web.Request) -> web.Response:
        if self.ignored_stops:
            self.ignored_stops -= 1
            return web.json_response({"stopped": False})
        self.jobs[request.match_info["job"]]["status"] = "STOPPED"
        return web.json_response({"stopped": True})

    def _log(self) -> str:
        """A line more for every stream."""
        return "".join(f"line {number}\n" for number in range(self.opened))

    async def _logs(self, request: web.Request) -> web.Response:
        return web.json_response({"logs": self._log()})

    async def _tail(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["job"] not in self.jobs:
            return web.Response(status=404, text="Job does not exist")
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        self.opened += 1
        await stream.send_str(self._log())
        job = self.jobs[request.match_info["job"]]
        if self.forget_after == self.opened:
            self.jobs.clear()
        elif self.opened >= self.streams:
            job["status"] = "SUCCEEDED"
        await stream.close(code=1000)  # a normal end, after which `ray job logs --follow` ends with exit code 0
        return stream


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.setattr(rayjob_submitter, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(follow, "_UNREACHABLE_SECONDS", 0.5)
    server = Dashboard(streams=3)
    server.start()
    monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", f"127.0.0.1:{server.port}")  # KubeRay gives no scheme
    monkeypatch.setenv("RAY_JOB_SUBMISSION_ID", JOB)
    monkeypatch.setattr("sys.argv", ["submitter", ENTRYPOINT])
    yield server
    server.stop()


def test_main_outlives_streams_that_are_closed_while_the_job_runs(
    dashboard: Dashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rayjob_submitter.main() == 0
    assert dashboard.submitted == [ENTRYPOINT]
    assert dashboard.opened == 3
    output = capsys.readouterr().out
    assert output.splitlines() == ["line 0", "line 1", "line 2", f"{JOB}: SUCCEEDED"]


def test_main_attaches_to_a_job_that_an_earlier_pod_submitted(dashboard: Dashboard) -> None:
    dashboard.jobs[JOB] = {
        **{"type": "SUBMISSION", "submission_id": JOB, "job_id": JOB, "entrypoint": ENTRYPOINT},
        **{"status": "RUNNING", "message": "", "metadata": {}},
    }
    assert rayjob_submitter.main() == 0
    assert dashboard.submitted == []


def test_main_submits_again_to_a_head_that_does_not_know_the_job(dashboard: Dashboard) -> None:
    dashboard.forget_after = 1
    dashboard.streams = 6
    assert rayjob_submitter.main() == 0
    assert dashboard.submitted == [ENTRYPOINT, ENTRYPOINT]


def test_main_waits_for_a_head_that_does_not_answer_yet(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = []
    connect = client.connect

    def refuse_twice(address: str) -> Any:
        attempts.append(address)
        return connect("http://127.0.0.1:1" if len(attempts) < 3 else address)

    monkeypatch.setattr(rayjob_submitter, "connect", refuse_twice)
    assert rayjob_submitter.main() == 0
    # Once for both, so that the end of the log keeps what the job said.
    assert capsys.readouterr().out.count("no Ray cluster answers at this address") == 1
    assert len(attempts) == 3


@pytest.mark.parametrize("ignored_stops", [0, 2])
def test_main_stops_the_job_at_its_deadline(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, ignored_stops: int
) -> None:
    dashboard.streams = 1000
    dashboard.ignored_stops = ignored_stops
    monkeypatch.setenv(JOB_DEADLINE_VARIABLE, str(time.time() + 1))
    assert rayjob_submitter.main() == 0
    assert dashboard.jobs[JOB]["status"] == "STOPPED"


def test_stop_at_stops_a_job_that_a_new_head_runs_again(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head is replaced after the job was stopped for its deadline, and the job is submitted to the new one."""
    dashboard.streams = 1000
    address = f"http://127.0.0.1:{dashboard.port}"
    ended = threading.Event()
    threading.Thread(target=rayjob_submitter.stop_at, args=(address, JOB, time.time(), ended), daemon=True).start()
    client.connect(address).submit_job(entrypoint=ENTRYPOINT, submission_id=JOB)
    for _ in range(2):
        limit = time.monotonic() + 20
        while dashboard.jobs[JOB]["status"] != "STOPPED":
            assert time.monotonic() < limit
            time.sleep(0.05)
        dashboard.jobs[JOB]["status"] = "RUNNING"
    ended.set()


def test_failures_are_printed_again_after_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    failures = client.RequestFailures(JOB)
    for reason in ("no answer", "no answer", None, "no answer"):
        if reason is None:
            failures.end()
        else:
            failures.show(UserError(reason))
    assert capsys.readouterr().out.splitlines() == [f"{JOB}: no answer; trying again"] * 2


def test_main_outlives_requests_that_are_refused(dashboard: Dashboard) -> None:
    dashboard.refusals = 2
    assert rayjob_submitter.main() == 0
    assert dashboard.submitted == [ENTRYPOINT]


def test_reason_of_is_one_line_of_what_the_cluster_says() -> None:
    traceback = "Request failed with status code 500: Traceback\n  File x\nNo available agent to submit job."
    assert client.reason_of(RuntimeError(traceback)) == "No available agent to submit job."
    assert client.reason_of(RuntimeError()) == "RuntimeError"
    page = "Request failed with status code 502: <html>\r\n<body>Bad Gateway</body>\r\n</html>\r\n."
    assert client.reason_of(RuntimeError(page)) == "Request failed with status code 502: <html>"
    # The advice about tokens that Ray appends is left out.
    assert client.reason_of(AuthenticationError("session\nexpired")) == "session expired"


def test_a_request_ends_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head whose machine is lost: nothing closes the connection."""
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(UserError, match=r"no Ray cluster answers at this address \(.*timed out"):
            client.connect(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - started < 30
