import asyncio
import errno
import io
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fsspec
import pyarrow as pa
import pyarrow.fs
import pytest
import ray.train
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.constants import ENABLE_PREEMPTION_WATCHER_ENV_VAR
from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from pipelines.executors import saved_steps
from pipelines.executors.ray import actors, data, train
from pipelines.executors.ray.states import RAY_STATES, arrow_filesystem
from pipelines.executors.ray.train import RaySession, train_function
from pipelines.executors.state_list import StateList
from pipelines.plan import make_plan
from pos2distill.config import PoolSection, Recipe
from pos2distill.environment import disable_preemption_watcher
from pos2distill.errors import MachineError, TransientError, UserError
from pos2distill.sampling.operators import ActorOperator, TaskOperator
from pos2distill.store import retry
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import STEPS_FOLDER
from pos2distill.store.retry import retry_while_unreachable
from pos2distill.training.distributed import DistContext
from tests.support.paths import ODD_NAME


class Blocks:
    """A stream whose blocks are there after some errors."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def blocks(self) -> list[pa.Table]:
        if self.errors:
            raise self.errors.pop()
        return []


def test_restarted_workers_wait_for_a_storage_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray Train's controller, which requests the blocks, would give up the run, as Ray Data would for actors."""
    monkeypatch.setattr(retry, "_RETRY_SECONDS", 0.0)
    stream = Blocks(TransientError("s3://b: cannot be used"), ConnectionResetError("reset"))
    lines: list[str] = []
    assert retry_while_unreachable(stream.blocks, lines.append) == []
    assert lines == ["reset; workers wait until the storage answers"]
    with pytest.raises(UserError, match="corrupt"):
        retry_while_unreachable(Blocks(UserError("s3://b: corrupt")).blocks, lines.append)
    # Three calls at least: one may upload for longer than the limit, and fail then.
    monkeypatch.setattr(retry, "_WAIT_SECONDS", -1.0)
    errors = [ConnectionResetError("reset")] * 3
    assert retry_while_unreachable(Blocks(*errors[:2]).blocks, lines.append) == []
    with pytest.raises(ConnectionResetError):
        retry_while_unreachable(Blocks(*errors).blocks, lines.append)


def test_arrow_filesystem_wraps_the_artifacts_own(make_recipe: Callable[..., Recipe]) -> None:
    artifact = make_plan(make_recipe(runtime={"storage": f"memory://bucket/{ODD_NAME}"})).distill.artifact
    filesystem = arrow_filesystem(artifact)
    assert filesystem is not None
    filesystem.create_dir(artifact.path)
    with filesystem.open_output_stream(f"{artifact.path}/state/note") as file:
        file.write(b"42")
    assert artifact.fs.cat_file(f"{artifact.path}/state/note") == b"42"
    filesystem.delete_dir(f"{artifact.path}/state")
    assert not artifact.fs.exists(f"{artifact.path}/state")


@pytest.fixture
def local_list(make_recipe: Callable[..., Recipe]) -> tuple[pyarrow.fs.FileSystem, str]:
    """Ray Train's file system of a local checkpoint, and the path of its list of states, which is not there yet."""
    artifact = make_plan(make_recipe()).distill.artifact
    filesystem = arrow_filesystem(artifact)
    filesystem.create_dir(artifact.path)
    return filesystem, f"{artifact.path}/checkpoint_manager_snapshot.json"


def test_arrow_filesystem_writes_a_local_list_whole_or_not_at_all(
    local_list: tuple[pyarrow.fs.FileSystem, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem, path = local_list

    def write(data: bytes) -> None:
        with filesystem.open_output_stream(path) as file:
            file.write(data)
            assert Path(path).exists() == (data != b"first")

    write(b"first")
    write(b"second" * 1000)
    assert Path(path).read_bytes() == b"second" * 1000
    assert filesystem.open_input_stream(path).read() == b"second" * 1000
    with pytest.raises(MemoryError), filesystem.open_output_stream(path):
        raise MemoryError  # while Ray Train makes the content
    assert Path(path).read_bytes() == b"second" * 1000
    monkeypatch.setattr("pipelines.executors.ray.states.FileIO", FullDisk)
    with pytest.raises(OSError, match="No space left on device"):
        write(b"third")
    assert Path(path).read_bytes() == b"second" * 1000
    assert [each.name for each in Path(path).parent.iterdir()] == ["checkpoint_manager_snapshot.json"]
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(OSError, match="Input/output error"):
        write(b"fourth")
    assert Path(path).read_bytes() == b"second" * 1000
    assert [each.name for each in Path(path).parent.iterdir()] == ["checkpoint_manager_snapshot.json"]


def test_a_list_that_cannot_be_written_at_its_end_does_not_replace_the_one_before(
    local_list: tuple[pyarrow.fs.FileSystem, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a mount with a quota that writes when a file is closed."""
    filesystem, path = local_list
    Path(path).write_bytes(b"before")
    monkeypatch.setattr("pipelines.executors.ray.states.FileIO", OverQuota)
    with pytest.raises(OSError, match="quota"), filesystem.open_output_stream(path) as file:
        file.write(b"after")
    assert Path(path).read_bytes() == b"before"
    assert [each.name for each in Path(path).parent.iterdir()] == ["checkpoint_manager_snapshot.json"]


class OverQuota(io.FileIO):
    """A file that finds out at its end that it cannot be written."""

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


class FullDisk(io.FileIO):
    """A file, the first write to which takes two bytes, and the next one none."""

    def write(self, data: Any) -> int:
        if self.tell():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data[:2])


def test_actors_wait_for_a_storage_that_does_not_answer_while_they_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_RETRY_SECONDS", 0.0)
    lines: list[str] = []
    mailbox: Any = SimpleNamespace(warn=lines.append)

    def creating(error: Exception) -> Callable[[], Any]:
        return Mock(side_effect=[error, len])

    operator = ActorOperator("samplers", creating(TransientError("the hub is down")), PoolSection())
    assert data._Actor(operator, mailbox, None).function is len
    assert actors._Actor(creating(ConnectionResetError("reset")), mailbox).function is len
    assert [line.partition(";")[0] for line in lines] == ["the hub is down", "reset"]


def test_tasks_wait_for_a_storage_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Data 2.60 would give up the whole dataset, with all its actors."""
    monkeypatch.setattr(retry, "_RETRY_SECONDS", 0.0)
    lines: list[str] = []
    mailbox: Any = SimpleNamespace(warn=lines.append)
    block = pa.table({"index": [1]})
    dataset = Mock()
    monkeypatch.setattr("ray.data.from_arrow", lambda _: dataset)

    def task(*results: Any) -> Callable[[pa.Table], pa.Table]:
        data.build_dataset([block], [TaskOperator("read examples", Mock(side_effect=results))], mailbox)
        function: Callable[[pa.Table], pa.Table] = dataset.map_batches.call_args.args[0]
        return function

    reading = task(TransientError("s3://b/r: cannot be used"), ConnectionResetError("reset"), block)
    assert reading.__name__ == "read examples"
    assert reading(block) is block
    assert lines == ["s3://b/r: cannot be used; workers wait until the storage answers"]
    with pytest.raises(UserError, match="no rights"):
        task(UserError("no rights"))(block)


@pytest.mark.parametrize("kind", [UserError, TransientError, MachineError])
def test_an_error_of_a_worker_keeps_its_kind(kind: type[UserError], monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on a cluster is tried again after some of them alone."""
    error = kind("the cause")
    reported: list[UserError] = []
    coordinator = SimpleNamespace(fatal_error=lambda: reported[0] if reported else None, report_fatal=reported.append)

    def fail(*_: object) -> None:
        raise RuntimeError("wrapped") from error

    def train(workers: int) -> Any:
        monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_world_size=lambda: workers))
        return train_function({"job": None, "coordinator": coordinator, "mailbox": None})

    monkeypatch.setattr("pipelines.executors.ray.train.RaySession", lambda *_: None)
    monkeypatch.setattr("pos2distill.training.worker.run_worker", fail)
    assert train(workers=1) == {"fatal": error}
    # The other worker waits for this one, until Ray Train restarts both; then both return the error.
    with pytest.raises(RuntimeError, match="wrapped"):
        train(workers=2)
    assert train(workers=2) == {"fatal": error}


@pytest.fixture
def saved_states(make_recipe: Callable[..., Recipe]) -> tuple[Artifact, Callable[[], CheckpointManager]]:
    """A checkpoint with the states of three steps, listed by Ray Train itself, and Ray Train's view of them."""
    artifact = make_plan(make_recipe()).distill.artifact
    artifact.fs.makedirs(artifact.path)
    storage = StorageContext(artifact.path, "training", storage_filesystem=arrow_filesystem(artifact))

    def manager() -> CheckpointManager:
        return CheckpointManager(CheckpointConfig(), storage)

    async def register() -> None:
        states = manager()
        for step in (3, 6, 9):
            name = f"checkpoint_{step}"
            (Path(artifact.path) / "training" / name).mkdir(parents=True)
            state = Checkpoint(storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)
            states.register_checkpoint(_TrainingReport(checkpoint=state, metrics={"step": step}, validation=False))

    asyncio.run(register())
    assert RAY_STATES.read(artifact) == {"checkpoint_3": 3, "checkpoint_6": 6, "checkpoint_9": 9}
    return artifact, manager


@pytest.mark.parametrize("missing", [[9], [6], [3, 9]])
def test_ray_train_continues_from_another_state_if_a_listed_one_is_missing(
    saved_states: tuple[Artifact, Callable[[], CheckpointManager]],
    missing: list[int],
) -> None:
    artifact, manager = saved_states
    for step in missing:
        (Path(artifact.path) / "training" / f"checkpoint_{step}").rmdir()
    with pytest.raises(CheckpointManagerInitializationError):
        manager()
    left = [step for step in (3, 6, 9) if step not in missing]
    assert saved_steps(artifact) == {"ray": left[-1]}
    RAY_STATES.repair(artifact)
    assert list(RAY_STATES.read(artifact).values()) == left
    latest = manager().latest_checkpoint_result
    assert latest is not None
    assert latest.metrics == {"step": left[-1]}


@pytest.fixture
def session() -> RaySession:
    made = object.__new__(RaySession)  # the constructor asks Ray Train for the worker's rank
    made.dist, made.local_rank, made.node_rank, made.is_local = DistContext(), 0, 0, False
    made.checkpoint, made.listed = Artifact("s3://bucket", "checkpoint", "1"), False
    return made


def test_opened_state_of_a_remote_storage_is_copied_to_scratch_and_removed(session: RaySession, tmp_path: Path) -> None:
    memory: Any = fsspec.filesystem("memory")
    folder = f"/{uuid.uuid4().hex}/checkpoint"
    memory.pipe(f"{folder}/state.json", b"{}")
    filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(memory))
    with session.opened_state(Checkpoint(folder, filesystem), tmp_path) as copy:
        assert session.state_url(Checkpoint(folder, filesystem)) == "s3://bucket/checkpoint-1/training/checkpoint"
        assert copy.is_relative_to(tmp_path)
        assert (copy / "state.json").read_bytes() == b"{}"
    assert not list(tmp_path.iterdir())


def test_opened_state_waits_for_a_storage_that_does_not_answer(
    session: RaySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "_RETRY_SECONDS", 0.0)
    lines: list[str] = []
    session.mailbox = SimpleNamespace(warn=lines.append)  # type: ignore[assignment]
    state: Any = Mock(to_directory=Mock(side_effect=[ConnectionResetError("reset"), None]))
    with session.opened_state(state, tmp_path) as copy:
        assert copy.exists()
    assert state.to_directory.call_count == 2
    assert lines == ["reset; workers wait until the storage answers"]


def test_opened_state_of_a_mounted_storage_is_read_in_place(session: RaySession, tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    session.is_local = True
    scratch = tmp_path / "scratch"
    with session.opened_state(Checkpoint.from_directory(stored), scratch) as folder:
        assert folder == stored
    assert stored.exists()
    assert not scratch.exists()


def test_a_state_that_is_missing_in_a_remote_storage_is_an_empty_folder(session: RaySession, tmp_path: Path) -> None:
    """Whoever reads it finds its files missing, and an earlier state is tried."""
    filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("memory")))
    with session.opened_state(Checkpoint(f"/{uuid.uuid4().hex}/gone", filesystem), tmp_path) as copy:
        assert not list(copy.iterdir())


@pytest.mark.parametrize(("storage", "expected"), [("/mnt/run", (3, 4)), ("s3://bucket/run", (1, 2))])
def test_each_copy_of_a_state_is_checked_by_those_who_read_it(
    monkeypatch: pytest.MonkeyPatch, storage: str, expected: tuple[int, int]
) -> None:
    """The last of two workers on the second of two nodes. Mounted files are the same for all four."""
    numbers = {"world_rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "node_rank": 1}
    context = SimpleNamespace(**{f"get_{name}": lambda number=number: number for name, number in numbers.items()})
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(DistContext, "create", lambda *_: DistContext())
    job: Any = SimpleNamespace(
        checkpoint=Artifact(storage, "checkpoint", "f00d"),
        runtime=SimpleNamespace(trainers=SimpleNamespace(gpus=0)),
        study=SimpleNamespace(samples_per_batch=4),
    )
    other: Any = None
    session = RaySession(job, other, other)
    assert (session.reader_rank, session.readers) == expected


def test_wait_until_listed_waits_for_the_first_list_alone(
    session: RaySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller writes it up to two seconds after the upload."""
    session.checkpoint = Artifact(str(tmp_path), "checkpoint", "f00d")
    waits = []

    def controller(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            session.checkpoint.write_json(f"{RAY_STATES.folder}/{RAY_STATES.file}", {})

    monkeypatch.setattr("pipelines.executors.ray.train.time.sleep", controller)
    session.checkpoint.fs.makedirs(f"{session.checkpoint.path}/{RAY_STATES.folder}")
    session.wait_until_listed()
    assert len(waits) == 2
    session.checkpoint.remove(RAY_STATES.folder)
    session.wait_until_listed()
    assert len(waits) == 2


@pytest.mark.parametrize("error", [None, ConnectionResetError("reset")])
def test_wait_until_listed_waits_a_minute_at_most(
    session: RaySession, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Of a list that never comes, Ray Train says why; a storage that is away, the upload waits for."""
    seconds = [0.0]

    def is_written(*_: Artifact) -> bool:
        if error is not None:
            raise error
        return False

    monkeypatch.setattr(StateList, "is_written", is_written)
    monkeypatch.setattr("pipelines.executors.ray.train.time.monotonic", lambda: seconds[0])
    monkeypatch.setattr("pipelines.executors.ray.train.time.sleep", lambda pause: seconds.append(seconds.pop() + pause))
    session.wait_until_listed()
    assert seconds == [60.0]


def test_wait_until_listed_raises_what_will_not_pass(session: RaySession, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_written(*_: Artifact) -> bool:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(StateList, "is_written", is_written)
    with pytest.raises(PermissionError, match="denied"):
        session.wait_until_listed()


def test_saved_states_of_a_new_run_are_none(
    session: RaySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers may have been lost after they had saved their first state, and before it was listed."""
    session.checkpoint = Artifact(str(tmp_path), "checkpoint", "f00d")
    state = Path(session.checkpoint.path) / RAY_STATES.folder / "checkpoint_3"
    state.mkdir(parents=True)
    (state / "state.json").write_text('{"files": []}')
    # As many as a run has that lost its list.
    (Path(session.checkpoint.path) / STEPS_FOLDER).mkdir()
    for step in (0, 3):
        session.checkpoint.write_json(f"{STEPS_FOLDER}/{step:08d}.jsonl", {})
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    warned: list[str] = []
    session.mailbox = SimpleNamespace(warn=warned.append)  # type: ignore[assignment]
    session.dist = DistContext(1, 2)
    assert not list(session.saved_states())
    assert state.exists()
    session.dist = DistContext(0, 2)
    # Another run has taken the storage over.
    listed = f"{RAY_STATES.folder}/{RAY_STATES.file}"
    session.checkpoint.write_json(listed, {})
    assert not list(session.saved_states())
    assert state.exists()
    session.checkpoint.remove(listed)
    for _ in range(2):
        assert not list(session.saved_states())
        assert not state.exists()
    assert warned == ["the workers were lost before their first training state was listed; training begins again"]


class Outage(pyarrow.fs.FSSpecHandler):  # type: ignore[misc]  # untyped
    """A storage whose first files raise these errors when they are written."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(fsspec.filesystem("memory"))
        self.errors = list(errors)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        if self.errors:
            raise self.errors.pop(0)
        return super().open_output_stream(path, metadata)


@pytest.fixture
def upload(
    session: RaySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Checkpoint, list[str]]]:
    """`upload(*errors)`: Ray Train's own upload to a storage with these errors, and what the user is warned of."""

    def report(_: Any, *, checkpoint: Checkpoint, checkpoint_upload_fn: Any, **__: Any) -> None:
        uploaded.append(checkpoint_upload_fn(checkpoint, "checkpoint_1"))

    def run(*errors: Exception) -> tuple[Checkpoint, list[str]]:
        files = Outage()
        storage = StorageContext(
            f"/{uuid.uuid4().hex}", experiment_dir_name="training", storage_filesystem=pyarrow.fs.PyFileSystem(files)
        )
        if session.is_local:
            storage = StorageContext(str(tmp_path / "run"), experiment_dir_name="training")
        files.errors = list(errors)
        monkeypatch.setattr(train, "get_train_context", lambda: SimpleNamespace(storage_context=storage))
        session.save_state(3, folder)
        return uploaded[-1], lines

    lines: list[str] = []
    uploaded: list[Checkpoint] = []
    session.mailbox = SimpleNamespace(warn=lines.append)  # type: ignore[assignment]
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(retry, "_RETRY_SECONDS", 0.0)
    return run


def test_save_state_uploads_again_after_an_outage(upload: Callable[..., tuple[Checkpoint, list[str]]]) -> None:
    """As s3fs words what S3 answers when it is overloaded; Ray Train would restart all workers."""
    busy = OSError(errno.EBUSY, "Please reduce your request rate.")
    stored, lines = upload(busy, ConnectionResetError("reset"))
    with stored.as_directory() as copy:
        assert (Path(copy) / "state.json").read_text() == "{}"
    assert lines == ["[Errno 16] Please reduce your request rate.; workers wait until the storage answers"]


def test_a_state_in_a_mounted_storage_is_on_the_disk_before_it_is_listed(
    upload: Callable[..., tuple[Checkpoint, list[str]]], session: RaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(train, "sync", synced.extend)
    session.is_local = True
    stored, _ = upload()
    folder = Path(stored.path)
    assert (folder / "state.json").read_text() == "{}"
    assert synced == [folder / "state.json", folder]


def test_save_state_raises_what_will_not_pass(upload: Callable[..., tuple[Checkpoint, list[str]]]) -> None:
    with pytest.raises(PermissionError):
        upload(PermissionError("Access Denied"))


def test_disable_preemption_watcher_sets_the_variable_that_ray_train_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE_PREEMPTION_WATCHER_ENV_VAR, "1")
    disable_preemption_watcher()
    assert os.environ[ENABLE_PREEMPTION_WATCHER_ENV_VAR] == "0"
