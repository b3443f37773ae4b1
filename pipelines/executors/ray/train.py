"""The training loop on Ray Train workers, and the stream of samples that they read."""

import contextlib
import functools
import math
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.train
import ray.train.torch
import torch
from ray.data import DataIterator
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2.api.report_config import CheckpointUploadMode

from pos2distill.errors import UserError
from pos2distill.faults import is_transient
from pos2distill.literal_paths import last_part, make_folder
from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.store.checkpoint_layout import STATE_FOLDER
from pos2distill.store.files import sync
from pos2distill.store.retry import retry_while_unreachable
from pos2distill.training.distributed import DistContext
from pos2distill.training.job import TrainingJob, TrainingOutcome

from ..protocol import Coordinator, Stream
from .connection import stream_options, trainer_arguments
from .data import open_stream
from .errors import find_user_error
from .messages import DriverMailbox
from .preemption import PreemptionNotice
from .states import RAY_STATES, arrow_filesystem

_STREAM = "samples"  # the stream's name among the data sets of Ray Train
_POLL_SECONDS = 0.5
_LISTED_SECONDS = 60.0


def fit(job: TrainingJob, stream: Stream, mailbox: DriverMailbox, coordinator: Coordinator) -> TrainingOutcome:
    """Train on workers of Ray Train, which restarts them from the last checkpoint when one is lost.

    Raises:
        UserError: if training cannot continue.
    """
    trainers = job.runtime.trainers
    make_folder(job.checkpoint.fs, job.checkpoint.path)
    RAY_STATES.repair(job.checkpoint)
    trainer = TorchTrainer(
        train_function,
        train_loop_config={"job": job, "coordinator": coordinator, "mailbox": mailbox},
        torch_config=TorchConfig(backend="nccl" if trainers.gpus else "gloo"),
        scaling_config=ScalingConfig(**trainer_arguments(trainers)),
        # Ray Train 2.60 resumes from the last checkpoint of a run with the same name and storage path.
        run_config=RunConfig(
            name=STATE_FOLDER,
            storage_path=job.checkpoint.path,
            storage_filesystem=arrow_filesystem(job.checkpoint),
            checkpoint_config=CheckpointConfig(num_to_keep=job.runtime.checkpoints.keep),
            failure_config=FailureConfig(max_failures=trainers.max_restarts),
            callbacks=[PreemptionNotice()],
        ),
        # Ray Train calls it whenever workers start, so that restarted workers get what is missing by then.
        datasets={_STREAM: functools.partial(open_stream, stream, mailbox, coordinator)},
        dataset_config=DataConfig(
            enable_shard_locality=False,  # samplers and trainers share no node
            execution_options=stream_options(preserve_order=stream.preserve_order),
        ),
    )
    # The return value of rank 0. `Result.metrics` has only what was reported with a checkpoint (Ray 2.60).
    result: dict[str, Any] = trainer.fit().return_value
    if "fatal" in result:
        fatal: UserError = result["fatal"]
        raise fatal
    return TrainingOutcome(**result)


def train_function(config: dict[str, Any]) -> dict[str, Any]:
    """What Ray Train runs on each worker. An error that a restart would not fix is returned as `fatal`.

    Such an error may be one worker's alone, while the others wait for it. Then it is reported to the coordinator and
    raised: Ray Train restarts all workers, and all of them return the reported error.
    """
    # Here, since Ray Train's controller loads this module too, and needs no transformers.
    from pos2distill.training.worker import run_worker

    job: TrainingJob = config["job"]
    coordinator: Coordinator = config["coordinator"]
    fatal = coordinator.fatal_error()
    if fatal is not None:
        return {"fatal": fatal}
    try:
        outcome = run_worker(job, RaySession(job, coordinator, config["mailbox"]))
    except Exception as error:
        cause = find_user_error(error)
        if cause is not None:
            # No other worker waits for this one, so it can return instead of causing a restart.
            if ray.train.get_context().get_world_size() == 1:
                return {"fatal": cause}
            coordinator.report_fatal(cause)
        raise
    return asdict(outcome)


class RaySession:
    """The rank, the device, the sample stream, and the checkpoint I/O of a Ray Train worker."""

    def __init__(self, job: TrainingJob, coordinator: Coordinator, mailbox: DriverMailbox) -> None:
        context = ray.train.get_context()
        world_size = context.get_world_size()
        # Ray shows a worker without GPUs those of its machine, so the settings decide.
        self.device = ray.train.torch.get_device() if job.runtime.trainers.gpus else torch.device("cpu")
        self.dist = DistContext.create(context.get_world_rank(), world_size, str(self.device))
        self.local_rank = context.get_local_rank()
        self.node_rank = context.get_node_rank()
        self.coordinator = coordinator
        self.mailbox = mailbox
        self.is_local = job.checkpoint.is_local
        # On a mounted storage all workers read the same files; from a remote one, each node makes a copy.
        self.reader_rank, self.readers = context.get_world_rank(), world_size
        if not self.is_local:
            self.reader_rank, self.readers = self.local_rank, context.get_local_world_size()
        self.checkpoint = job.checkpoint
        self.listed = False  # whether a list of states was seen
        # Rounded up, so that one poll of all workers together can fill a global batch.
        self.rows_per_poll = math.ceil(job.study.samples_per_batch / world_size)

    def open_stream(self) -> "ShardReader":
        """See `WorkerSession.open_stream`."""
        return ShardReader(ray.train.get_dataset_shard(_STREAM), self.rows_per_poll)

    def saved_states(self) -> Iterator[Checkpoint]:
        """See `WorkerSession.saved_states`."""
        newest = ray.train.get_checkpoint()
        if newest is None:
            if self.dist.rank == 0:
                retry_while_unreachable(lambda: RAY_STATES.remove_unlisted(self.checkpoint, self.warn), self.warn)
            return
        yield newest
        # Asked for only if the newest one is corrupt. Those on the storage, whether or not they are validated, which
        # none of ours is.
        reported = ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
        for each in reversed(reported):
            if each.checkpoint.path != newest.path:
                yield each.checkpoint

    def state_url(self, state: Checkpoint) -> str:
        """See `WorkerSession.state_url`."""
        return f"{self.checkpoint.url}/{STATE_FOLDER}/{last_part(state.path)}"

    @contextmanager
    def opened_state(self, state: Checkpoint, scratch: Path) -> Iterator[Path]:
        """See `WorkerSession.opened_state`."""
        if self.is_local:
            yield Path(state.path)
            return
        # `Checkpoint.as_directory` (Ray 2.60) leaves its copy on the disk for ever if a worker dies that reads it.
        copy = scratch / f"resume-{self.node_rank}"  # several nodes may be on one machine
        if self.local_rank == 0:
            copy.mkdir(parents=True, exist_ok=True)
            # In an empty folder, whoever reads the state finds its files missing.
            with contextlib.suppress(FileNotFoundError):
                retry_while_unreachable(lambda: state.to_directory(copy), self.warn)
        self.dist.all_gather_object("copied")
        # After an error the copy stays, since other workers may still read it. The next ones on this node remove it.
        yield copy
        self.dist.all_gather_object("read")
        if self.local_rank == 0:
            shutil.rmtree(copy)

    def save_state(self, step: int, folder: Path) -> None:
        """See `WorkerSession.save_state`. Ray Train uploads and removes the folder while training continues."""
        ray.train.report(
            {"step": step},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=self._upload,
        )

    def _upload(self, checkpoint: Checkpoint, name: str) -> Checkpoint:
        """Upload a state as Ray Train does, again after an error that may pass; a local copy is on the disk then.

        Ray Train 2.60 itself tries again only after errors of pyarrow's own S3 client, restarts all workers after any
        other one, and gives up after a few of them in a whole run.
        """
        storage = get_train_context().storage_context
        # Other ranks sync their files themselves.
        own = [path.name for path in Path(checkpoint.path).iterdir()]

        def upload() -> Checkpoint:
            uploaded = storage.persist_current_checkpoint(checkpoint, name)
            if self.is_local:
                folder = Path(uploaded.path)
                sync([*(folder / file for file in own), folder])
            return uploaded

        return retry_while_unreachable(upload, self.warn)

    def wait_until_listed(self) -> None:
        """See `WorkerSession.wait_until_listed`.

        Ray Train's controller (2.60) learns of a state when it next asks its workers, every two seconds, and then
        writes the list. If it cannot, it ends the run by itself.
        """
        deadline = time.monotonic() + _LISTED_SECONDS
        while not self.listed and time.monotonic() < deadline:
            try:
                self.listed = RAY_STATES.is_written(self.checkpoint)
            except Exception as error:  # errors of file systems share no base class
                if not is_transient(error):
                    raise
            if not self.listed:
                time.sleep(_POLL_SECONDS)

    def stop_requested(self) -> bool:
        """See `WorkerSession.stop_requested`."""
        return self.coordinator.stop_requested()

    def is_preempted(self) -> bool:
        """See `WorkerSession.is_preempted`.

        Ray 2.60's public `get_preemption_info` returns the same but waits for all ranks; the training loop exchanges
        their actions anyway.
        """
        return get_train_context().preemption_context.preemption_info is not None

    def warn(self, line: str) -> None:
        """See `WorkerSession.warn`."""
        self.mailbox.warn(line)

    def report_step(self, trained: int, steps: int, loss: float) -> None:
        """See `WorkerSession.report_step`."""
        self.coordinator.report_step(trained, steps, loss)


class ShardReader:
    """This worker's part of the stream, read by a thread, so that `poll` never waits long.

    Args:
        shard: part of the stream.
        rows: how many are read at a time.
    """

    def __init__(self, shard: DataIterator, rows: int) -> None:
        # Two batches ahead: when the queue is full the samplers wait, instead of filling the memory.
        self.parts: queue.Queue[pa.Table | BaseException | None] = queue.Queue(maxsize=2)
        self.ended = False
        # A daemon, so that a read that never returns does not keep the process alive.
        threading.Thread(target=self._read, args=(shard, rows), name="shard", daemon=True).start()

    def poll(self) -> pa.Table | None:
        """The next samples; an empty table if none arrived in half a second; None once the stream has ended."""
        if self.ended:
            return None
        try:
            part = self.parts.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return SAMPLE_SCHEMA.empty_table()
        if isinstance(part, BaseException):
            raise part
        self.ended = part is None
        return part

    def _read(self, shard: DataIterator, rows: int) -> None:
        try:
            for batch in shard.iter_batches(batch_size=rows, batch_format="pyarrow"):
                self.parts.put(batch.cast(SAMPLE_SCHEMA))
            self.parts.put(None)
        except BaseException as error:  # raised again by `poll`
            self.parts.put(error)
