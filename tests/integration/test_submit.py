"""Jobs on a real Ray cluster with token authentication: submitted, followed, stopped, killed and submitted again."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from pos2distill.node_pools import JOB_DASHBOARD_VARIABLE, NOT_RETRIED, RAY_VARIABLES
from tests.support.heads import Head, clean_environment, ray_head
from tests.support.paths import PROJECT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]

# The toy as small as it goes, and what generates a fake one, since only the way there and back is looked at.
TINY = [
    *("data.documents=8", "data.train_examples=8", "data.eval_examples=4"),
    *("evaluation.slots=2", "evaluation.other_documents=[]", "evaluation.bootstrap_samples=100", "training.epochs=1"),
    *("model.engine=fake", "method.name=sft", "sampling.keep=all"),
]
STUCK = [*TINY, "runtime.fake.delay_s=300"]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("0123456789abcdef" * 4)
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with ray_head(["--num-cpus=6", "--object-store-memory=200000000"], variables=variables) as started:
        yield started


Submit = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def submit(head: Head) -> Iterator[Submit]:
    """`submit("section.field=value", ...)`: `run.py submit quickstart` on the head, started."""
    started = []

    def start(*words: str, recipe: tuple[str, ...] = ("quickstart",)) -> "subprocess.Popen[str]":
        # As a user has it: a token, and nothing said of the mode.
        environment = clean_environment(RAY_AUTH_TOKEN_PATH=head.environment["RAY_AUTH_TOKEN_PATH"])
        command = [sys.executable, "run.py", "submit", *recipe, *words, "--address", head.dashboard]
        started.append(
            subprocess.Popen(
                command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()


def read_until(process: "subprocess.Popen[str]", what: str) -> str:
    """What a process says, up to the line that holds `what`."""
    lines = ""
    assert process.stdout
    for line in process.stdout:
        lines += line
        if what in line:
            return lines
    raise AssertionError(f"no {what!r} in:\n{lines}")


def end(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """The exit code, and what was said since."""
    said, _ = process.communicate(timeout=240)
    return process.returncode, said


def job_of(said: str) -> str:
    return next(line.split()[0] for line in said.splitlines() if " submitted: " in line)


def test_submit_runs_a_command_and_a_second_job_finds_it_finished(head: Head, submit: Submit, tmp_path: Path) -> None:
    """First by Ray's own command, then by ours."""
    settings = [*TINY, f"runtime.storage={tmp_path / 'runs'}"]
    evaluate = ["python", "run.py", "evaluate", "quickstart", *settings]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.dashboard]
    done = subprocess.run(
        [*ray, "--working-dir", ".", "--", *evaluate],
        cwd=PROJECT,
        env=head.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "base: 8 documents, 4 examples at each position" in done.stdout
    code, said = end(submit(*settings, recipe=("evaluate", "quickstart")))
    assert code == 0, said
    assert said.count("cached") == 2
    assert "base: 8 documents, 4 examples at each position" in said
    assert said.splitlines()[-1] == f"{job_of(said)} succeeded"


def test_submit_reports_a_killed_driver(submit: Submit, tmp_path: Path) -> None:
    """That a second job continues is shown in test_submit_faults.py, where the head is lost."""
    submitted = submit(*STUCK, f"runtime.storage={tmp_path / 'runs'}", recipe=("evaluate", "quickstart"))
    start = read_until(submitted, "prepare ")
    kill_driver(str(tmp_path))
    code, said = end(submitted)
    assert code == 1, said
    assert f"{job_of(start)} failed: Job entrypoint command failed with exit code 137" in said


def test_submit_reports_bad_data_and_the_exit_code_of_the_job(submit: Submit, tmp_path: Path) -> None:
    code, said = end(submit(*TINY, "data.path=/nowhere/data.jsonl", f"runtime.storage={tmp_path / 'runs'}"))
    assert code == 2, said
    assert "error: /nowhere/data.jsonl: no such file" in said
    assert "failed: Job entrypoint command failed with exit code 2" in said


def test_submit_follows_detaches_and_reports_a_stopped_job(submit: Submit, head: Head, tmp_path: Path) -> None:
    settings = [*STUCK, f"runtime.storage={tmp_path / 'runs'}"]
    first = submit(*settings)
    job = job_of(read_until(first, "prepare "))
    code, said = end(submit(*settings, recipe=("evaluate", "quickstart")))
    assert code == 2
    assert said.startswith(f"error: {tmp_path}/runs: is in use by {job} (python run.py study quickstart ")
    assert said.count("\n") == 1
    second = submit(*settings)
    assert read_until(second, "prepare ").splitlines()[0] == f"{job} already runs this command; following it"
    first.send_signal(signal.SIGINT)
    code, said = end(first)
    assert code == 130
    assert f"detached; {job} continues" in said
    assert f"ray job stop {job} --address {head.dashboard}" in said
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "stop", job, "--address", head.dashboard]
    subprocess.run(ray, env=head.environment, check=True, capture_output=True, timeout=60)
    code, said = end(second)
    assert code == 3
    assert said.splitlines()[-1] == f"{job} was stopped; the same command resumes it"


SAVES_FOR_SECONDS = """
import signal, time
def save(*_):
    time.sleep(6)
    print("saved", flush=True)
    raise SystemExit(143)
signal.signal(signal.SIGTERM, save)
print("runs", flush=True)
time.sleep(120)
"""


def test_a_stopped_job_has_time_to_save_a_checkpoint(head: Head) -> None:
    """Ray's own limit, after which it kills the job, is 3 s."""
    token = Path(head.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    client = JobSubmissionClient(head.dashboard, headers={"Authorization": f"Bearer {token}"})
    # As `submit` does.
    job = client.submit_job(
        entrypoint=shlex.join([sys.executable, "-c", SAVES_FOR_SECONDS]), runtime_env={"env_vars": RAY_VARIABLES}
    )
    end = time.monotonic() + 120
    while "runs" not in client.get_job_logs(job):
        assert time.monotonic() < end
        time.sleep(0.5)
    client.stop_job(job)
    while not client.get_job_status(job).is_terminal():
        assert time.monotonic() < end
        time.sleep(0.5)
    assert client.get_job_status(job) == JobStatus.STOPPED
    assert "saved" in client.get_job_logs(job)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "requires a token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"),
        ({"RAY_AUTH_TOKEN": "f" * 64}, "refuses the token of RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, "/nowhere/token: no such file (RAY_AUTH_TOKEN_PATH)"),
    ],
)
def test_submit_without_the_right_token_prints_one_line(
    head: Head, tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    command = [sys.executable, "run.py", "submit", "quickstart", f"runtime.storage={tmp_path}/runs"]
    done = subprocess.run(
        [*command, "--address", head.dashboard],
        cwd=PROJECT,
        env=clean_environment(HOME=str(tmp_path), **variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "ffff" not in done.stderr


def kill_driver(storage: str) -> None:
    """Kill the process that runs `run.py evaluate` on this storage, by its id."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:3] == ["run.py", "evaluate"] and any(storage in word for word in words):
            process.kill()


def test_submitter_ends_with_a_job_that_stops_itself_after_a_user_error(head: Head) -> None:
    entrypoint = f"env --chdir={PROJECT} {JOB_DASHBOARD_VARIABLE}={head.dashboard} python run.py study quickstrat"
    environment = clean_environment(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=head.environment["RAY_AUTH_TOKEN_PATH"],
        RAY_DASHBOARD_ADDRESS=head.dashboard.removeprefix("http://"),
        RAY_JOB_SUBMISSION_ID="rayjob-x7k2p",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.jobs.rayjob_submitter", entrypoint],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0
    assert "error: quickstrat: no such recipe; did you mean 'quickstart'?" in done.stdout
    assert NOT_RETRIED in done.stdout
    assert done.stdout.splitlines()[-1] == "rayjob-x7k2p: STOPPED"
