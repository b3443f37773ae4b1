"""What a job takes with it and what stays, and what is rejected before a cluster is asked."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus

from pipelines.cli import command_line
from pipelines.jobs import submit
from pipelines.jobs.bundle import MAX_BYTES, PROJECT, is_packed, pack, packed_files
from pos2distill.config.read import RECIPES
from pos2distill.errors import UserError

SECRETS = [
    *(".env", "prod.env", ".netrc", "server.pem", "server.key", "id_rsa", "id_ed25519", "id_rsa.txt", "kubeconfig"),
    *("kubeconfig.yaml", "credentials.json", "application_default_credentials.json", "secrets.yaml", "my-secret.txt"),
    *("token", "token.txt", "hf_token.txt", "auth_token", "api-key.txt", "private_key.json", "service-account.json"),
    *("passwords.txt", ".git/config", ".venv/lib/a.py", "runs/x/model.safetensors", "__pycache__/a.py", ".cache/a.py"),
    *("key.json", "gcp-key.json", "my-service-account.json", "kaggle.json", "aws_keys.txt", "rootkey.txt", "netrc.txt"),
    *("passwd.txt", "data.csv", "weights.bin", "store.parquet", "wandb/run.json", "venv/pyvenv.py"),
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with secrets, data and results in every folder, above and below what is packed."""
    project = tmp_path / "project"
    for name in (
        "run.py",
        "pos2distill/config/study.py",
        "pipelines/recipes/quickstart.yaml",
        "examples/toy/tokenizer.json",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("kept")
    for folder in (".", "pos2distill", "pipelines/recipes", "examples/toy", "data", "benchmarks"):
        for name in SECRETS:
            path = project / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("SECRET")
    (tmp_path / "outside.yaml").write_text("SECRET")
    (project / "pipelines" / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    (project / "examples" / "linked").symlink_to(tmp_path)
    return project


def test_packed_files_hold_no_secrets_data_or_results(project: Path, tmp_path: Path) -> None:
    pack(tmp_path / "packed", packed_files(project), None, project)
    packed = [path for path in (tmp_path / "packed").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "packed")) for path in packed) == [
        "examples/toy/tokenizer.json",
        "pipelines/recipes/quickstart.yaml",
        "pos2distill/config/study.py",
        "run.py",
    ]
    assert all(path.read_text() == "kept" for path in packed)


def test_packed_files_hold_everything_that_a_study_reads(tmp_path: Path) -> None:
    files = {str(path) for path in packed_files()}
    assert {
        *("run.py", "pos2distill/secrets.py", "pipelines/recipes/quickstart.yaml", "examples/toy/data.jsonl.gz"),
        *(f"examples/toy/base/{name}" for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja")),
    } <= files
    code = {str(path.relative_to(PROJECT)) for path in (PROJECT / "pos2distill").rglob("*.*") if path.suffix != ".pyc"}
    assert code <= files
    pack(tmp_path / "packed", packed_files(), None)
    assert not [name for name in files if name.startswith(("tests", "docs", "benchmarks", ".", "cluster"))]


def test_pack_copies_the_users_recipe(project: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine")
    pack(tmp_path / "packed", packed_files(project), tmp_path / "mine.yaml", project)
    assert (tmp_path / "packed" / "mine.yaml").read_text() == "name: mine"


def test_pack_rejects_a_recipe_with_a_key(project: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"name: mine\nmodel:\n  revision: {'0123456789' * 4}\n# https://me:{'pw12' * 4}@host/m\n")
    with pytest.raises(
        UserError, match=r"mine.yaml: line 4 contains what looks like a secret; set it on the cluster's"
    ):
        pack(tmp_path / "packed", packed_files(project), recipe, project)


def test_pack_names_a_file_that_is_too_large(project: Path, tmp_path: Path) -> None:
    with open(project / "examples" / "big.safetensors", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(UserError, match=r"^examples/big.safetensors: 100 MiB; a job can send 100 MiB;"):
        pack(tmp_path / "packed", packed_files(project), None, project)


def test_is_packed_takes_a_pattern_if_all_its_files_are_sent(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "mine"
    folder.mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "c.parquet"):
        (folder / name).write_text("{}")
    files = packed_files(tmp_path)
    assert is_packed("examples/mine/*.jsonl", files, tmp_path)
    assert not is_packed("examples/mine/*", files, tmp_path)
    with pytest.raises(UserError, match=r"examples/mine/\*\.csv: matches no file \(data\.path\)"):
        is_packed("examples/mine/*.csv", files, tmp_path)


def test_is_packed_takes_files_and_folders() -> None:
    files = [Path("examples/toy/base/config.json")]
    assert is_packed("examples/toy/base", files)
    assert is_packed("./examples/toy/base/config.json", files)
    assert not is_packed("examples/toy/two_hop", files)
    assert not is_packed("../examples", files)
    assert not is_packed(".", files)


WORD = "hunter2"  # in the position of a password
STORAGE = "runtime.storage=/mnt/shared/runs"
SHARED = "set a URL, or the absolute path of a folder that all nodes share"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstart"], f"runtime.storage: missing; {SHARED}\n"),
        (
            ["study", "quickstart", "runtime.storage=runs/x"],
            f"runtime.storage: runs/x is in the job's own folder, which is deleted with it; {SHARED}\n",
        ),
        (["quickstrat", STORAGE], "quickstrat: no such recipe; did you mean 'quickstart'?"),
        (
            ["quickstart", STORAGE, "training.epoch=1"],
            "command line: training.epoch: unknown field; did you mean 'epochs'?",
        ),
        (["study", STORAGE], "submit: expected [COMMAND] RECIPE [section.field=value ...]; the recipe is missing"),
        (["study"], "submit: expected [COMMAND] RECIPE [section.field=value ...]; the recipe is missing"),
        (["stdy", "nq_mistral_7b", STORAGE], "submit: stdy: no such command; did you mean 'study'?"),
        (["quickstart", STORAGE, "data.path=data/x.jsonl"], "data.path: data/x.jsonl is not sent with the job, which"),
        (
            ["nq_mistral_7b", STORAGE, "data.path=s3://b/x", "evaluation.also_evaluate=[webq_mistral_7b]"],
            "evaluation.also_evaluate: webq_mistral_7b: data.path: ",
        ),
        (["quickstart", STORAGE, "model.path=tests"], "model.path: tests is not sent with the job, which takes pos2d"),
        (
            ["quickstart", STORAGE, f"model.path=https://me:{WORD}@host/m"],
            "command line: a setting looks like a secret; set it on the cluster's nodes instead",
        ),
        (
            ["evaluate", "quickstart", STORAGE, "--fail-if-drop-above", "5", "--baseline", f"https://me:{WORD}@host/p"],
            "command line: an option looks like a secret, which the job's page would show",
        ),
        (
            ["quickstart", STORAGE, "--fail-if-gap-above", "5"],
            "--fail-if-gap-above: is an option of evaluate, not of study",
        ),
        (
            ["quickstart", STORAGE],
            "http://127.0.0.1:1: no Ray cluster answers at this address (Failed to connect to Ray at",
        ),
    ],
)
def test_submit_rejects_what_cannot_work_with_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["submit", *words, "--address", "http://127.0.0.1:1"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}")
    assert printed.count("\n") == 1
    assert WORD not in printed


@pytest.mark.parametrize("path", ["mymodel", "~/mymodel", "./mymodel", "owner/mymodel"])
def test_submit_rejects_a_model_of_the_working_directory(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the cluster, its name would be looked up on the hub."""
    for folder in ("mymodel", "owner/mymodel"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["quickstart", STORAGE, f"model.path={path}", "--address", "http://127.0.0.1:1"]
    assert command_line.main(["submit", *words]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: model.path: {path} is not sent with the job, which takes pos2distill")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("sweep.model.path=[owner/name, mymodel]", "model.path"),
        ("sweep.data.path=[s3://b/x, mymodel]", "data.path"),
        ("sweep={model: [{path: owner/name}, {path: mymodel}]}", "model.path"),
        ("sweep={data: [{path: s3://b/x}, {path: mymodel}]}", "data.path"),
    ],
)
def test_submit_rejects_a_path_of_a_sweep_that_is_not_sent(
    setting: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mymodel").mkdir()
    monkeypatch.chdir(tmp_path)
    assert submit_to(Jobs(), monkeypatch, "quickstart", setting) == 2
    assert capsys.readouterr().err.startswith(f"error: {field}: mymodel is not sent with the job")


@pytest.mark.parametrize("path", ["owner/name", "examples/toy/base", "s3://bucket/model", "/mnt/shared/model"])
def test_submit_sends_other_model_paths_as_written(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = Jobs()
    assert submit_to(jobs, monkeypatch, "quickstart", f"model.path={path}") == 0
    assert f"model.path={path}" in jobs.jobs[0].entrypoint


@pytest.mark.parametrize(
    ("baseline", "code"), [("runs/only_here", 2), ("~/runs/x", 2), ("s3://b/runs", 0), ("/mnt/shared/runs", 0)]
)
def test_submit_requires_a_baseline_that_nodes_can_read(
    baseline: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = Jobs()
    words = ["evaluate", "quickstart", "--fail-if-drop-above", "5", "--baseline", baseline]
    assert submit_to(jobs, monkeypatch, *words) == code
    expected = (
        f"error: --baseline: {baseline} is not sent with the job; set a URL, or an absolute path that all nodes share\n"
    )
    assert capsys.readouterr().err == (expected if code else "")


def test_submit_passes_the_gate_to_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[str] = []
    client = SimpleNamespace(list_jobs=list, submit_job=lambda **job: submitted.append(job["entrypoint"]))
    monkeypatch.setattr(submit, "connect", lambda address: client)
    monkeypatch.setattr(submit, "follow", lambda client, job: None)
    monkeypatch.setattr(submit, "report_end", lambda details: 0)
    words = ["evaluate", "quickstart", "--fail-if-gap-above", "2.5", STORAGE, "--address", "http://127.0.0.1:1"]
    assert command_line.main(["submit", *words]) == 0
    assert submitted == [f"python run.py evaluate quickstart {STORAGE} --fail-if-gap-above=2.5"]


@pytest.mark.parametrize(
    ("exit_code", "status"), [(0, "succeeded"), (2, "failed"), (1, "failed"), (3, "stopped"), (130, "running")]
)
def test_submit_prints_json_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exit_code: int, status: str
) -> None:
    """`running`: Ctrl-C detaches from a job, which continues."""

    def follow(client: Any, job: str) -> None:
        if exit_code == 130:
            raise KeyboardInterrupt

    client = SimpleNamespace(list_jobs=list, submit_job=lambda **job: None)
    monkeypatch.setattr(submit, "connect", lambda address: client)
    monkeypatch.setattr(submit, "follow", follow)
    monkeypatch.setattr(submit, "report_end", lambda details: exit_code)
    words = ["quickstart", STORAGE, "--address", "http://127.0.0.1:1"]
    assert command_line.main(["submit", *words, "--json"]) == exit_code
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    job = result["job"]
    assert result == {"job": job, "storage": STORAGE.partition("=")[2], "exit_code": exit_code, "status": status}
    assert f"{job} submitted" in printed.err
    assert command_line.main(["submit", *words, "--quiet"]) == exit_code
    assert capsys.readouterr() == ("", "")


class Jobs:
    """A job API that accepts a submission id once, as Ray's does.

    `before_submit` runs between list and submit, `after_submit` before the answer.
    """

    def __init__(self, *jobs: SimpleNamespace) -> None:
        self.jobs = list(jobs)
        self.before_submit: list[Callable[[], Any]] = []
        self.after_submit: list[Callable[[], Any]] = []

    def list_jobs(self) -> list[SimpleNamespace]:
        return list(self.jobs)

    def submit_job(self, submission_id: str, entrypoint: str, metadata: dict[str, str], **_: Any) -> None:
        if self.before_submit:
            self.before_submit.pop()()
        if any(job.submission_id == submission_id for job in self.jobs):
            raise RuntimeError(f"ValueError: Job with submission_id {submission_id} already exists. Please use another")
        self.jobs.append(job_with(submission_id, JobStatus.RUNNING, entrypoint, metadata))
        if self.after_submit:
            self.after_submit.pop()()

    def get_address(self) -> str:
        return "http://127.0.0.1:1"


def job_with(
    submission_id: str | None, status: JobStatus, entrypoint: str = "", metadata: dict[str, str] | None = None
) -> SimpleNamespace:
    return SimpleNamespace(
        submission_id=submission_id, status=status, entrypoint=entrypoint, metadata=metadata, message=""
    )


def submit_to(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(submit, "connect", lambda address: jobs)
    monkeypatch.setattr(submit, "follow", lambda client, job: None)
    monkeypatch.setattr(submit, "report_end", lambda details: 0)
    return command_line.main(["submit", *words, STORAGE, "--address", "http://127.0.0.1:1"])


def test_submit_follows_no_job_of_a_recipe_that_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is all that the command tells."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text((RECIPES / "quickstart.yaml").read_text())
    jobs = Jobs()
    assert submit_to(jobs, monkeypatch, str(recipe)) == 0
    assert submit_to(jobs, monkeypatch, str(recipe)) == 0
    (job,) = jobs.jobs
    assert f"{job.submission_id} already runs this command" in capsys.readouterr().out
    recipe.write_text(recipe.read_text().replace("learning_rate: 1.0e-3", "learning_rate: 5.0e-4"))
    assert submit_to(jobs, monkeypatch, str(recipe)) == 2
    assert capsys.readouterr().err == (
        f"error: /mnt/shared/runs: is in use by {job.submission_id}, which runs this command with an earlier content "
        f"of the recipe; wait until it ends, stop it (ray job stop {job.submission_id}), or choose another "
        f"runtime.storage\n"
    )


def test_submit_names_a_built_in_recipe_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has the file, but not at the path that was typed."""
    link = tmp_path / "mine.yaml"
    link.symlink_to(RECIPES / "quickstart.yaml")
    jobs = Jobs()
    for recipe in (link, RECIPES / "quickstart.yaml"):
        assert submit_to(jobs, monkeypatch, str(recipe)) == 0
    assert {job.entrypoint for job in jobs.jobs} == {f"python run.py study quickstart {STORAGE}"}


def test_submit_of_two_at_once_submits_one_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second command submits after the first one has seen that there is no job."""
    jobs = Jobs()
    jobs.before_submit.append(lambda: submit_to(jobs, monkeypatch, "quickstart"))
    assert submit_to(jobs, monkeypatch, "quickstart") == 0
    assert [job.entrypoint for job in jobs.jobs] == [f"python run.py study quickstart {STORAGE}"]
    first, second = capsys.readouterr().out.splitlines()
    job = jobs.jobs[0].submission_id
    assert job.startswith("runs-")
    assert job.endswith("-1")
    assert first.startswith(f"{job} submitted: ")
    assert second == f"{job} already runs this command; following it"


def test_submit_of_another_command_at_once_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = Jobs()
    jobs.before_submit.append(lambda: submit_to(jobs, monkeypatch, "evaluate", "quickstart"))
    assert submit_to(jobs, monkeypatch, "study", "quickstart") == 2
    assert len(jobs.jobs) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: /mnt/shared/runs: is in use by runs-")
    assert printed.count("\n") == 1


def test_submit_numbers_the_jobs_of_a_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if some were deleted, and beside jobs of other storages, of other programs and without an id."""
    jobs = Jobs()
    for expected in (1, 2, 3):
        assert submit_to(jobs, monkeypatch, "quickstart") == 0
        assert jobs.jobs[-1].submission_id.endswith(f"-{expected}")
        jobs.jobs[-1].status = JobStatus.FAILED
    del jobs.jobs[:2]
    jobs.jobs.append(job_with(None, JobStatus.RUNNING))
    jobs.jobs.append(job_with("runs-00000000-7", JobStatus.RUNNING, metadata={}))
    assert submit_to(jobs, monkeypatch, "quickstart") == 0
    assert jobs.jobs[-1].submission_id.endswith("-4")


def test_submit_reports_a_refused_job_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise RuntimeError(
            "Request failed with status code 500: Traceback\n  File x\nNo available agent to submit job."
        )

    jobs = Jobs()
    jobs.before_submit.append(refuse)
    assert submit_to(jobs, monkeypatch, "quickstart") == 2
    line = "error: http://127.0.0.1:1: does not accept the job (No available agent to submit job.)\n"
    assert capsys.readouterr().err == line
    monkeypatch.setattr(jobs, "list_jobs", refuse)
    assert submit_to(jobs, monkeypatch, "quickstart") == 2
    assert capsys.readouterr().err == line


LOST = [
    requests.ConnectionError("Connection aborted."),
    requests.ReadTimeout("Read timed out."),
    requests.exceptions.ChunkedEncodingError("Connection broken: IncompleteRead"),
    ConnectionResetError("Connection reset by peer"),
    BrokenPipeError("Broken pipe"),
    RuntimeError("Request failed with status code 504: Gateway Timeout."),
]


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("status", [JobStatus.RUNNING, JobStatus.SUCCEEDED])
def test_submit_follows_a_job_whose_acceptance_was_not_received(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: JobStatus
) -> None:
    """The head has the job, and the connection breaks before its answer; then it does not list jobs at once."""
    monkeypatch.setattr("pipelines.jobs.submit.time.sleep", lambda seconds: None)
    jobs = Jobs()
    list_jobs = jobs.list_jobs
    answers: list[Callable[[], Any]] = [list_jobs, lambda: fail(error), list_jobs]

    def lose_answer() -> None:
        jobs.jobs[0].status = status
        raise error

    def answer() -> Any:
        return answers.pop(0)()

    jobs.after_submit.append(lose_answer)
    monkeypatch.setattr(jobs, "list_jobs", answer)
    assert submit_to(jobs, monkeypatch, "quickstart") == 0
    assert len(jobs.jobs) == 1
    assert capsys.readouterr().out.startswith(f"{jobs.jobs[0].submission_id} submitted: ")


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_submit_says_that_a_job_may_have_been_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    monkeypatch.setattr("pipelines.jobs.submit.time.sleep", lambda seconds: None)
    jobs = Jobs()
    jobs.before_submit.append(lambda: fail(error))
    assert submit_to(jobs, monkeypatch, "quickstart") == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: http://127.0.0.1:1: no answer to the submission of runs-")
    assert printed.endswith("; it may have been accepted; run the same command to follow it\n")
    assert printed.count("\n") == 1


def request_refused() -> None:
    """Send a request to a port where nobody listens."""
    with requests.Session() as session:
        session.trust_env = False  # a proxy would answer
        session.get("http://127.0.0.1:1", timeout=5)


@pytest.mark.parametrize(
    ("submit_job", "reason"),
    [
        (lambda: fail(OSError(errno.ENOSPC, "No space left on device")), "[Errno 28] No space left on device)"),
        (lambda: fail(PermissionError(errno.EACCES, "Permission denied")), "[Errno 13] Permission denied)"),
        (lambda: fail(ConnectionRefusedError(errno.ECONNREFUSED, "refused")), "[Errno 111] refused)"),
        (request_refused, "HTTPConnectionPool(host='127.0.0.1', port=1): Max retries exceeded"),
        (lambda: fail(requests.ConnectTimeout("timed out")), "timed out)"),
        (lambda: fail(RuntimeError("Request failed with status code 500: status code 502")), "Request failed with"),
        (lambda: fail(AuthenticationError("session expired")), "session expired)"),
    ],
    ids=["full-disk", "permission", "refused", "refused-by-requests", "connect-timeout", "status-500", "status-403"],
)
def test_submit_does_not_look_for_a_job_that_was_not_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], submit_job: Callable[[], None], reason: str
) -> None:
    """Ray packs the working directory inside `submit_job`, so that faults of this machine are raised there, too."""
    monkeypatch.setattr("pipelines.jobs.submit.time.sleep", lambda seconds: None)
    jobs = Jobs()
    jobs.before_submit.append(submit_job)
    assert submit_to(jobs, monkeypatch, "quickstart") == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: http://127.0.0.1:1: does not accept the job ({reason}")
    assert printed.count("\n") == 1


def test_submit_names_another_task_that_is_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text((PROJECT / "pipelines" / "recipes" / "quickstart.yaml").read_text())
    words = ["quickstart", STORAGE, f"evaluation.also_evaluate=[{other}]"]
    assert command_line.main(["submit", *words, "--address", "http://127.0.0.1:1"]) == 2
    assert f"evaluation.also_evaluate: {other} is not sent with the job; put it into" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8265", "ray://127.0.0.1:10001", "auto", "http://[::1", "http://a:b", "http://"]
)
def test_submit_rejects_an_address_that_is_no_url(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["submit", "quickstart", STORAGE, "--address", address]) == 2
    printed = capsys.readouterr().err
    assert printed == f"error: --address: expected the dashboard's, for example http://127.0.0.1:8265, got {address}\n"


@pytest.mark.parametrize(
    ("address", "flags", "mode", "sent"),
    [
        ("http://ray.example.org:8265", [], "token", False),
        ("http://10.0.0.5:8265", [], "token", False),
        ("http://127.0.0.1.example.org:8265", [], "token", False),
        ("http://10.0.0.5:8265", [], "disabled", True),
        ("http://10.0.0.5:8265", ["--allow-plain-http"], "token", True),
        ("https://ray.example.org", [], "token", True),
        *((f"http://{host}:8265", [], "token", True) for host in ("127.0.0.1", "127.1.2.3", "localhost", "[::1]")),
    ],
)
def test_submit_sends_a_token_without_encryption_to_this_machine_only(
    address: str,
    flags: list[str],
    mode: str,
    sent: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    connected: list[str] = []

    def connect(address: str) -> SimpleNamespace:
        connected.append(address)
        return SimpleNamespace(list_jobs=list, submit_job=lambda **job: None)

    monkeypatch.setenv("RAY_AUTH_TOKEN", "made-up-token")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(submit, "connect", connect)
    monkeypatch.setattr(submit, "follow", lambda client, job: None)
    monkeypatch.setattr(submit, "report_end", lambda details: 0)
    code = command_line.main(["submit", "quickstart", STORAGE, "--address", address, *flags])
    printed = capsys.readouterr().err
    assert connected == ([address] if sent else [])
    assert code == (0 if sent else 2)
    if not sent:
        assert printed == (
            f"error: --address: {address} would receive the token of the cluster without encryption; use https://, a "
            f"tunnel (kubectl port-forward, ssh -L), or --allow-plain-http in a network that you trust\n"
        )
    assert "made-up-token" not in printed


@pytest.mark.parametrize("address", [f"http://me:{WORD}@127.0.0.1:8265", f"http://10.0.0.5:8265/?token={WORD}"])
def test_submit_rejects_an_address_with_a_credential(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["submit", "quickstart", STORAGE, "--address", address]) == 2
    printed = capsys.readouterr().err
    assert printed == "error: --address: contains a credential; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH instead\n"


def test_submit_requires_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["submit", "quickstart", STORAGE])
    assert "--address" in capsys.readouterr().err
