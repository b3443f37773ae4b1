"""What a run is doing: workers tell an actor; a thread of the driver shows it, and asks through it to stop."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.util.metrics import Gauge
from tqdm import tqdm

from pipelines.executors.ray.session import driver_node
from pos2distill.sampling.failure_guard import FailureGuard

_LOOK_SECONDS = 0.5
_LINE_SECONDS = 10.0
_ACTIVE_SECONDS = 180.0


@dataclass
class RunProgress:
    """A run's latest run_progress.

    stored: samples by outcome. sampling_seconds: until the last of them came. trained: examples dealt with, over all
    epochs. actors: at work, by pool.
    """

    stored: Counter[str] = field(default_factory=Counter)
    sampling_seconds: float = 0.0
    trained: int = 0
    steps: int = 0
    loss: float | None = None
    actors: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = [f"sampled {self.stored.total()}, kept {self.stored['kept']}"]
        if self.stored["failed"]:
            shown.append(f"failed {self.stored['failed']}")
        shown += [f"{pool} {count}" for pool, count in sorted(self.actors.items())]
        if self.loss is not None:
            shown.append(f"step {self.steps}, loss {self.loss:.4f}")
        return ", ".join(shown)


class ProgressTracker:
    """RunProgress and wishes, posted without waiting. The same run_progress are Ray metrics, of the run's name."""

    def __init__(self, run: str, guard: FailureGuard, stored: Mapping[str, int]) -> None:
        self.run_progress = RunProgress(stored=Counter(stored))
        self.stop = False
        self.refusal: str | None = None
        self.seen: dict[str, dict[str, float]] = {}
        self.gauges = {
            name: Gauge(f"pos2distill_{name}", description=text, tag_keys=("run", "outcome", "pool"))
            for name, text in {
                "samples_stored": "samples in the store, by outcome",
                "examples_trained": "examples dealt with by training, over all epochs",
                "steps": "optimizer steps",
                "loss": "of the last step",
                "actors": "actors of a pool that began a batch in the last minutes",
            }.items()
        }
        self.run = run
        self.guard = guard
        self.start = time.monotonic()

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], example_ids: Sequence[str]) -> None:
        """A part of the store has been written.

        Raises:
            UserError: once too many samples have failed.
        """
        self.run_progress.stored.update(outcomes)
        self.run_progress.sampling_seconds = time.monotonic() - self.start
        for outcome, count in self.run_progress.stored.items():
            self._gauge("samples_stored", count, outcome=outcome)
        self.guard.add(outcomes, errors, example_ids)

    def count_step(self, trained: int, steps: int, loss: float) -> None:
        """A step has been made."""
        self.run_progress.trained, self.run_progress.steps, self.run_progress.loss = trained, steps, loss
        self._gauge("examples_trained", trained)
        self._gauge("steps", steps)
        self._gauge("loss", loss)

    def heartbeat(self, pool: str, actor: str) -> None:
        """An actor of a pool has begun a batch."""
        self.seen.setdefault(pool, {})[actor] = time.monotonic()

    def read(self) -> RunProgress:
        """The latest run_progress."""
        now = time.monotonic()
        for pool, actors in self.seen.items():
            self.run_progress.actors[pool] = sum(now - last < _ACTIVE_SECONDS for last in actors.values())
            self._gauge("actors", self.run_progress.actors[pool], pool=pool)
        return self.run_progress

    def ask_to_stop(self) -> None:
        """Training is to stop after a step or two, whoever starts again meanwhile."""
        self.stop = True

    def stop_asked(self) -> bool:
        """Whether training is to stop."""
        return self.stop

    def refuse(self, line: str) -> None:
        """A worker met an error that starting again would not mend."""
        self.refusal = self.refusal or line

    def fatal_error(self) -> str | None:
        """The first such error."""
        return self.refusal

    def _gauge(self, name: str, value: float, **tags: str) -> None:
        self.gauges[name].set(value, tags={"run": self.run, "outcome": "", "pool": "", **tags})


@contextmanager
def track_progress(
    run: str, stage: str, guard: FailureGuard, *, total: int, done: int, stored: Mapping[str, int]
) -> Iterator[ActorHandle]:
    """A tracker_actor to tell, shown as a progress bar, or as plain lines where there is no terminal, while the body runs.

    Args:
        run: name of the metrics. stage: `sample` counts stored examples, `distill` those trained on.
        guard: is shown every sample that is stored.
        total: examples in all. done: by an earlier run. stored: samples that are there, by outcome.
    """
    tracker_actor = ray.remote(num_cpus=0, scheduling_strategy=driver_node())(ProgressTracker).remote(
        run, guard, stored
    )
    finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(tracker_actor, stage, total, done, finished), daemon=True)
    watcher.start()
    try:
        yield tracker_actor
    finally:
        finished.set()
        watcher.join()


def _watch(tracker_actor: ActorHandle, stage: str, total: int, done: int, finished: threading.Event) -> None:
    terminal = sys.stderr.isatty()
    start = last_line = time.monotonic()
    resumed, last_look = stage == "sample", False
    with tqdm(desc=stage, total=total, initial=done, unit="example", disable=not terminal) as bar:
        while not last_look:
            last_look = finished.wait(_LOOK_SECONDS)
            try:
                run_progress: RunProgress = ray.get(tracker_actor.read.remote(), timeout=_LINE_SECONDS)
            except ray.exceptions.RayError:
                continue  # the run's own error is the one to tell
            count = run_progress.trained if stage == "distill" else run_progress.stored.total()
            if count and not resumed:  # where training goes on from is no work of this run
                resumed, done, start = True, count, time.monotonic()
            if terminal:
                bar.set_postfix_str(str(run_progress), refresh=False)
                bar.update(count - bar.n)
            elif time.monotonic() - last_line > _LINE_SECONDS:
                last_line = time.monotonic()
                print(_line(stage, count, total, done, last_line - start, run_progress), file=sys.stderr)


def _line(stage: str, count: int, total: int, done: int, seconds: float, run_progress: RunProgress) -> str:
    rate = (count - done) / max(seconds, _LOOK_SECONDS)
    left = f"{(total - count) / rate:.0f} s left" if rate > 0 else "time left unknown"
    return f"{stage}: {count} of {total} examples, {rate:.2f} a second, {left}; {run_progress}"
