"""What a stage that samples or trains has done, which samples it still needs, and whether it is to stop.

All processes of the stage report through one object, and the terminal shows its figures (`progress_bar`).
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from pos2distill.errors import UserError
from pos2distill.sampling.failure_guard import FailureGuard
from pos2distill.store.selection import Selection

# Actors report only when they begin a batch, so this must be longer than a batch usually takes.
_ACTIVE_SECONDS = 180.0
# Without an answer for so long, a batch begins that may not be needed: what it waits for may be queued behind it, as
# the batch of a sampler that died is.
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class CoordinatorSpec:
    """What a stage that samples or trains begins with, for its coordinator.

    Attributes:
        run: name of the run.
        label: the stage, as it is shown.
        counts: which samples its progress counts: those that are kept, or those that are trained on.
        total: samples to count to.
        stored: samples of an earlier run, by outcome.
        guard: is given every stored sample.
        ids: those of all samples that may be made.
        selection: what an earlier run knows of them.
        trained: samples that an earlier run trained on, up to its last training state.
    """

    run: str
    label: str
    counts: Literal["kept", "trained"]
    total: int
    stored: Mapping[str, int]
    guard: FailureGuard
    ids: pa.Array
    selection: Selection
    trained: int = 0


@dataclass
class RunProgress:
    """The latest figures of a stage.

    Attributes:
        stored: samples by outcome.
        sampling_seconds: until the last of them was stored.
        actor_seconds: the time that the actors of a pool worked, added up; only of pools whose calls do not overlap.
        trained: samples trained on, over all epochs.
        actors: how many began a batch in the last minutes, by pool.
        idle_seconds: the time since the last sample was stored or the last step ended.
    """

    stored: Counter[str] = field(default_factory=Counter)
    sampling_seconds: float = 0.0
    actor_seconds: dict[str, float] = field(default_factory=dict)
    trained: int = 0
    steps: int = 0
    loss: float | None = None
    actors: dict[str, int] = field(default_factory=dict)
    idle_seconds: float = 0.0

    def count(self, counts: Literal["kept", "trained"]) -> int:
        """The samples that a stage counts."""
        return self.trained if counts == "trained" else self.stored["kept"]

    def __str__(self) -> str:
        parts = [f"sampled {self.stored.total()}, kept {self.stored['kept']}"]
        if self.stored["failed"]:
            parts.append(f"failed {self.stored['failed']}")
        for pool, count in sorted(self.actors.items()):
            parts.append(f"{pool} {count}")
        if self.loss is not None:
            parts.append(f"step {self.steps}, loss {self.loss:.4f}")
        return ", ".join(parts)


class RunCoordinator:
    """Counts what operators and workers report, and carries the request to stop to the workers."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        self.spec = spec
        self.progress = RunProgress(stored=Counter(spec.stored), trained=spec.trained)
        self.stop = False
        self.fatal: UserError | None = None
        self.last_seen: dict[str, dict[str, float]] = {}
        self.selection = spec.selection.copy()
        self.index_of = {sample_id: index for index, sample_id in enumerate(spec.ids.to_pylist())}
        self.start = time.monotonic()
        self.last_news = self.last_result = self.start

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], sample_ids: Sequence[str]) -> None:
        """Count the samples of one part of the store, each sample once.

        Raises:
            UserError: once too many samples have failed.
        """
        self.last_news = self.last_result = time.monotonic()
        indices = [self.index_of[sample_id] for sample_id in sample_ids]
        # Ray Data makes a part again whose node was lost before its samples were trained on.
        new = [row for row, index in enumerate(indices) if not self.selection.sampled_N[index]]
        new_outcomes = [outcomes[row] for row in new]
        self.progress.stored.update(new_outcomes)
        # All of them: the new part takes the place of the earlier one, and an answer may be another one.
        self.selection.add(indices, [outcome == "kept" for outcome in outcomes])
        # Set with every part, so that training after the last sample does not count as sampling.
        self.progress.sampling_seconds = self.last_news - self.start
        self.spec.guard.add(new_outcomes, [errors[row] for row in new], [sample_ids[row] for row in new])
        if not len(self.selection.missing):
            self.spec.guard.finish()

    def claim_needed(self, sample_ids: Sequence[str]) -> list[bool] | None:
        """Whether each of these samples is still needed; None while the answers under way are likely to be enough.

        So little more is sampled than is needed, however many samplers there are and however long it takes until an
        answer is stored. In a run's last batches some samplers wait for the others instead. Samples that are
        returned as needed are under way, so the patience with which others wait begins anew.

        Stored samples are returned as needed: their block is made again after the loss of a node. Its part of the store
        is named after its samples, and takes the place of the earlier one only if it has the same.
        """
        indices = [self.index_of[sample_id] for sample_id in sample_ids]
        end = self.selection.end
        first = min(indices, default=0)
        if self.selection.likely_end <= first < end and time.monotonic() - self.last_news < _PATIENCE_SECONDS:
            return None
        self.last_news = time.monotonic()
        return [bool(index < end or self.selection.sampled_N[index]) for index in indices]

    def report_step(self, trained: int, steps: int, loss: float) -> None:
        """Set the totals of training so far."""
        # Totals, not increments: workers that restart from a checkpoint report lower numbers than before.
        self.progress.trained, self.progress.steps, self.progress.loss = trained, steps, loss
        self.last_result = time.monotonic()

    def count_seconds(self, pool: str, seconds: float) -> None:
        """Count the time that an actor of a pool worked on a batch."""
        self.progress.actor_seconds[pool] = self.progress.actor_seconds.get(pool, 0.0) + seconds

    def heartbeat(self, pool: str, actor: str) -> None:
        """Count an actor of a pool that has begun a batch."""
        self.last_seen.setdefault(pool, {})[actor] = time.monotonic()

    def read(self) -> RunProgress:
        """The latest figures."""
        now = time.monotonic()
        for pool, actors in self.last_seen.items():
            self.progress.actors[pool] = sum(now - seen < _ACTIVE_SECONDS for seen in actors.values())
        self.progress.idle_seconds = now - self.last_result
        return self.progress

    def request_stop(self) -> None:
        """Request that training saves its state and stops, also if its workers are being restarted."""
        self.stop = True

    def stop_requested(self) -> bool:
        """Whether training is asked to save its state and stop.

        Raises:
            UserError: after a fatal error: nothing must be saved any more.
        """
        if self.fatal is not None:
            raise self.fatal
        return self.stop

    def report_fatal(self, error: UserError) -> None:
        """Report an error that a restart of the workers would not fix."""
        # The first error is the cause; later ones may only follow from it.
        if self.fatal is None:
            self.fatal = error

    def fatal_error(self) -> UserError | None:
        """The first such error."""
        return self.fatal
