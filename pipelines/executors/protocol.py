"""What an executor is: it runs operators over blocks of examples, and the training loop on workers."""

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from pos2distill.config import PoolSection
from pos2distill.errors import UserError
from pos2distill.sampling.operators import Operator
from pos2distill.training.job import TrainingJob, TrainingOutcome

from ..run_coordinator import CoordinatorSpec, RunProgress


class Coordinator(Protocol):
    """The coordinator of a stage, to which operators and workers report. It can be pickled to wherever they run.

    `RunCoordinator` is in this process; the `ray` executor's is a handle of the one in an actor.
    """

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], sample_ids: Sequence[str]) -> None:
        """Count stored samples; raises UserError once too many have failed."""

    def claim_needed(self, sample_ids: Sequence[str]) -> list[bool] | None:
        """Whether each of these samples is still needed: not if enough samples before it are kept.

        None if the answers that are in progress are likely to be enough: the caller waits and asks again.
        """

    def heartbeat(self, pool: str, actor: str) -> None:
        """Count an actor of a pool that has begun a batch."""

    def count_seconds(self, pool: str, seconds: float) -> None:
        """Count the time that an actor of a pool worked on a batch."""

    def report_step(self, trained: int, steps: int, loss: float) -> None:
        """Set the totals of training so far: samples trained on over all epochs, steps, the last loss."""

    def request_stop(self) -> None:
        """Request that training saves its state and stops."""

    def stop_requested(self) -> bool:
        """Whether training is asked to save its state and stop. Hardly waits: a late answer comes with a later call.

        Raises:
            UserError: after a fatal error: nothing must be saved any more.
        """

    def report_fatal(self, error: UserError) -> None:
        """Report an error that a restart of the workers would not fix: training ends with it and saves nothing."""

    def fatal_error(self) -> UserError | None:
        """The first such error."""

    def read(self) -> RunProgress:
        """The latest figures."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Samples that are made while training runs.

    Attributes:
        blocks: what is still missing, asked for whenever workers start; picklable.
        operators: make samples of blocks.
        preserve_order: samples arrive in the order of the blocks.
    """

    blocks: Callable[[], list[pa.Table]]
    operators: Sequence[Operator]
    preserve_order: bool


class ActorCalls(Protocol):
    """Calls actors that were started before, and stay for the next time."""

    def __call__(self, arguments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Call one of them with each argument. Yields the argument's index and its result, in any order."""


class Executor(Protocol):
    """Runs the work of stages. `ray` is the product; `local` is one process without Ray. Same results.

    stalled_hint: where to look if nothing gets finished for long; may be empty.
    """

    stalled_hint: str

    def coordinate(self, spec: CoordinatorSpec) -> AbstractContextManager[Coordinator]:
        """The coordinator of a stage, whose progress is shown on the terminal while the body runs."""

    def map(
        self,
        blocks: Sequence[pa.Table],
        operators: Sequence[Operator],
        *,
        label: str,
        coordinator: Coordinator | None = None,
    ) -> Generator[pa.Table, None, None]:
        """Run the operators over every block. Results come in any order. Closing it ends the operators.

        Args:
            label: what this is, for messages.
            coordinator: receives progress, and says which samples are still needed.
        Raises:
            UserError: whatever operator raised it, wherever it ran.
        """

    def actors(
        self, create: Callable[[], Callable[[Any], Awaitable[Any]]], pool: PoolSection, *, label: str
    ) -> AbstractContextManager[ActorCalls]:
        """Actors that stay while the body runs, for stages that decide what to run next by earlier results.

        Args:
            create: called in every actor; what it returns is called with each argument.
            pool: their number and resources.
            label: what this is, for messages.
        """

    def train(self, job: TrainingJob, stream: Stream, coordinator: Coordinator) -> TrainingOutcome:
        """Run the training loop on `job.runtime.trainers` workers, from the last checkpoint if there is one.

        Raises:
            UserError: if training cannot continue; everything that is stored stays.
        """
