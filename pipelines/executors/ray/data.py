"""Operators as a Ray Data pipeline."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import Dataset, TaskPoolStrategy

from pos2distill.node_pools import TASK_CPUS
from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.sampling.blocks import batches_of
from pos2distill.sampling.engines.protocol import EngineDied
from pos2distill.sampling.operators import ActorOperator, Operator, TableFunction, TaskOperator
from pos2distill.store.retry import retry_while_unreachable

from ..protocol import Coordinator, Stream
from .connection import pool_arguments, set_data_context
from .messages import DriverMailbox

_ASK_AGAIN_SECONDS = 0.5


def build_dataset(
    blocks: Sequence[pa.Table],
    operators: Sequence[Operator],
    mailbox: DriverMailbox,
    coordinator: Coordinator | None = None,
) -> Dataset:
    """A lazy dataset that applies the operators to every block.

    Args:
        mailbox: receives what the user must know of an actor.
        coordinator: is sent a heartbeat whenever an actor begins a batch.
    """
    dataset = ray.data.from_arrow(list(blocks))
    for operator in operators:
        if isinstance(operator, TaskOperator):
            compute = None if operator.max_tasks is None else TaskPoolStrategy(size=operator.max_tasks)
            # A task takes a whole block, since each block of samples becomes one part of the sample store.
            dataset = dataset.map_batches(
                _task_function(operator, mailbox),
                batch_size=None,
                batch_format="pyarrow",
                compute=compute,
                num_cpus=TASK_CPUS,
            )
        else:
            arguments = pool_arguments(operator.pool)
            if operator.only_needed or not operator.is_async:
                # A call takes a whole block. With a batch size, Ray Data 2.60 collects blocks until there are as many
                # rows, and returns the batches of a task when all are done: a batch that waits for the answers of
                # another one could then keep them from being stored.
                arguments["batch_size"] = None
            # Ray Data 2.60 has this method for `batch_size=None` on GPUs, which `map_batches` rejects.
            dataset = dataset.map_batches_internal(
                _actor_class(operator), fn_constructor_args=(operator, mailbox, coordinator), **arguments
            )
    return dataset


def open_stream(stream: Stream, mailbox: DriverMailbox, coordinator: Coordinator) -> Dataset:
    """What the trainers read. Called in an actor of Ray Train, for which this module imports no torch."""
    set_data_context()
    # Workers that an outage ended are started again in the midst of it, and Ray Train 2.60 gives up a run for an error
    # that its controller meets then.
    blocks = retry_while_unreachable(stream.blocks, mailbox.warn)
    # Everything is stored. The trainers read stored samples from the store, not from this stream.
    if not blocks:
        return ray.data.from_arrow(SAMPLE_SCHEMA.empty_table())
    return build_dataset(blocks, stream.operators, mailbox, coordinator)


def _task_function(operator: TaskOperator, mailbox: DriverMailbox) -> TableFunction:
    """A stateless step, again while its storage or hub does not answer: an error would end the dataset's actors."""

    def run(block: pa.Table) -> pa.Table:
        return retry_while_unreachable(lambda: operator.function(block), mailbox.warn)

    # Ray Data 2.60 shows it in its progress and its dashboard.
    run.__name__ = operator.name
    return run


def _actor_class(operator: ActorOperator) -> type["_Actor"]:
    """The class of a pool's actors, with the pool's name."""
    base = _AsyncActor if operator.is_async else _Actor
    # A class for each pool: Ray Data 2.60 takes the name that its progress, its dashboard and process titles show from
    # the class, and `map_batches` has no parameter for it.
    return type(operator.name, (base,), {})


class _Actor:
    """What a pool's actors run."""

    def __init__(self, operator: ActorOperator, mailbox: DriverMailbox, coordinator: Coordinator | None) -> None:
        self.name = operator.name
        self.mailbox = mailbox
        self.coordinator = coordinator
        self.batch_size = operator.pool.batch_size
        # Ray Data 2.60 gives up a run if four actors of a pool in a row cannot load, which all may at the same time.
        self.function: Callable[[pa.Table], Any] = retry_while_unreachable(operator.create, mailbox.warn)

    def __call__(self, block: pa.Table) -> pa.Table:
        self.send_heartbeat()
        start = time.monotonic()
        result = pa.concat_tables([self.function(batch) for batch in batches_of(block, self.batch_size)])
        if self.coordinator is not None:
            self.coordinator.count_seconds(self.name, time.monotonic() - start)
        return result

    def send_heartbeat(self) -> None:
        if self.coordinator is not None:
            self.coordinator.heartbeat(self.name, ray.get_runtime_context().get_actor_id())


class _AsyncActor(_Actor):
    """The same for coroutine functions. Ray Data 2.60 overlaps the calls of an async `__call__`."""

    def __init__(self, operator: ActorOperator, mailbox: DriverMailbox, coordinator: Coordinator | None) -> None:
        super().__init__(operator, mailbox, coordinator)
        self.only_needed = operator.only_needed

    async def __call__(self, batch: pa.Table) -> pa.Table:  # type: ignore[override]
        self.send_heartbeat()
        needed = await self.needed(batch)
        with restart_if_engine_died(self.mailbox):
            coroutine: Awaitable[pa.Table] = self.function(needed)
            return await coroutine

    async def needed(self, batch: pa.Table) -> pa.Table:
        """The samples of a batch that are still needed, once that is known."""
        if not self.only_needed or self.coordinator is None:
            return batch
        ids = batch["sample_id"].to_pylist()
        while True:
            # In a thread, since waiting for the coordinator must not stop the calls that overlap.
            needed = await asyncio.to_thread(self.coordinator.claim_needed, ids)
            if needed is not None:
                return batch.filter(needed)
            await asyncio.sleep(_ASK_AGAIN_SECONDS)


@contextmanager
def restart_if_engine_died(mailbox: DriverMailbox) -> Iterator[None]:
    """End this actor's process if the body's engine has died.

    After an exception an actor would stay in its pool and fail every call it is given (ray#59522). After a crash it is
    restarted with a new engine and the call tried again, both as often as the pool allows.
    """
    try:
        yield
    except EngineDied as error:
        # For the log of the worker, where a death that is survived is seen too.
        print(f"the engine died: {error}", file=sys.stderr, flush=True)
        mailbox.report_death(str(error))
        os._exit(1)
