"""A job's log over connections that break off, and what its end becomes."""

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from ray.job_submission import JobStatus

from pipelines.jobs import follow
from pos2distill.errors import UserError


class FaultyClient:
    """A job API whose connections break off: each tail ends where it is set to, the last one at the end of the log."""

    log = "one\ntwo\nthree\n"

    def __init__(self, *breaks: int, silent: bool = False) -> None:
        self.breaks = list(breaks)
        self.silent = silent

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        cut = self.breaks.pop(0) if self.breaks else len(self.log)
        for start in range(0, cut, 3):
            yield self.log[start : min(start + 3, cut)]
        if cut < len(self.log):
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")

    def get_job_logs(self, job: str) -> str:
        return self.log

    def get_job_info(self, job: str) -> SimpleNamespace:
        if self.silent:
            raise ConnectionError("nobody there")
        return SimpleNamespace(status=JobStatus.SUCCEEDED, submission_id=job, start_time=1)


def test_follow_prints_a_log_once_over_several_connections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipelines.jobs.follow.time.sleep", lambda seconds: None)
    assert follow.follow(FaultyClient(0, 5, 4), "job").status == JobStatus.SUCCEEDED  # type: ignore[arg-type]
    assert capsys.readouterr().out == FaultyClient.log


def test_follow_ends_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.jobs.follow.time.sleep", lambda seconds: None)
    monkeypatch.setattr(follow, "_UNREACHABLE_SECONDS", 0.05)
    with pytest.raises(UserError, match=r"^job: no answer from the cluster for 0 s \(nobody there\); the job may"):
        follow.follow(FaultyClient(silent=True), "job")  # type: ignore[arg-type]


def test_follow_ends_at_once_if_the_head_does_not_know_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.jobs.follow.time.sleep", lambda seconds: None)
    client = FaultyClient()

    def forget(job: str) -> None:
        raise RuntimeError(f"Request failed with status code 404: Job {job} does not exist.")

    monkeypatch.setattr(client, "get_job_info", forget)
    with pytest.raises(UserError, match=r"^job: the cluster does not know this job, .* run the same command to resume"):
        follow.follow(client, "job")  # type: ignore[arg-type]


def test_follow_ends_if_another_job_has_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head was started again, counts ids anew, and has taken the same command from someone else."""
    monkeypatch.setattr("pipelines.jobs.follow.time.sleep", lambda seconds: None)
    client = FaultyClient(0, 0)
    infos = [
        SimpleNamespace(status=JobStatus.RUNNING, submission_id="job", start_time=1),
        SimpleNamespace(status=JobStatus.SUCCEEDED, submission_id="job", start_time=2),
    ]
    monkeypatch.setattr(client, "get_job_info", lambda job: infos.pop(0))
    with pytest.raises(UserError, match=r"^job: the cluster does not know this job"):
        follow.follow(client, "job")  # type: ignore[arg-type]


def test_follow_waits_during_a_quiet_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock starts with the first call that fails, however long the log was followed before."""
    now = [0.0]
    shows = iter([5, 5, 9, 14])

    async def show(client: object, job: str, shown: int) -> int:
        now[0] += follow._UNREACHABLE_SECONDS + 1
        return next(shows)

    class Client(FaultyClient):
        calls = 0

        def get_job_info(self, job: str) -> SimpleNamespace:
            self.calls += 1
            if self.calls in (1, 3):
                raise ConnectionError("nobody there")
            status = JobStatus.SUCCEEDED if self.calls == 4 else JobStatus.RUNNING
            return SimpleNamespace(status=status, submission_id=job, start_time=1)

    monkeypatch.setattr(follow, "_show", show)
    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: now[0]))
    assert follow.follow(Client(), "job").status == JobStatus.SUCCEEDED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "exit_code", "message", "code", "ending"),
    [
        (JobStatus.SUCCEEDED, 0, "Job finished successfully.", 0, "job succeeded"),
        (JobStatus.FAILED, 2, "failed with exit code 2, last available logs (truncated):\nx", 2, "with exit code 2"),
        (JobStatus.FAILED, 1, "failed with exit code 1", 1, "job failed: failed with exit code 1"),
        (JobStatus.FAILED, 137, "failed with exit code 137", 1, "job failed: failed with exit code 137"),
        (JobStatus.FAILED, None, "runtime_env setup\nfailed", 1, "job failed: runtime_env setup failed"),
        (JobStatus.STOPPED, -15, None, 3, "job was stopped; the same command resumes it"),
    ],
)
def test_report_end_maps_every_end_to_an_exit_code(
    status: JobStatus,
    exit_code: int | None,
    message: str | None,
    code: int,
    ending: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    details = SimpleNamespace(status=status, submission_id="job", driver_exit_code=exit_code, message=message)
    assert follow.report_end(details) == code  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert said.endswith(f"{ending}\n")
    assert said.count("\n") == 1
