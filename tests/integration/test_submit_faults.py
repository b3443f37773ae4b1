"""`run.py submit` while the head is lost, the stream of the log is closed, and another command submits the same."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.job_submission import JobSubmissionClient

from pos2distill.config import Recipe
from tests.support.dashboard_proxy import DashboardProxy, dashboard_proxy
from tests.support.heads import Head, clean_environment, free_ports, ray_head
from tests.support.paths import PROJECT
from tests.support.results import (
    artifact_of,
    assert_exactly_once,
    counts_of,
    read_steps,
    sample_store,
    saved_states,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faults"), pytest.mark.timeout(1500)]

VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
OPTIONS = ["--num-cpus=6", "--object-store-memory=200000000"]


class Submission:
    """`run.py submit` in a process of its own. `said` grows while it runs."""

    def __init__(self, address: str, command: str, recipe: Path, *overrides: str) -> None:
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, "run.py", "submit", command, str(recipe), *overrides, "--address", address],
            cwd=PROJECT,
            env=clean_environment(RAY_AUTH_MODE="disabled"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def wait_for(self, condition: Callable[[], object], seconds: float = 500) -> None:
        """Until the condition holds, which it must before the command has ended."""
        for _ in range(int(seconds / 0.1)):
            if condition():
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
                break
        raise AssertionError(self.said)

    def end(self) -> int:
        """The exit code."""
        code = self.process.wait(600)
        self._reader.join(30)
        return code

    def last_line(self) -> str:
        """What it has said last."""
        return self.said.splitlines()[-1]

    def job(self) -> str:
        """The job that it has submitted."""
        return next(line.split()[0] for line in self.said.splitlines() if " submitted: " in line)


def test_submit_continues_after_the_head_was_lost(
    slow_study: Callable[..., Recipe], undisturbed_steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The machine of the head loses its power, and a new head comes up at its address."""
    lost = slow_study(str(tmp_path / "lost"), delay_s=2)
    path = tmp_path / "recipe.yaml"
    gcs, dashboard = free_ports(2)
    with ray_head(OPTIONS, port=gcs, dashboard_port=dashboard, variables=VARIABLES) as head:
        first = Submission(head.dashboard, "distill", path)
        first.wait_for(lambda: saved_states(lost))
        head.kill()
        assert not runs_anywhere(str(path.parent))
        stored = modification_times(lost)
        assert stored
    with ray_head(OPTIONS, port=gcs, dashboard_port=dashboard, variables=VARIABLES) as head:
        assert first.end() == 2, first.said
        assert first.last_line() == (
            f"error: {first.job()}: the cluster does not know this job, probably since its head was started again; "
            f"run the same command to resume it"
        )
        assert "Traceback" not in first.said
        again = Submission(head.dashboard, "distill", path)
        assert again.end() == 0, again.said
    assert again.last_line() == f"{again.job()} succeeded"
    times = modification_times(lost)
    assert {name: times[name] for name in stored} == stored  # what was stored was not sampled again
    assert_exactly_once(lost)
    assert read_steps(lost) == undisturbed_steps


def modification_times(recipe: Recipe) -> dict[str, int]:
    """Of the stored parts of the samples."""
    folder = Path(artifact_of(recipe, "sample").path) / "parts"
    return {name: (folder / name).stat().st_mtime_ns for name in sample_store(recipe).part_names()}


def runs_anywhere(word: str) -> list[list[str]]:
    """Processes other than `run.py submit` that have this word in their command."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "submit" not in words and any(word in each for each in words):
            found.append(words)
    return found


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head(OPTIONS, variables=VARIABLES) as started:
        yield started


@pytest.fixture
def proxy(head: Head) -> Iterator[DashboardProxy]:
    with dashboard_proxy(head.dashboard) as started:
        yield started


def test_submit_returns_the_exit_code_of_a_job_whose_stream_ended_early(
    slow_study: Callable[..., Recipe], proxy: DashboardProxy, tmp_path: Path
) -> None:
    slow_study(str(tmp_path / "run"), delay_s=2)
    proxy.early_ends = 2
    submission = Submission(proxy.address, "sample", tmp_path / "recipe.yaml", "data.path=/nowhere/data.jsonl")
    assert submission.end() == 2, submission.said
    assert "error: /nowhere/data.jsonl: no such file" in submission.said
    assert submission.last_line().startswith(f"{submission.job()} failed: ")


def test_submit_of_two_at_once_runs_one_job_and_follows_it_over_streams_that_end_early(
    slow_study: Callable[..., Recipe], head: Head, proxy: DashboardProxy, tmp_path: Path
) -> None:
    """Both find no job of the storage, and their requests to submit one reach the head at the same time.

    The first six streams end after one message, in turn as if the log were complete and by a broken connection.
    """
    run = slow_study(str(tmp_path / "run"), delay_s=2)
    proxy.together = 2
    proxy.early_ends = 6
    submissions = [Submission(proxy.address, "sample", tmp_path / "recipe.yaml") for _ in range(2)]
    assert [submission.end() for submission in submissions] == [0, 0], [each.said for each in submissions]
    assert proxy.submissions == 2
    jobs = [job for job in JobSubmissionClient(head.dashboard).list_jobs() if str(tmp_path) in str(job.metadata)]
    assert len(jobs) == 1
    name = jobs[0].submission_id
    first_lines = sorted(submission.said.splitlines()[0].partition(":")[0] for submission in submissions)
    assert first_lines == [f"{name} already runs this command; following it", f"{name} submitted"]
    assert proxy.streams > proxy.broken > 0  # both kinds of ends were met
    for submission in submissions:
        assert submission.last_line() == f"{name} succeeded"
        # Nothing is shown twice.
        assert submission.said.count("\nprepare ") == 1
        assert submission.said.count("sampled 24, kept 24, surplus 0") == 1
    assert counts_of(run, "sample")["sampled"] == counts_of(run, "sample")["kept"] == 24
