"""The progress of a stage that samples or trains: counted by a tracker, shown on the terminal."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm

from pos2distill.sampling.failure_guard import FailureGuard

REFRESH_SECONDS = 0.5
# Without a terminal. Much longer than a refresh, because every line stays in the log.
LINE_SECONDS = 10.0
# Actors report only when they begin a batch, so this must be longer than a batch usually takes.
_ACTIVE_SECONDS = 180.0
_STARTING = "starting processes and loading models"


@dataclass(frozen=True, slots=True)
class ProgressSpec:
    """What is tracked.

    run: name of the run. label: `sample` counts stored samples, `distill` examples trained on.
    total: examples to count to. stored: samples of an earlier run, by outcome. guard: is given every stored sample.
    """

    run: str
    label: str
    total: int
    stored: Mapping[str, int]
    guard: FailureGuard


@dataclass
class RunProgress:
    """The latest figures of a stage.

    stored: samples by outcome. sampling_seconds: until the last of them was stored. actor_seconds: the time that the
    actors of a pool worked, added up; only of pools whose calls do not overlap. trained: examples processed by
    training, over all epochs. actors: that began a batch in the last minutes, by pool.
    """

    stored: Counter[str] = field(default_factory=Counter)
    sampling_seconds: float = 0.0
    actor_seconds: dict[str, float] = field(default_factory=dict)
    trained: int = 0
    steps: int = 0
    loss: float | None = None
    actors: dict[str, int] = field(default_factory=dict)

    def count(self, label: str) -> int:
        """The examples that a stage has processed."""
        return self.trained if label == "distill" else self.stored.total()

    def __str__(self) -> str:
        parts = [f"sampled {self.stored.total()}, kept {self.stored['kept']}"]
        if self.stored["failed"]:
            parts.append(f"failed {self.stored['failed']}")
        for pool, count in sorted(self.actors.items()):
            parts.append(f"{pool} {count}")
        if self.loss is not None:
            parts.append(f"step {self.steps}, loss {self.loss:.4f}")
        return ", ".join(parts)


class ProgressTracker:
    """Counts what operators and workers report, and carries the request to stop to the workers."""

    def __init__(self, spec: ProgressSpec) -> None:
        self.spec = spec
        self.progress = RunProgress(stored=Counter(spec.stored))
        self.stop = False
        self.fatal: str | None = None
        self.last_seen: dict[str, dict[str, float]] = {}
        self.start = time.monotonic()

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], example_ids: Sequence[str]) -> None:
        """Count the samples of one part of the store.

        Raises:
            UserError: once too many samples have failed.
        """
        self.progress.stored.update(outcomes)
        # Set with every part, so that training after the last sample does not count as sampling.
        self.progress.sampling_seconds = time.monotonic() - self.start
        self.spec.guard.add(outcomes, errors, example_ids)

    def count_step(self, trained: int, steps: int, loss: float) -> None:
        """Count a training step."""
        # Totals, not increments: workers that restart from a checkpoint report lower numbers than before.
        self.progress.trained, self.progress.steps, self.progress.loss = trained, steps, loss

    def count_seconds(self, pool: str, seconds: float) -> None:
        """An actor of a pool has worked on a batch."""
        self.progress.actor_seconds[pool] = self.progress.actor_seconds.get(pool, 0.0) + seconds

    def heartbeat(self, pool: str, actor: str) -> None:
        """An actor of a pool has begun a batch."""
        self.last_seen.setdefault(pool, {})[actor] = time.monotonic()

    def read(self) -> RunProgress:
        """The latest figures."""
        now = time.monotonic()
        for pool, actors in self.last_seen.items():
            self.progress.actors[pool] = sum(now - seen < _ACTIVE_SECONDS for seen in actors.values())
        return self.progress

    def request_stop(self) -> None:
        """Request that training saves its state and stops, also if its workers are being restarted."""
        self.stop = True

    def stop_requested(self) -> bool:
        """Whether training is asked to stop."""
        return self.stop

    def report_fatal(self, line: str) -> None:
        """Report an error of a worker that a restart would not fix."""
        # The first error is the cause; later ones may only follow from it.
        if self.fatal is None:
            self.fatal = line

    def fatal_error(self) -> str | None:
        """The first such error."""
        return self.fatal


@contextmanager
def show_progress(spec: ProgressSpec, read: Callable[[], RunProgress | None]) -> Iterator[None]:
    """Show a progress bar, or lines where there is no terminal, while the body runs.

    Args:
        read: the latest figures; None while they cannot be had.
    """
    finished = threading.Event()
    thread = threading.Thread(target=_show, args=(spec, read, finished), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _show(spec: ProgressSpec, read: Callable[[], RunProgress | None], finished: threading.Event) -> None:
    is_terminal = sys.stderr.isatty()
    # The rate counts only what this run did: samples of an earlier run, and steps before the last checkpoint, do not.
    done = sum(spec.stored.values()) if spec.label == "sample" else 0
    knows_start = spec.label == "sample"
    start = last_line = time.monotonic()
    is_last = False
    with tqdm(desc=spec.label, total=spec.total, initial=done, unit="example", disable=not is_terminal) as bar:
        while not is_last:
            # One refresh after the body has ended, so that the last figures are shown.
            is_last = finished.wait(REFRESH_SECONDS)
            progress = read()
            if progress is None:
                continue
            count = progress.count(spec.label)
            if count and not knows_start:
                knows_start, done, start = True, count, time.monotonic()
            if is_terminal:
                postfix = str(progress) if _has_begun(spec, progress) else _STARTING
                bar.set_postfix_str(postfix, refresh=False)
                bar.update(count - bar.n)
            elif time.monotonic() - last_line > LINE_SECONDS:
                last_line = time.monotonic()
                print(_line(spec, count, done, last_line - start, progress), file=sys.stderr)


def _has_begun(spec: ProgressSpec, progress: RunProgress) -> bool:
    """Whether any actor or training worker has reported. Until then processes start and models load."""
    stored_before = sum(spec.stored.values())
    return bool(progress.actors) or progress.loss is not None or progress.stored.total() > stored_before


def _line(spec: ProgressSpec, count: int, done: int, seconds: float, progress: RunProgress) -> str:
    if not _has_begun(spec, progress):
        return f"{spec.label}: {_STARTING}; {progress}"
    # At least one refresh period, so that a division by almost 0 s shows no absurd rate.
    rate = (count - done) / max(seconds, REFRESH_SECONDS)
    time_left = "time left unknown"
    if rate > 0:
        time_left = f"{(spec.total - count) / rate:.0f} s left"
    return f"{spec.label}: {count} of {spec.total} examples, {rate:.2f} a second, {time_left}; {progress}"
