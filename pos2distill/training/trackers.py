"""Step records to TensorBoard, Weights & Biases or MLflow, through their own libraries."""

import http.client
import importlib.util
import netrc
import os
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pos2distill.config.paths import project_root
from pos2distill.errors import UserError
from pos2distill.installed import has_pip

if TYPE_CHECKING:
    from pos2distill.training.step_record import StepRecord

_PROJECT = "pos2distill"
"""The name of the project (Weights & Biases) or experiment (MLflow) that runs belong to."""
_CONNECT_SECONDS = 8.0
_LOGGED = ("loss", "loss_trivial", "loss_anchor", "grad_norm", "learning_rate", "epoch", "fraction", "rows")


def check_trackers(names: Sequence[str]) -> None:
    """Check on the driver, before anything expensive starts; the workers have the same packages and environment.

    Raises:
        UserError: naming the package that is not installed, the missing key, or the server that does not answer.
    """
    for name in names:
        # Looked up and not imported: only the worker of rank 0 logs.
        if importlib.util.find_spec(name) is None:
            # The environment of `make install` has no pip.
            uv = project_root() / ".uv" / "bin" / "uv"
            with_uv = f"{uv if uv.exists() else 'uv'} pip install --python {sys.executable}"
            pip = "pip install" if has_pip() else with_uv
            raise UserError(f"runtime.trackers: {name} is not installed; {pip} {name}")
        if name in _CHECKS:
            _CHECKS[name]()


def _check_wandb() -> None:
    if os.environ.get("WANDB_MODE", "online") != "online" or _has_wandb_settings():
        return
    url = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    has_key = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if not has_key and not _in_netrc(url):
        raise UserError(
            "runtime.trackers: wandb has no API key; set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
        )
    _require_server("wandb", "WANDB_BASE_URL", url)


def _has_wandb_settings() -> bool:
    """Whether a settings file of wandb may say another server or mode, which only wandb itself can judge."""
    folders = [os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb", Path("wandb")]
    return any((Path(folder) / "settings").exists() for folder in folders)


def _in_netrc(url: str) -> bool:
    """Whether `wandb login` has stored a key for this server."""
    try:
        # With a path, since Python rejects the default file if others may read it, and wandb does not.
        entries = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc")
    except (OSError, netrc.NetrcParseError):
        return False
    return entries.authenticators(urllib.parse.urlsplit(url).hostname or "") is not None


def _check_mlflow() -> None:
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri.startswith(("http://", "https://")):  # a folder, a database, or a service with a client of its own
        return
    status = _require_server("mlflow", "MLFLOW_TRACKING_URI", uri)
    if status in (401, 403) and not _has_mlflow_login(uri):
        raise UserError(
            f"runtime.trackers: mlflow: {_without_login(uri)} requires a login (HTTP {status}); set "
            f"MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )


def _has_mlflow_login(uri: str) -> bool:
    names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_AUTH")
    file = Path.home() / ".mlflow" / "credentials"
    return any(map(os.environ.get, names)) or uri != _without_login(uri) or file.exists()


def _require_server(name: str, variable: str, url: str) -> int | None:
    """The HTTP status that a server answers with, through the proxies of the environment.

    None if there may be a server that the tracker itself can reach, with certificates of its own for example.

    Raises:
        UserError: if there is no such host, or nothing listens there.
    """
    url = _without_login(url)
    try:
        with urllib.request.urlopen(url, timeout=_CONNECT_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if not isinstance(reason, socket.gaierror | ConnectionRefusedError):
            return None
        raise UserError(
            f"runtime.trackers: {name}: no server answers at {url} ({reason}); check {variable} and the network"
        ) from None


def _without_login(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


_CHECKS = {"wandb": _check_wandb, "mlflow": _check_mlflow}


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A training run, as trackers know it.

    Attributes:
        name: the name of a new run.
        folder: where TensorBoard writes.
        settings: the study, logged once.
        step: the step at which training starts or resumes.
        ids: this run's id in each tracker, with which it continues there; those of new runs are added.
    """

    name: str
    folder: str
    settings: dict[str, Any]
    step: int
    ids: dict[str, str]


def open_tracker(name: str, run: TrackedRun) -> "ExperimentTracker":
    """Start a tracker, or continue the run there. Raises whatever its library does."""
    return _OPENERS[name](run)


class ExperimentTracker:
    """One open tracker."""

    def __init__(self, name: str, log: Callable[[dict[str, float], int], None], close: Callable[[], None]) -> None:
        self.name = name
        self._log = log
        self.close = close

    def log(self, record: "StepRecord") -> None:
        """Log one step's numbers under `train/`."""
        values: dict[str, float] = {}
        for name in _LOGGED:
            value = getattr(record, name)
            # A batch without anchor rows has no anchor loss.
            if value is not None:
                values[f"train/{name}"] = value
        self._log(values, record.step)


def _open_tensorboard(run: TrackedRun) -> ExperimentTracker:
    # The packages of trackers are optional, so each is imported only when a study names it.
    from torch.utils.tensorboard import SummaryWriter

    protocol, is_remote, _ = run.folder.partition("://")
    if is_remote and protocol in ("gs", "gcs"):
        _replace_instead_of_appending(protocol)
    # What an earlier run logged from this step on is not shown: those steps are made again.
    writer = SummaryWriter(run.folder, purge_step=run.step)  # type: ignore[no-untyped-call]
    writer.add_text("study", f"```\n{run.settings}\n```", run.step)  # type: ignore[no-untyped-call]

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    return ExperimentTracker("tensorboard", log, writer.close)


def _replace_instead_of_appending(protocol: str) -> None:
    """Let TensorBoard write a file of this protocol anew, with all of its events, instead of appending to it.

    Google Cloud Storage cannot append, and gcsfs 2026.10 replaces the file by what should be appended. TensorBoard 2.21
    writes files anew where a file system has no method `append`.
    """
    from tensorboard.compat.tensorflow_stub.io import gfile

    class WithoutAppend:
        def __getattr__(self, name: str) -> Any:
            if name == "append":
                raise AttributeError(name)
            return getattr(gfile.FSSpecFileSystem(), name)

    gfile.register_filesystem(protocol, WithoutAppend())


def _open_wandb(run: TrackedRun) -> ExperimentTracker:
    import wandb

    known = run.ids.get("wandb")
    session = wandb.init(
        project=_unless_set("WANDB_PROJECT", _PROJECT),
        name=_unless_set("WANDB_NAME", None if known else run.name),
        id=_unless_set("WANDB_RUN_ID", known),
        resume=_unless_set("WANDB_RESUME", "allow"),
        config=run.settings,
    )
    run.ids["wandb"] = session.id
    return ExperimentTracker("wandb", lambda values, step: session.log(values, step=step), session.finish)


def _open_mlflow(run: TrackedRun) -> ExperimentTracker:
    import mlflow

    known = _unless_set("MLFLOW_RUN_ID", run.ids.get("mlflow"))
    is_new = known is None and not os.environ.get("MLFLOW_RUN_ID")
    if is_new and not any(map(os.environ.get, ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"))):
        mlflow.set_experiment(_PROJECT)
    # MLflow 3.17 keeps what is active by thread. A run that another thread has closed still is, in this one.
    started = mlflow.active_run()
    if started is None or started.info.run_id != known:
        started = mlflow.start_run(run_id=known, run_name=run.name if is_new else None)
    run_id = run.ids["mlflow"] = started.info.run_id
    mlflow.log_dict(run.settings, "study.json", run_id=run_id)

    def close() -> None:
        active = mlflow.active_run()
        if active is not None and active.info.run_id == run_id:
            mlflow.end_run()
        else:
            mlflow.MlflowClient().set_terminated(run_id)

    def log(values: dict[str, float], step: int) -> None:
        mlflow.log_metrics(values, step=step, run_id=run_id)

    return ExperimentTracker("mlflow", log, close)


def _unless_set(variable: str, value: str | None) -> str | None:
    """The value of an argument that counts more than an environment variable; None if the user has set the latter."""
    return None if os.environ.get(variable) else value


_OPENERS: dict[str, Callable[[TrackedRun], ExperimentTracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}
