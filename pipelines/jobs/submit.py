"""`run.py submit`: run a command as a job on a running Ray cluster, and follow it until it ends.

A job runs the same command as this machine would, on the head node, with this project's files in its working
directory. Its results are in its storage, so submitting again resumes there.
"""

import contextlib
import hashlib
import re
import shlex
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from ray.job_submission import JobDetails, JobSubmissionClient
from urllib3.exceptions import NewConnectionError

from pos2distill.config.gate import NO_GATE, Gate
from pos2distill.config.load import load_recipe
from pos2distill.config.model import ModelSection
from pos2distill.config.paths import in_project
from pos2distill.config.read import RECIPES, find_yaml, is_built_in, recipe_names
from pos2distill.config.sweep import sweep_cells
from pos2distill.environment import sends_ray_token
from pos2distill.errors import ExitCode, UserError, status_name
from pos2distill.literal_paths import last_part
from pos2distill.node_pools import RAY_VARIABLES
from pos2distill.secrets import looks_secret

from .bundle import PROJECT, TAKEN, is_packed, pack, packed_files
from .client import REQUEST_ERRORS, TOKENS, connect, is_this_machine, reason_of
from .follow import follow, report_end

_STORAGE, _RECIPE = "pos2distill.storage", "pos2distill.recipe"  # in a job's metadata
_SUBMIT_ATTEMPTS = 10
_ID_FOLDER_LENGTH = 40  # characters of a storage's name in a submission id
# Errors of a connection that breaks after the request was sent, unless `_never_connected`.
_LOST_CONNECTION = (
    requests.ConnectionError,
    requests.ReadTimeout,
    requests.exceptions.ChunkedEncodingError,
    ConnectionResetError,
    ConnectionAbortedError,
    BrokenPipeError,
)


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A submitted job that has ended, or that continues by itself.

    exit_code: its own, ExitCode.STOPPED, or INTERRUPTED of one that continues.
    """

    job: str
    storage: str
    exit_code: int

    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self) | {"status": status_name(self.exit_code)}


def run_submit(
    command: str,
    recipe: str,
    overrides: Sequence[str],
    address: str,
    gate: Gate = NO_GATE,
    *,
    allow_plain_http: bool = False,
) -> SubmittedJob:
    """Submit `run.py COMMAND RECIPE overrides`, with the options of a gate, and show its log until it ends.

    A running job of the same storage is followed if it runs the same command; otherwise it is an error.

    Args:
        address: the address of the cluster's dashboard, for example http://127.0.0.1:8265.
        allow_plain_http: whether a token may be sent to another machine without encryption.
    Raises:
        UserError: for settings that cannot work on a cluster, or a cluster that cannot be reached.
    """
    _check_address(address, allow_plain_http=allow_plain_http)
    if not (PROJECT / "run.py").is_file():
        raise UserError("submit: run it in a checkout of the project, whose files are sent with the job")
    files = packed_files()
    if any(looks_secret(word) for word in gate.words()):
        raise UserError("command line: an option looks like a secret, which the job's page would show")
    _check_baseline(gate.baseline)
    storage = _check(recipe, overrides, files)
    own = find_yaml(recipe, RECIPES, "recipe")
    own_recipe = None if is_built_in(own) else own
    # `pack` copies the user's own recipe next to `run.py`, so the job finds it by its file name alone.
    name = own_recipe.name if own_recipe else own.resolve().stem
    entrypoint = shlex.join(["python", "run.py", command, name, *overrides, *gate.words()])
    client = connect(address)
    wanted = _Wanted(storage, entrypoint, hashlib.sha256(own.read_bytes()).hexdigest()[:16])
    job, is_new = _submit_once(client, wanted, files, own_recipe)
    if is_new:
        print(f"{job} submitted: {len(files)} files of the project, results to {storage}", flush=True)
    else:
        print(f"{job} already runs this command; following it", flush=True)
    try:
        exit_code = report_end(follow(client, job))
    except KeyboardInterrupt as interrupt:
        print(
            f"\ndetached; {job} continues. Run the same command to follow it again; to stop it: "
            f"ray job stop {job} --address {address}",
            flush=True,
        )
        exit_code = ExitCode.of_interrupt(interrupt)
    return SubmittedJob(job, storage, exit_code)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A job that is to run. recipe: a digest of the recipe's file, whose name alone is in the entrypoint."""

    storage: str
    entrypoint: str
    recipe: str


def _check(recipe: str, overrides: Sequence[str], files: list[Path]) -> str:
    """Reject what would fail or be lost on the cluster. Returns the storage."""
    if any(looks_secret(override) for override in overrides):
        raise UserError("command line: a setting looks like a secret; set it on the cluster's nodes instead")
    loaded = load_recipe(recipe, overrides)  # reports everything that is wrong with the settings alone
    # As they were written: `load_recipe` has made local paths absolute on this machine, and the job reads them there.
    storage = loaded.written_paths.get("runtime.storage")
    if storage is None or not ("://" in storage or Path(storage).is_absolute()):
        what = "missing" if storage is None else f"{storage} is in the job's own folder, which is deleted with it"
        raise UserError(f"runtime.storage: {what}; set a URL, or the absolute path of a folder that all nodes share")
    here: dict[str, str] = {}  # fields by path
    for _, cell in sweep_cells(loaded):
        here[cell.written_paths["data.path"]] = "data.path"
        model = cell.written_paths["model.path"]
        if _is_folder(cell.study.model, model):
            here[model] = "model.path"
    for name, other in loaded.other_tasks.items():  # whose paths are absolute by now
        here[in_project(other.data.path)] = f"evaluation.also_evaluate: {name}: data.path"
    for path_or_url, field in here.items():
        if not ("://" in path_or_url or Path(path_or_url).is_absolute() or is_packed(path_or_url, files)):
            raise UserError(
                f"{field}: {path_or_url} is not sent with the job, which takes {', '.join(TAKEN[2:])} of the project; "
                f"set a URL, or an absolute path that all nodes share"
            )
    for name in loaded.study.evaluation.also_evaluate:
        if name not in recipe_names() and not is_packed(name, files):
            raise UserError(
                f"evaluation.also_evaluate: {name} is not sent with the job; put it into pipelines/recipes/"
            )
    # Without a final slash, so that `_running` recognizes the same storage in both spellings.
    return storage.rstrip("/")


def _is_folder(model: ModelSection, written: str) -> bool:
    """Whether a model's path, as it was written, means a folder, and not a name on the hub or on a server."""
    if model.uses_chat_api:
        return False
    # `load_recipe` makes the path of a folder absolute. One of the project is found by the job, wherever this runs.
    return Path(model.path).is_absolute() or (PROJECT / written).exists() or written.startswith(".")


def _check_baseline(baseline: str | None) -> None:
    if baseline is not None and not ("://" in baseline or Path(baseline).is_absolute()):
        raise UserError(
            f"--baseline: {baseline} is not sent with the job; set a URL, or an absolute path that all nodes share"
        )


def _check_address(address: str, *, allow_plain_http: bool) -> None:
    if looks_secret(address):
        raise UserError(f"--address: contains a credential; set {TOKENS[0]} or {TOKENS[1]} instead")
    try:
        parts = urllib.parse.urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number, or half an IPv6 address
        host, port = None, None
    if host is None or parts.scheme not in ("http", "https") or port == 0:
        raise UserError(f"--address: expected the dashboard's, for example http://127.0.0.1:8265, got {address}")
    if parts.scheme == "http" and sends_ray_token() and not (is_this_machine(host) or allow_plain_http):
        raise UserError(
            f"--address: {address} would receive the token of the cluster without encryption; use https://, a tunnel "
            f"(kubectl port-forward, ssh -L), or --allow-plain-http in a network that you trust"
        )


def _submit_once(
    client: JobSubmissionClient, wanted: _Wanted, files: list[Path], own_recipe: Path | None
) -> tuple[str, bool]:
    """Submit a job that runs this command on this storage, unless there is one.

    Of two commands that find no job at the same time, one submits it and the other one finds it: both choose the same
    submission id, the next one of this storage, and Ray 2.60 accepts an id once.

    Returns: its submission id, and whether it was submitted by this call.
    Raises:
        UserError: if another command runs on this storage, the cluster refuses the job, or the connection is lost and
            the job is not found afterwards.
    """
    for _ in range(_SUBMIT_ATTEMPTS):
        try:
            jobs = client.list_jobs()
        except REQUEST_ERRORS as error:
            raise _refusal(client, error) from None
        running = _running(jobs, wanted)
        if running:
            return running, False
        job = _next_id(jobs, wanted.storage)
        with tempfile.TemporaryDirectory() as folder:
            pack(Path(folder), files, own_recipe)
            try:
                client.submit_job(
                    entrypoint=wanted.entrypoint,
                    submission_id=job,
                    runtime_env={"working_dir": folder, "env_vars": RAY_VARIABLES},
                    metadata={_STORAGE: wanted.storage, _RECIPE: wanted.recipe},
                )
            except REQUEST_ERRORS as error:
                if _is_lost_connection(error):
                    _wait_until_listed(client, job, wanted, error)
                    return job, True
                # The exception of Ray 2.60 has no type of its own for it.
                if f"{job} already exists" not in str(error):
                    raise _refusal(client, error) from None
            else:
                return job, True
        time.sleep(1)  # until the job of the other command is listed
    raise UserError(f"{client.get_address()}: has a job {job}, and does not list it; run the same command again later")


def _is_lost_connection(error: Exception) -> bool:
    """Whether a request was sent and got no answer of the head, which may have accepted it nevertheless.

    False for faults of this machine, such as a full disk: Ray packs the working directory before it sends a request.
    """
    if isinstance(error, RuntimeError):
        # Answers of a proxy between here and the head, in the words of Ray 2.60.
        return re.match(r"Request failed with status code 50[24]\b", str(error)) is not None
    return isinstance(error, _LOST_CONNECTION) and not _never_connected(error)


def _never_connected(error: Exception) -> bool:
    """Whether a connection was not made at all, for example since it was refused."""
    cause: BaseException | None = error
    while cause is not None:
        # `requests` raises ConnectTimeout, or its general ConnectionError from the NewConnectionError of urllib3.
        if isinstance(cause, (requests.ConnectTimeout, NewConnectionError, ConnectionRefusedError)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _wait_until_listed(client: JobSubmissionClient, job: str, wanted: _Wanted, error: Exception) -> None:
    """Return once the cluster lists a job whose submission got no answer.

    Raises:
        UserError: if it does not list the job, or another command runs on this storage.
    """
    for _ in range(_SUBMIT_ATTEMPTS):
        with contextlib.suppress(*REQUEST_ERRORS):
            jobs = client.list_jobs()
            if _running(jobs, wanted) == job:
                return
            # It may have ended by now.
            if any(listed.submission_id == job and listed.entrypoint == wanted.entrypoint for listed in jobs):
                return
        time.sleep(1)
    raise UserError(
        f"{client.get_address()}: no answer to the submission of {job} ({reason_of(error)}); it may have been "
        f"accepted; run the same command to follow it"
    )


def _refusal(client: JobSubmissionClient, error: Exception) -> UserError:
    return UserError(f"{client.get_address()}: does not accept the job ({reason_of(error)})")


def _next_id(jobs: Sequence[JobDetails], storage: str) -> str:
    """The submission id of the next job on a storage: the same for every command that sees the same jobs."""
    folder = re.sub(r"[^A-Za-z0-9]+", "-", last_part(storage)).strip("-")[:_ID_FOLDER_LENGTH] or "job"
    prefix = f"{folder}-{hashlib.sha256(storage.encode()).hexdigest()[:8]}-"
    last = 0
    for job in jobs:
        start, _, number = (job.submission_id or "").rpartition("-")
        if f"{start}-" == prefix and number.isdecimal():
            last = max(last, int(number))
    return f"{prefix}{last + 1}"


def _running(jobs: Sequence[JobDetails], wanted: _Wanted) -> str | None:
    """The job that runs this command on this storage, if there is one.

    Raises:
        UserError: if another one works on this storage, or the same with a recipe that was changed since.
    """
    for job in jobs:
        metadata = job.metadata or {}
        if job.status.is_terminal() or metadata.get(_STORAGE) != wanted.storage:
            continue
        difference = ""
        if job.entrypoint != wanted.entrypoint:
            difference = f" ({job.entrypoint})"
        elif metadata.get(_RECIPE) != wanted.recipe:
            difference = ", which runs this command with an earlier content of the recipe"
        if difference:
            raise UserError(
                f"{wanted.storage}: is in use by {job.submission_id}{difference}; wait until it ends, stop it "
                f"(ray job stop {job.submission_id}), or choose another runtime.storage"
            )
        return str(job.submission_id)
    return None
