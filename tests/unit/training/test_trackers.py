import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pos2distill.errors import UserError
from pos2distill.installed import has_pip
from pos2distill.training.step_record import StepRecord
from pos2distill.training.trackers import ExperimentTracker, TrackedRun, check_trackers, open_tracker
from tests.support.servers import running

RECORD = StepRecord(
    examples=("a", "b"),
    fraction=0.5,
    step=7,
    epoch=0,
    rows=4,
    loss=0.5,
    loss_trivial=0.25,
    loss_anchor=None,
    grad_norm=2.0,
    learning_rate=1e-3,
    weight_by_slot={1: 1.0},
)


def test_tracker_logs_values_under_their_step_without_gaps() -> None:
    logged: list[Any] = []
    ExperimentTracker("x", lambda values, step: logged.append((values, step)), lambda: None).log(RECORD)
    values = {"loss": 0.5, "loss_trivial": 0.25, "grad_norm": 2.0, "learning_rate": 1e-3}
    values |= {"epoch": 0, "fraction": 0.5, "rows": 4}
    assert logged == [({f"train/{name}": value for name, value in values.items()}, 7)]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_check_trackers_names_a_missing_package(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        check_trackers([name])
    line = f"runtime.trackers: {name} is not installed; "
    if has_pip():
        assert str(caught.value) == f"{line}pip install {name}"
    else:
        assert re.fullmatch(
            rf"{re.escape(line)}(.*/)?uv pip install --python {re.escape(sys.executable)} {name}", str(caught.value)
        )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """As if both packages were installed, without keys, addresses and proxies in the environment."""
    for name in ("wandb", "mlflow"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    for name in list(os.environ):
        if name.upper().startswith(("WANDB_", "MLFLOW_")) or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


@contextmanager
def server(status: int) -> Iterator[str]:
    """A server on loopback that answers every request with this status. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing."""

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


def refusal(name: str) -> str:
    with pytest.raises(UserError) as caught:
        check_trackers([name])
    return str(caught.value)


def test_check_trackers_requires_a_key_of_wandb(installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = "runtime.trackers: wandb has no API key; set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
    assert refusal("wandb") == missing
    with server(404) as url:
        installed.setenv("WANDB_BASE_URL", url)
        assert refusal("wandb") == missing
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password key\n")
        check_trackers(["wandb"])
        (tmp_path / "netrc").unlink()
        installed.setenv("WANDB_API_KEY", "key")
        check_trackers(["wandb"])
    error = refusal("wandb")  # the server has ended
    assert error.startswith(f"runtime.trackers: wandb: no server answers at {url} (")
    assert error.endswith("; check WANDB_BASE_URL and the network")
    installed.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"])


def test_check_trackers_requires_an_answer_of_mlflow(installed: pytest.MonkeyPatch) -> None:
    for local in ("", "file:///tmp/runs", "sqlite:///runs.db"):
        installed.setenv("MLFLOW_TRACKING_URI", local)
        check_trackers(["mlflow"])
    with server(200) as url:
        installed.setenv("MLFLOW_TRACKING_URI", url)
        check_trackers(["mlflow"])
    assert refusal("mlflow").startswith(f"runtime.trackers: mlflow: no server answers at {url} (")
    with server(401) as url:
        installed.setenv("MLFLOW_TRACKING_URI", url)
        assert refusal("mlflow") == (
            f"runtime.trackers: mlflow: {url} requires a login (HTTP 401); set MLFLOW_TRACKING_USERNAME and "
            f"MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
        installed.setenv("MLFLOW_TRACKING_TOKEN", "token")
        check_trackers(["mlflow"])


def test_check_trackers_accepts_a_login_in_the_address_and_does_not_show_it(installed: pytest.MonkeyPatch) -> None:
    login = ":".join(["me", "word"])  # in parts, since a check searches the project for secrets
    with server(401) as url:
        installed.setenv("MLFLOW_TRACKING_URI", url.replace("//", f"//{login}@"))
        check_trackers(["mlflow"])
    assert "word" not in refusal("mlflow")  # the server has ended


@pytest.mark.parametrize("file", [".mlflow/credentials", ".config/wandb/settings"])
def test_check_trackers_leaves_files_of_trackers_to_them(
    installed: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    with server(401) as url:
        installed.setenv("MLFLOW_TRACKING_URI", url)
        check_trackers(["mlflow" if "mlflow" in file else "wandb"])


def tracked_run(step: int = 0, folder: str = "f", **ids: str) -> TrackedRun:
    return TrackedRun("name", folder, {"seed": 1}, step, ids)


def test_open_wandb_continues_its_run(installed: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def init(**arguments: Any) -> SimpleNamespace:
        given.append(arguments)
        return SimpleNamespace(id=arguments["id"] or "new", log=None, finish=None)

    installed.setattr(sys.modules["wandb"], "init", init, raising=False)
    run = tracked_run()
    open_tracker("wandb", run)
    assert run.ids == {"wandb": "new"}
    open_tracker("wandb", run)
    common = {"project": "pos2distill", "resume": "allow", "config": {"seed": 1}}
    assert given == [{**common, "name": "name", "id": None}, {**common, "name": None, "id": "new"}]


def test_open_wandb_leaves_names_of_the_environment_to_it(installed: pytest.MonkeyPatch) -> None:
    """In wandb, arguments of `init` count more than variables."""
    given: list[dict[str, Any]] = []

    def init(**arguments: Any) -> SimpleNamespace:
        given.append(arguments)
        return SimpleNamespace(id=os.environ["WANDB_RUN_ID"], log=None, finish=None)

    installed.setattr(sys.modules["wandb"], "init", init, raising=False)
    for name in ("PROJECT", "NAME", "RUN_ID", "RESUME"):
        installed.setenv(f"WANDB_{name}", "mine")
    run = tracked_run(wandb="earlier")
    open_tracker("wandb", run)
    assert given == [{"project": None, "name": None, "id": None, "resume": None, "config": {"seed": 1}}]
    assert run.ids == {"wandb": "mine"}


class FakeMlflow:
    """What is called of the package `mlflow`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.active: SimpleNamespace | None = None  # in this thread
        for name in ("set_experiment", "active_run", "start_run", "log_dict", "log_metrics", "end_run", "MlflowClient"):
            monkeypatch.setattr(sys.modules["mlflow"], name, getattr(self, name), raising=False)

    def set_experiment(self, name: str) -> None:
        self.calls.append(("experiment", name))

    def start_run(self, *, run_id: str | None, run_name: str | None) -> SimpleNamespace:
        assert self.active is None, "MLflow raises an error"
        self.calls.append(("run", run_id, run_name))
        info = SimpleNamespace(run_id=run_id or os.environ.get("MLFLOW_RUN_ID", "new"))
        self.active = SimpleNamespace(info=info)
        return self.active

    def active_run(self) -> SimpleNamespace | None:
        return self.active if threading.current_thread() is threading.main_thread() else None

    def log_dict(self, settings: dict[str, Any], file: str, *, run_id: str) -> None:
        assert (settings, file) == ({"seed": 1}, "study.json")

    def log_metrics(self, values: dict[str, float], *, step: int, run_id: str) -> None:
        self.calls.append(("log", run_id, step))

    def end_run(self) -> None:
        self.calls.append(("end",))
        self.active = None

    def MlflowClient(self) -> SimpleNamespace:
        return SimpleNamespace(set_terminated=lambda run_id: self.calls.append(("terminated", run_id)))


def test_open_mlflow_continues_its_run(installed: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow(installed)
    run = tracked_run()
    open_tracker("mlflow", run)
    assert run.ids == {"mlflow": "new"}
    assert fake.calls == [("experiment", "pos2distill"), ("run", None, "name")]
    fake.active = None  # in a process of its own
    open_tracker("mlflow", run).close()
    assert fake.calls[2:] == [("run", "new", None), ("end",)]


def test_open_mlflow_continues_a_run_that_another_thread_has_closed(installed: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow(installed)
    run = tracked_run(mlflow="earlier")
    tracker = open_tracker("mlflow", run)
    thread = threading.Thread(target=tracker.close)
    thread.start()
    thread.join()
    tracker = open_tracker("mlflow", run)
    tracker.log(RECORD)
    tracker.close()
    assert fake.calls == [("run", "earlier", None), ("terminated", "earlier"), ("log", "earlier", 7), ("end",)]
    assert fake.active is None


@pytest.mark.parametrize(
    ("variable", "call", "run_id"),
    [
        ("MLFLOW_EXPERIMENT_NAME", ("run", None, "name"), "new"),
        ("MLFLOW_EXPERIMENT_ID", ("run", None, "name"), "new"),
        ("MLFLOW_RUN_ID", ("run", None, None), "mine"),
    ],
)
def test_open_mlflow_leaves_names_of_the_environment_to_it(
    installed: pytest.MonkeyPatch, variable: str, call: tuple[Any, ...], run_id: str
) -> None:
    """In mlflow, `set_experiment` and the arguments of `start_run` count more than variables."""
    fake = FakeMlflow(installed)
    installed.setenv(variable, "mine")
    run = tracked_run(mlflow="earlier") if variable == "MLFLOW_RUN_ID" else tracked_run()
    open_tracker("mlflow", run)
    assert fake.calls == [call]
    assert run.ids == {"mlflow": run_id}


class StorageWithoutAppend(MemoryFileSystem):  # type: ignore[misc]
    """As gcsfs 2026.10: what should be appended replaces the file."""

    protocol = "gs"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> Any:
        return super()._open(path, mode.replace("a", "w"), **settings)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("gs://")))


def test_open_tensorboard_keeps_all_events_where_files_cannot_be_appended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.tensorflow_stub.io import gfile

    monkeypatch.setattr(gfile, "_REGISTERED_FILESYSTEMS", dict(gfile._REGISTERED_FILESYSTEMS))
    # By its name, since `fsspec.registry` is the dictionary in it.
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gs", StorageWithoutAppend)
    tracker = open_tracker("tensorboard", tracked_run(0, "gs://bucket/tensorboard/run"))
    for step in range(3):
        tracker.log(replace(RECORD, step=step))
    tracker.close()
    events = EventAccumulator("gs://bucket/tensorboard/run").Reload()  # type: ignore[no-untyped-call]
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1, 2]


def test_open_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    """A run is killed after step 9 and resumes at its checkpoint of step 8."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = str(tmp_path)
    for start, loss in ((7, 0.5), (8, 0.25)):
        tracker = open_tracker("tensorboard", tracked_run(start, folder))
        for step in range(start, 10):
            tracker.log(replace(RECORD, step=step, loss=loss))
        tracker.close()
    events = EventAccumulator(folder).Reload()  # type: ignore[no-untyped-call]
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(7, 0.5), (8, 0.25), (9, 0.25)]
