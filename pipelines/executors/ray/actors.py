"""Actors that stay while a stage decides what to run next, unlike those of a dataset."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from pos2distill.config import PoolSection
from pos2distill.store.retry import retry_while_unreachable

from ..protocol import ActorCalls
from .connection import actor_arguments
from .data import restart_if_engine_died
from .messages import DriverMailbox


@contextmanager
def start_actors(create: Callable[[], Any], pool: PoolSection, mailbox: DriverMailbox) -> Iterator[ActorCalls]:
    """See `Executor.actors`. An actor gets its first call once it has started, so none waits for a node that is full.

    Args:
        create: called in every actor; what it returns is called with each argument.
        mailbox: receives what the user must know of an actor.
    """
    remote = ray.remote(_Actor).options(**actor_arguments(pool))
    handles = [remote.remote(create, mailbox) for _ in range(pool.max)]
    starting = {handle.started.remote(): handle for handle in handles}
    idle: list[Any] = []

    def call_all(arguments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        waiting = deque(enumerate(arguments))
        running: dict[Any, Any] = {}
        while waiting or running:
            while waiting and idle:
                actor = idle.pop()
                running[actor.call.remote(*waiting.popleft())] = actor
            (ready, *_), _ = ray.wait([*running, *starting], num_returns=1)
            result = ray.get(ready)
            if ready in starting:
                idle.append(starting.pop(ready))
            else:
                idle.append(running.pop(ready))
                yield result

    try:
        yield call_all
    finally:
        for handle in handles:
            # What an engine started ends with its actor (see `sampling.reaper`).
            ray.kill(handle)


class _Actor:
    """Holds what `create` returned. Its methods are coroutines, so that all calls share one event loop."""

    def __init__(self, create: Callable[[], Any], mailbox: DriverMailbox) -> None:
        self.mailbox = mailbox
        self.function = retry_while_unreachable(create, mailbox.warn)

    async def started(self) -> None:
        """Returns once the constructor has."""

    async def call(self, index: int, argument: Any) -> tuple[int, Any]:
        with restart_if_engine_died(self.mailbox):
            return index, await self.function(argument)
