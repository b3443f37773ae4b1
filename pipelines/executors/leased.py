"""An executor whose results a driver gets only while it holds its lease."""

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import pyarrow as pa

from pos2distill.config import PoolSection
from pos2distill.sampling.operators import Operator
from pos2distill.store.lease import Lease
from pos2distill.training.job import TrainingJob, TrainingOutcome

from ..run_coordinator import CoordinatorSpec
from .protocol import ActorCalls, Coordinator, Executor, Stream

_T = TypeVar("_T")


class LeasedExecutor:
    """Ends what another executor runs once the lease is lost: another driver may write to the storage by then."""

    def __init__(self, executor: Executor, lease: Lease) -> None:
        self.executor = executor
        self.lease = lease
        self.stalled_hint = executor.stalled_hint

    @contextmanager
    def coordinate(self, spec: CoordinatorSpec) -> Iterator[Coordinator]:
        """See `Executor.coordinate`. The loss ends training through its coordinator."""
        with self.executor.coordinate(spec) as coordinator, self.lease.notify_on_loss(coordinator.report_fatal):
            yield coordinator

    def map(
        self,
        blocks: Sequence[pa.Table],
        operators: Sequence[Operator],
        *,
        label: str,
        coordinator: Coordinator | None = None,
    ) -> Generator[pa.Table, None, None]:
        """See `Executor.map`."""
        # Called at once, as the executor connects when it is called.
        return self._closed_with(self.executor.map(blocks, operators, label=label, coordinator=coordinator))

    @contextmanager
    def actors(
        self, create: Callable[[], Callable[[Any], Awaitable[Any]]], pool: PoolSection, *, label: str
    ) -> Iterator[ActorCalls]:
        """See `Executor.actors`."""
        with self.executor.actors(create, pool, label=label) as call_all:
            yield lambda arguments: self._while_held(call_all(arguments))
            self.lease.check()

    def train(self, job: TrainingJob, stream: Stream, coordinator: Coordinator) -> TrainingOutcome:
        """See `Executor.train`. After a second Ctrl-C it may outlive the command, and keeps the lease."""
        with self.lease.hold_during():
            self.lease.check()
            outcome = self.executor.train(job, stream, coordinator)
        self.lease.check()
        return outcome

    def _closed_with(self, results: Generator[pa.Table, None, None]) -> Generator[pa.Table, None, None]:
        with closing(results):
            yield from self._while_held(results)

    def _while_held(self, results: Iterator[_T]) -> Iterator[_T]:
        """The results of another executor.

        Raises:
            TransientError: instead of the next result or the end, once the lease is lost.
        """
        for result in results:
            self.lease.check()
            yield result
        self.lease.check()
