"""What is followed of a job's log, and from when on, as connections come and go."""

import subprocess
import time

import pytest

from cluster import job_log
from cluster.job_log import LogFollower


class Process:
    """A kubectl that runs until it has an exit code."""

    exit_code: int | None = None
    waited = False

    def poll(self) -> int | None:
        return self.exit_code

    def wait(self, timeout: float) -> int:
        self.waited = True
        if self.exit_code is None:
            raise subprocess.TimeoutExpired("kubectl", timeout)
        return self.exit_code


class Cluster:
    """A clock, and the processes that were started, each with its `since_s`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.started: list[tuple[Process, int | None]] = []

    def start_log(self, job: str, namespace: str, *, since_s: int | None = None) -> Process:
        assert (job, namespace) == ("nq", "team")
        self.started.append((Process(), since_s))
        return self.started[-1][0]

    @property
    def since(self) -> list[int | None]:
        return [since_s for _, since_s in self.started]

    def end(self, exit_code: int) -> None:
        """End the process that runs."""
        self.started[-1][0].exit_code = exit_code


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(job_log, "start_log", cluster.start_log)
    monkeypatch.setattr(time, "time", lambda: cluster.now)
    return cluster


@pytest.fixture
def follower(cluster: Cluster) -> LogFollower:
    return LogFollower("nq", "team")


def poll(follower: LogFollower, cluster: Cluster, seconds: float, attempt: int | None = 0) -> None:
    """Poll every five seconds, for so many seconds."""
    for _ in range(int(seconds / 5)):
        follower.update(attempt)
        cluster.now += 5


def test_log_is_followed_from_the_first_loss_while_no_connection_lasts(cluster: Cluster, follower: LogFollower) -> None:
    """The machine cannot be reached for a minute; each process ends with an error after some seconds."""
    poll(follower, cluster, 100)
    assert cluster.since == [None]
    for _ in range(6):
        cluster.end(1)
        poll(follower, cluster, 10)
    # All since it was last seen running is asked for, and a minute more.
    assert cluster.since == [None, 65, 75, 85, 95, 105, 115]
    poll(follower, cluster, 120)
    cluster.end(1)
    poll(follower, cluster, 5)
    assert cluster.since[7:] == [65]  # the last one has lasted, so that only what came after it is missing


@pytest.mark.parametrize("at_end", [False, True])
def test_log_is_followed_from_before_a_time_without_polls(
    cluster: Cluster, follower: LogFollower, *, at_end: bool
) -> None:
    """The cluster does not answer for five minutes, or the laptop sleeps; then the process has exited."""
    poll(follower, cluster, 100)
    cluster.now += 300
    cluster.end(1)
    if at_end:
        follower.finish(0)
    else:
        poll(follower, cluster, 5)
    assert cluster.since == [None, 365]


@pytest.mark.parametrize("lifetime", [60, 65, 100])
def test_log_is_not_printed_again_and_again_behind_a_proxy_that_closes_connections(
    cluster: Cluster, follower: LogFollower, lifetime: int
) -> None:
    for _ in range(4):
        poll(follower, cluster, lifetime)
        cluster.end(1)
    poll(follower, cluster, 5)
    assert cluster.since == [None, 65, 65, 65, 65]


def test_log_that_ends_without_error_is_opened_again_after_a_while(cluster: Cluster, follower: LogFollower) -> None:
    poll(follower, cluster, 10)
    cluster.end(0)
    poll(follower, cluster, 15)
    assert cluster.since == [None]
    poll(follower, cluster, 5)
    assert cluster.since == [None, 80]


def test_log_of_the_next_attempt_is_followed_from_its_beginning(cluster: Cluster, follower: LogFollower) -> None:
    poll(follower, cluster, 10)
    cluster.end(1)
    poll(follower, cluster, 10, None)
    poll(follower, cluster, 5, 1)
    assert cluster.since == [None, None]


def test_finish_prints_the_whole_log_of_a_job_that_was_never_seen_running(
    cluster: Cluster, follower: LogFollower
) -> None:
    """The cluster did not answer from its start to its end."""
    follower.finish(None)
    assert cluster.since == []
    follower.finish(0)
    assert cluster.since == [None]
    assert cluster.started[0][0].waited


def test_finish_prints_what_came_after_a_loss(cluster: Cluster, follower: LogFollower) -> None:
    poll(follower, cluster, 10)
    cluster.end(1)
    follower.finish(0)
    assert cluster.since == [None, 65]


def test_finish_prints_nothing_again_after_a_log_that_ended(cluster: Cluster, follower: LogFollower) -> None:
    poll(follower, cluster, 10)
    cluster.end(0)
    follower.finish(0)
    assert cluster.since == [None]


def test_finish_prints_an_attempt_that_came_and_went_unseen(cluster: Cluster, follower: LogFollower) -> None:
    poll(follower, cluster, 10)
    cluster.end(0)
    poll(follower, cluster, 300, None)
    follower.finish(1)
    assert cluster.since == [None, None]


def test_finish_reopens_a_log_that_ended_long_before_the_job(cluster: Cluster, follower: LogFollower) -> None:
    poll(follower, cluster, 10)
    cluster.end(0)
    follower.update(None)
    cluster.now += 280
    follower.finish(0)
    assert cluster.since == [None, 345]
