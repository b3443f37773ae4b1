"""The `ray` executor: operators on Ray Data, training on Ray Train."""

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from pos2distill.config import PoolSection, Runtime, TrainersSection
from pos2distill.node_pools import TASK_CPUS
from pos2distill.sampling.operators import ActorOperator, Operator, TaskOperator
from pos2distill.training.job import TrainingJob, TrainingOutcome

from ...run_coordinator import CoordinatorSpec
from ..protocol import ActorCalls, Coordinator, Stream
from .actors import start_actors
from .connection import connect, connected_to_ray, require_resources, warn_of_unused_cluster_gpus
from .coordinator import RayCoordinator, coordinate
from .data import build_dataset
from .messages import DriverMailbox
from .train import fit


class RayExecutor:
    """Connects to the cluster of `RAY_ADDRESS`, or starts Ray on this machine, when it is first used."""

    stalled_hint = "`ray status` shows which machines are waited for"

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._mailbox: DriverMailbox | None = None

    @contextmanager
    def _connected(self) -> Iterator[DriverMailbox]:
        """Connected to Ray, with the messages of actors shown."""
        with connected_to_ray():
            if self._mailbox is None:
                self._mailbox = DriverMailbox.start()
            with self._mailbox.shown():
                yield self._mailbox

    @contextmanager
    def coordinate(self, spec: CoordinatorSpec) -> Iterator[RayCoordinator]:
        """See `Executor.coordinate`."""
        with connected_to_ray():
            warn_of_unused_cluster_gpus(self.runtime)
            with coordinate(spec, self.stalled_hint) as coordinator:
                yield coordinator

    def map(
        self,
        blocks: Sequence[pa.Table],
        operators: Sequence[Operator],
        *,
        label: str,
        coordinator: Coordinator | None = None,
    ) -> Generator[pa.Table, None, None]:
        """See `Executor.map`. Connects to Ray at once, so that progress is shown only once there is some."""
        connect()
        warn_of_unused_cluster_gpus(self.runtime)
        return self._map(blocks, operators, label, coordinator)

    def _map(
        self, blocks: Sequence[pa.Table], operators: Sequence[Operator], label: str, coordinator: Coordinator | None
    ) -> Generator[pa.Table, None, None]:
        with self._connected() as mailbox:
            cpus, gpus = _smallest_pools(operators)
            require_resources(label, cpus=cpus, gpus=gpus)
            dataset = build_dataset(blocks, operators, mailbox, coordinator)
            yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")

    @contextmanager
    def actors(
        self, create: Callable[[], Callable[[Any], Awaitable[Any]]], pool: PoolSection, *, label: str
    ) -> Iterator[ActorCalls]:
        """See `Executor.actors`."""
        with self._connected() as mailbox:
            warn_of_unused_cluster_gpus(self.runtime)
            require_resources(label, cpus=pool.min * pool.cpus, gpus=pool.min * pool.gpus)
            with start_actors(create, pool, mailbox) as call_all:
                yield call_all

    def train(self, job: TrainingJob, stream: Stream, coordinator: Coordinator) -> TrainingOutcome:
        """See `Executor.train`."""
        with self._connected() as mailbox:
            _require_resources_to_train(job.runtime.trainers, stream)
            return fit(job, stream, mailbox, coordinator)


def _require_resources_to_train(trainers: TrainersSection, stream: Stream) -> None:
    cpus, gpus = trainers.workers * trainers.cpus, trainers.workers * trainers.gpus
    if not stream.blocks():
        # Nothing is left to sample, so no sampler is started.
        require_resources("training", cpus=cpus, gpus=gpus)
        return
    sampling_cpus, sampling_gpus = _smallest_pools(stream.operators)
    require_resources(
        "training while sampling (runtime.mode=streamed; staged does one after the other)",
        cpus=cpus + sampling_cpus,
        gpus=gpus + sampling_gpus,
    )


def _smallest_pools(operators: Sequence[Operator]) -> tuple[float, float]:
    """CPUs and GPUs of the smallest pools of actors, and of one task beside them."""
    cpus = gpus = 0.0
    # All pools need their minimum at the same time, since the operators of a dataset run concurrently.
    for operator in operators:
        if isinstance(operator, ActorOperator):
            cpus += operator.pool.min * operator.pool.cpus
            gpus += operator.pool.min * operator.pool.gpus
    # Tasks of stateless operators can take turns, so room for one is enough.
    if any(isinstance(operator, TaskOperator) for operator in operators):
        cpus += TASK_CPUS
    return cpus, gpus
