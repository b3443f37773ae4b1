"""Progress on a cluster: operators and workers report to one actor, which the driver reads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.metrics import Gauge

from pos2distill.errors import UserError

from ...progress_bar import LINE_SECONDS, show_progress
from ...run_coordinator import CoordinatorSpec, RunCoordinator, RunProgress
from .connection import driver_node

_READ_SECONDS = 30.0
_STOP_SECONDS = 0.1  # a call takes milliseconds, and a coordinator that does not answer must not delay the steps

_GAUGES = {
    "samples_stored": "samples in the store, by outcome",
    "samples_trained": "samples trained on, over all epochs",
    "steps": "optimizer steps",
    "loss": "of the last step",
    "actors": "actors of a pool that began a batch in the last minutes",
    "idle_seconds": "since the last sample was stored or the last step ended",
}


class RunCoordinatorActor(RunCoordinator):
    """The coordinator, which also publishes its figures as Ray metrics with the run's name."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        super().__init__(spec)
        # Shared by all gauges. Ray 2.60 raises an error if a declared tag has no value, so `_set` sets every one.
        tags = ("run", "outcome", "pool")
        self.gauges = {}
        for name, text in _GAUGES.items():
            self.gauges[name] = Gauge(f"pos2distill_{name}", description=text, tag_keys=tags)

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], sample_ids: Sequence[str]) -> None:
        """See `RunCoordinator.count_stored`."""
        try:
            super().count_stored(outcomes, errors, sample_ids)
        finally:
            # Also for the samples that exceed the limit on failures, since that limit raises here.
            for outcome, count in self.progress.stored.items():
                self._set("samples_stored", count, outcome=outcome)

    def report_step(self, trained: int, steps: int, loss: float) -> None:
        """See `RunCoordinator.report_step`."""
        super().report_step(trained, steps, loss)
        self._set("samples_trained", trained)
        self._set("steps", steps)
        self._set("loss", loss)

    def read(self) -> RunProgress:
        """See `RunCoordinator.read`."""
        progress = super().read()
        # Set when read: an actor that stops is noticed by the passing of time, not by a report.
        for pool, count in progress.actors.items():
            self._set("actors", count, pool=pool)
        self._set("idle_seconds", progress.idle_seconds)
        return progress

    def _set(self, name: str, value: float, **tags: str) -> None:
        self.gauges[name].set(value, tags={"run": self.spec.run, "outcome": "", "pool": "", **tags})


@dataclass
class RayCoordinator:
    """A handle of the coordinator's actor. Can be pickled to any process of the cluster.

    stop_result: the pending call of `stop_requested`, if any.
    """

    actor: ActorHandle
    stop_result: Any = None

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], sample_ids: Sequence[str]) -> None:
        """Count stored samples, and wait until they are counted: an error of the coordinator ends the run."""
        ray.get(self.actor.count_stored.remote(outcomes, errors, sample_ids))

    def claim_needed(self, sample_ids: Sequence[str]) -> list[bool] | None:
        """See `RunCoordinator.claim_needed`."""
        needed: list[bool] | None = ray.get(self.actor.claim_needed.remote(sample_ids))
        return needed

    def report_step(self, trained: int, steps: int, loss: float) -> None:
        """Set the totals of training so far. Does not wait."""
        self.actor.report_step.remote(trained, steps, loss)

    def count_seconds(self, pool: str, seconds: float) -> None:
        """Count the time that an actor of a pool worked on a batch. Does not wait."""
        self.actor.count_seconds.remote(pool, seconds)

    def heartbeat(self, pool: str, actor: str) -> None:
        """Count an actor of a pool that has begun a batch. Does not wait."""
        self.actor.heartbeat.remote(pool, actor)

    def read(self) -> RunProgress:
        """The latest figures."""
        # With a timeout, since an interrupted command reads once more, and its cluster may be gone.
        progress: RunProgress = ray.get(self.actor.read.remote(), timeout=_READ_SECONDS)
        return progress

    def request_stop(self) -> None:
        """Request that training saves its state and stops."""
        ray.get(self.actor.request_stop.remote())

    def stop_requested(self) -> bool:
        """See `Coordinator.stop_requested`."""
        # Called now, since the result of a call before this micro-batch would be as old as the micro-batch.
        if self.stop_result is None:
            self.stop_result = self.actor.stop_requested.remote()
        ready, _ = ray.wait([self.stop_result], timeout=_STOP_SECONDS)
        if not ready:
            return False
        stop: bool = ray.get(self.stop_result)
        self.stop_result = None
        return stop

    def report_fatal(self, error: UserError) -> None:
        """See `Coordinator.report_fatal`."""
        ray.get(self.actor.report_fatal.remote(error))

    def fatal_error(self) -> UserError | None:
        """The first such error."""
        error: UserError | None = ray.get(self.actor.fatal_error.remote())
        return error


@contextmanager
def coordinate(spec: CoordinatorSpec, hint: str) -> Iterator[RayCoordinator]:
    """Start the coordinator's actor, and show its figures while the body runs, with a hint if nothing gets finished."""
    # On the driver's node: on a sampler's it would keep that node from ever being idle.
    actor = ray.remote(num_cpus=0, scheduling_strategy=driver_node())(RunCoordinatorActor).remote(spec)

    def read() -> RunProgress | None:
        try:
            # With a timeout, because the command waits for the last read before it ends.
            progress: RunProgress = ray.get(actor.read.remote(), timeout=LINE_SECONDS)
        except ray.exceptions.RayError:
            return None  # the run itself reports what is wrong
        return progress

    with show_progress(spec, read, hint=hint):
        yield RayCoordinator(actor)
