"""The `local` executor: one process, no Ray. For tests, debuggers and notebooks; same results as the `ray` executor."""

import asyncio
import contextlib
import functools
import shutil
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pydantic

from pos2distill.config import PoolSection, Runtime
from pos2distill.errors import CorruptPart, TransientError, warn
from pos2distill.hardware import release_gpu_memory
from pos2distill.literal_paths import download
from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.sampling.blocks import batches_of
from pos2distill.sampling.operators import ActorOperator, Operator
from pos2distill.store.checkpoint_layout import STATE_FOLDER
from pos2distill.store.files import sync_folder
from pos2distill.store.retry import retry_while_unreachable
from pos2distill.training.job import TrainingJob, TrainingOutcome

from ..progress_bar import show_progress
from ..run_coordinator import CoordinatorSpec, RunCoordinator
from .protocol import ActorCalls, Coordinator, Stream
from .state_list import StateList

# A folder apart from Ray Train's state, because the executors list their saved states in different ways.
_STATE = f"{STATE_FOLDER}/local"
_LATEST = "latest.json"
_NAMES = pydantic.TypeAdapter(list[str])


class LocalExecutor:
    """Runs operators one after the other, and one training worker."""

    stalled_hint = ""

    def __init__(self, runtime: Runtime) -> None:
        from transformers.utils import logging

        self.runtime = runtime
        # Bars of loading and saving weights would break into the progress that `coordinate` shows.
        logging.disable_progress_bar()

    @contextmanager
    def coordinate(self, spec: CoordinatorSpec) -> Iterator[RunCoordinator]:
        """See `Executor.coordinate`."""
        coordinator = RunCoordinator(spec)
        with show_progress(spec, coordinator.read):
            yield coordinator

    def map(
        self,
        blocks: Sequence[pa.Table],
        operators: Sequence[Operator],
        *,
        label: str,
        coordinator: Coordinator | None = None,
    ) -> Generator[pa.Table, None, None]:
        """See `Executor.map`. Results come in the order of the blocks."""
        with _OperatorChain(operators, coordinator) as chain:
            for block in blocks:
                yield chain(block)

    @contextmanager
    def actors(
        self, create: Callable[[], Callable[[Any], Awaitable[Any]]], pool: PoolSection, *, label: str
    ) -> Iterator[ActorCalls]:
        """See `Executor.actors`. One, whose results come in the order of the arguments."""
        function: Any = create()
        events = _EventLoop()

        def call_all(arguments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
            for index, argument in enumerate(arguments):
                yield index, events.run(function(argument))

        try:
            yield call_all
        finally:
            function.close()
            events.close()

    def train(self, job: TrainingJob, stream: Stream, coordinator: Coordinator) -> TrainingOutcome:
        """See `Executor.train`."""
        from pos2distill.training.worker import run_worker

        LOCAL_STATES.repair(job.checkpoint)
        for restart in range(job.runtime.trainers.max_restarts + 1):
            # `blocks()` is called for each attempt: a restart samples only what the store lacks by then.
            samples = self.map(stream.blocks(), stream.operators, label="sampling", coordinator=coordinator)
            session = LocalSession(job, samples, coordinator)
            try:
                return run_worker(job, session)
            except CorruptPart as error:
                # It is quarantined by now: training resumes from its last checkpoint and samples the part again.
                if restart == job.runtime.trainers.max_restarts:
                    raise TransientError(f"{error}; run the same command again to continue") from None
            finally:
                session.close()
                release_gpu_memory()
        raise AssertionError("the last restart returns or raises")


class _EventLoop:
    """One event loop for all calls: asyncio's objects belong to the loop that first used them.

    In a notebook the calling thread runs a loop already, and a thread cannot run two, so ours has a thread of its own.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = None
        with contextlib.suppress(RuntimeError):  # no loop is running
            asyncio.get_running_loop()
            self.thread = ThreadPoolExecutor(1, "events")

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """The result, once it is there."""
        if self.thread is None:
            try:
                return self.loop.run_until_complete(awaitable)
            except KeyboardInterrupt:
                # It is kept in the task that it met too, and asyncio would print a traceback for this copy.
                self.loop.set_exception_handler(lambda *_: None)
                raise
        return self.thread.submit(self.loop.run_until_complete, awaitable).result()

    def close(self) -> None:
        if self.thread is not None:
            self.thread.shutdown()
        self.loop.close()


class _OperatorChain:
    """Applies operators to one block after the other."""

    def __init__(self, operators: Sequence[Operator], coordinator: Coordinator | None) -> None:
        self.operators = operators
        self.coordinator = coordinator
        self.functions: list[Callable[[pa.Table], Any]] = []
        self.events = _EventLoop()

    def __enter__(self) -> "_OperatorChain":
        return self

    def __exit__(self, *_: object) -> None:
        self._close_functions()
        self.events.close()
        release_gpu_memory()

    def _close_functions(self) -> None:
        """Close what the operators created, and drop it with the models that it holds."""
        for function in self.functions:
            # Only actors hold resources; the functions of stateless operators have no `close`.
            close = getattr(function, "close", None)
            if close is not None:
                close()
        self.functions.clear()

    def __call__(self, block: pa.Table) -> pa.Table:
        if not self.functions:
            # Created with the first block: a run with nothing to do loads no model.
            for operator in self.operators:
                if isinstance(operator, ActorOperator):
                    self.functions.append(operator.create())
                else:
                    self.functions.append(operator.function)
        for operator, function in zip(self.operators, self.functions, strict=True):
            if isinstance(operator, ActorOperator):
                block = self._apply_in_batches(operator, function, block)
            else:
                block = function(block)
        return block

    def _apply_in_batches(
        self, operator: ActorOperator, function: Callable[[pa.Table], Any], block: pa.Table
    ) -> pa.Table:
        """Apply an operator in the same batches as Ray, since the last digits of a model's results depend on them."""
        parts = []
        began = time.monotonic()
        if self.coordinator is not None:
            self.coordinator.heartbeat(operator.name, "local")
        for batch in batches_of(block, operator.pool.batch_size):
            part = function(self._needed(operator, batch))
            if operator.is_async:
                part = self.events.run(part)
            parts.append(part)
        if self.coordinator is not None:
            self.coordinator.count_seconds(operator.name, time.monotonic() - began)
        return pa.concat_tables(parts)

    def _needed(self, operator: ActorOperator, batch: pa.Table) -> pa.Table:
        """The samples of a batch that are still needed."""
        if not operator.only_needed or self.coordinator is None:
            return batch
        needed = self.coordinator.claim_needed(batch["sample_id"].to_pylist())
        assert needed is not None, "each block is one batch, and stored before the next one"
        return batch.filter(needed)


class LocalSession:
    """The rank, the device, the sample stream, and the checkpoint I/O of the only training worker."""

    def __init__(self, job: TrainingJob, samples: Iterator[pa.Table], coordinator: Coordinator) -> None:
        import torch

        from pos2distill.training.distributed import DistContext

        self.dist = DistContext()
        self.local_rank, self.reader_rank, self.readers = 0, 0, 1
        self.device = torch.device("cuda" if job.runtime.trainers.gpus else "cpu")
        self.checkpoint = job.checkpoint
        self.keep = job.runtime.checkpoints.keep
        self.corrupt_states: set[str] = set()
        self.samples: Any = samples
        # The loader's thread polls while this thread may close after an error.
        self.samples_lock = threading.Lock()
        self.coordinator = coordinator

    def open_stream(self) -> "LocalSession":
        """See `WorkerSession.open_stream`."""
        return self

    def poll(self) -> pa.Table | None:
        """The next block of samples, made now; an empty table on a request to stop; None once all are made."""
        if self.coordinator.stop_requested():
            # So that the training loop handles the request before another block is made.
            return SAMPLE_SCHEMA.empty_table()
        with self.samples_lock:
            return next(self.samples, None)

    def close(self) -> None:
        """End the operators that make samples. Waits for a block that is being made."""
        with self.samples_lock:
            self.samples.close()

    def saved_states(self) -> Iterator[str]:
        """See `WorkerSession.saved_states`. Yields names of folders."""
        listed = retry_while_unreachable(lambda: LOCAL_STATES.read(self.checkpoint), self.warn)
        for state in reversed(listed):
            yield state
            # The next one is asked for only if this one is corrupt.
            self.corrupt_states.add(state)

    def state_url(self, state: str) -> str:
        """See `WorkerSession.state_url`."""
        return f"{self.checkpoint.url}/{_STATE}/{state}"

    @contextmanager
    def opened_state(self, state: str, scratch: Path) -> Iterator[Path]:
        """See `WorkerSession.opened_state`."""
        path = f"{self.checkpoint.path}/{_STATE}/{state}"
        if self.checkpoint.is_local:
            yield Path(path)
            return
        copy = scratch / "resume"
        copy.mkdir()
        # In an empty folder, whoever reads the state finds its files missing.
        try:
            with contextlib.suppress(FileNotFoundError):
                retry_while_unreachable(lambda: download(self.checkpoint.fs, path, copy), self.warn)
            yield copy
        finally:
            shutil.rmtree(copy)

    def save_state(self, step: int, folder: Path) -> None:
        """See `WorkerSession.save_state`. The list of saved folders is replaced only once this one is whole."""
        # The random suffix avoids the folder of a killed run, which may hold half an upload of the same step.
        name = f"{step:08d}-{uuid.uuid4().hex[:8]}"

        def upload() -> None:
            self.checkpoint.upload(folder, f"{_STATE}/{name}")
            if self.checkpoint.is_local:
                sync_folder(Path(self.checkpoint.path) / _STATE / name)

        retry_while_unreachable(upload, self.warn)
        shutil.rmtree(folder)
        earlier = list(retry_while_unreachable(lambda: LOCAL_STATES.read(self.checkpoint), self.warn))
        # A corrupt one must not take the place of one that is intact.
        kept = [*(state for state in earlier if state not in self.corrupt_states), name][-self.keep :]
        retry_while_unreachable(lambda: self.checkpoint.write_json(f"{_STATE}/{_LATEST}", kept), self.warn)
        # Last, so that a run that is killed here leaves unused folders and never a list with missing ones.
        for old in earlier:
            if old not in kept:
                retry_while_unreachable(functools.partial(self.checkpoint.remove, f"{_STATE}/{old}"), self.warn)

    def wait_until_listed(self) -> None:
        """Return at once: `save_state` writes the list."""

    def stop_requested(self) -> bool:
        """See `WorkerSession.stop_requested`."""
        return self.coordinator.stop_requested()

    def is_preempted(self) -> bool:
        """Return False: nobody gives notice to a local run."""
        return False

    def warn(self, line: str) -> None:
        """See `WorkerSession.warn`."""
        warn(line)

    def report_step(self, trained: int, steps: int, loss: float) -> None:
        """See `WorkerSession.report_step`."""
        self.coordinator.report_step(trained, steps, loss)


def _parse(content: bytes) -> dict[str, int]:
    return {name: int(name.partition("-")[0]) for name in _NAMES.validate_json(content)}


def _without(content: bytes, missing: Collection[str]) -> bytes:
    return _NAMES.dump_json([name for name in _NAMES.validate_json(content) if name not in missing])


LOCAL_STATES = StateList(_STATE, _LATEST, "*", _parse, _without)
