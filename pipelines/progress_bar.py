"""The progress of a stage on the terminal: a bar, or lines where there is none."""

import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tqdm import tqdm

from .run_coordinator import CoordinatorSpec, RunProgress

REFRESH_SECONDS = 0.5
# Without a terminal. Much longer than a refresh, because every line stays in the log.
LINE_SECONDS = 10.0
# While nothing changes, so that an hour of waiting does not fill the log. Well below a minute, after which proxies, and
# `follow`, take a connection without output for a dead one.
UNCHANGED_LINE_SECONDS = 30.0
# Without a result for so long, and for so many times the usual time of one, the rate so far says nothing of the rest.
STALLED_SECONDS = 600.0
_STALLED_TIMES = 5
_STARTING = "starting processes and loading models"
# Where results come by the batch, nothing tells when the first one begins.
_UNTIL_FIRST_BATCH = "loading models, then the first batch"
_quiet = threading.Event()  # set by --quiet


@dataclass(frozen=True, slots=True)
class Figures:
    """What is shown of a stage at one moment.

    Attributes:
        count: finished so far.
        note: shown behind the figures.
        waiting_for: what happens before the first result; empty once it is over.
        idle_seconds: since the last sign of progress that does not count, such as a wrong answer.
    """

    count: int
    note: str
    waiting_for: str = ""
    idle_seconds: float = math.inf


class RateEstimator:
    """How fast a stage progresses, and how long the rest will take.

    The clock starts with the first result of this run. Until then processes start and models load, which says nothing
    about the rest. That result is not counted, since its computation began before the clock. Results come in batches:
    while a batch is running, its elapsed time is subtracted from the time left, and only a batch that takes longer than
    the previous ones lowers the rate.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total = total
        self.count = done
        self.first_result: tuple[int, float] | None = None
        self.last_change = 0.0
        self.last_sign = -math.inf  # time of the last progress that is not counted
        self.changes = 0  # number of changes after the first result

    def update(self, count: int, now: float, idle_seconds: float = math.inf) -> None:
        """Record how much is finished at this time, in seconds. idle_seconds: as in `Figures`."""
        self.last_sign = max(self.last_sign, now - idle_seconds)
        if self.first_result is not None and count != self.count:
            self.changes += 1
            self.last_change = now
        if self.first_result is None and count > self.count:
            self.first_result = (count, now)
            self.last_change = now
        self.count = count

    def describe(self, now: float) -> str:
        """Rate and time left, in words; empty once all is finished, if it came at once."""
        count, start = self.first_result or (self.count, now)
        if count >= self.total:
            return ""
        if self.is_stalled(now):
            return f"nothing finished for {tqdm.format_interval(self._silence(now))}"
        if self.count <= count:
            return "time left unknown"
        usual = (self.last_change - start) / self.changes
        waited = now - self.last_change
        # At least one refresh period, so that a division by almost 0 s shows no absurd rate.
        seconds = max(self.last_change - start + max(0.0, waited - usual), REFRESH_SECONDS)
        rate = (self.count - count) / seconds
        left = max(0.0, (self.total - self.count) / rate - min(waited, usual))
        return f"{rate:.2f} a second, {tqdm.format_interval(left)} left"

    def is_stalled(self, now: float) -> bool:
        """Whether the next result takes much longer than those before it, as if a machine were missing."""
        if self.first_result is None or self.count >= self.total:
            return False
        usual = (self.last_change - self.first_result[1]) / max(self.changes, 1)
        return self._silence(now) > max(STALLED_SECONDS, _STALLED_TIMES * usual)

    def _silence(self, now: float) -> float:
        """Seconds since the last sign of progress."""
        return now - max(self.last_change, self.last_sign)


@contextmanager
def show_progress(spec: CoordinatorSpec, read: Callable[[], RunProgress | None], *, hint: str = "") -> Iterator[None]:
    """Show a progress bar, or lines where there is no terminal, while the body runs.

    Args:
        read: the latest figures; None while they cannot be had.
        hint: shown where nothing gets finished for long.
    """
    with _display(run_display(spec, read, hint)):
        yield


def run_display(spec: CoordinatorSpec, read: Callable[[], RunProgress | None], hint: str = "") -> "ProgressDisplay":
    """The count and the figures that are shown of a stage whose processes report their progress."""
    done = spec.stored.get("kept", 0) if spec.counts == "kept" else spec.trained

    def figures() -> Figures | None:
        progress = read()
        if progress is None:
            return None
        # The last batches may keep more than are wanted.
        count = min(progress.count(spec.counts), spec.total)
        waiting_for = "" if _has_begun(spec, progress) else _STARTING
        return Figures(count, str(progress), waiting_for, progress.idle_seconds)

    units = "samples trained on (all epochs)" if spec.counts == "trained" else "samples"
    return ProgressDisplay(spec.label, spec.total, done, units, figures, hint)


def _has_begun(spec: CoordinatorSpec, progress: RunProgress) -> bool:
    """Whether any actor or training worker has reported. Until then processes start and models load."""
    stored_before = sum(spec.stored.values())
    return bool(progress.actors) or progress.loss is not None or progress.stored.total() > stored_before


class StageProgress:
    """How much of a stage is finished, for stages whose results come back to the driver."""

    def __init__(self, done: int) -> None:
        self.done = self.count = done
        self.note = ""

    def update(self, count: int, note: str = "") -> None:
        """Count what has been finished, and replace the note behind the figures."""
        self.count += count
        self.note = note

    def figures(self) -> Figures:
        """What is shown now."""
        has_begun = self.count != self.done or self.note
        return Figures(self.count, self.note, "" if has_begun else _UNTIL_FIRST_BATCH)


@contextmanager
def show_stage(label: str, total: int, *, done: int, unit: str, hint: str) -> Iterator[StageProgress]:
    """Show a progress bar, or lines where there is no terminal, while the body counts.

    Args:
        done: the count of an earlier run.
        unit: what is counted, in the singular.
        hint: as in `show_progress`.
    """
    stage = StageProgress(done)
    with _display(ProgressDisplay(label, total, done, f"{unit}s", stage.figures, hint)):
        yield stage


@functools.cache
def show_activity(text: str) -> None:
    """Print a line on a terminal, and nothing in a log. Once in this process: a sweep checks many studies."""
    if sys.stderr.isatty() and not is_quiet():
        print(text, file=sys.stderr, flush=True)


def set_quiet() -> None:
    """Show no progress from now on in this process (`--quiet`)."""
    _quiet.set()


def is_quiet() -> bool:
    """Whether no progress is shown."""
    return _quiet.is_set()


@dataclass(frozen=True, slots=True)
class ProgressDisplay:
    """What is shown: a label, the total, what an earlier run has done of it, in which units, and the latest figures.

    hint: shown too where nothing gets finished for long.
    """

    label: str
    total: int
    done: int
    units: str
    read: Callable[[], Figures | None]
    hint: str = ""


@contextmanager
def _display(display: ProgressDisplay) -> Iterator[None]:
    """Show the figures while the body runs; on a terminal also those after it."""
    show = show_bar if sys.stderr.isatty() and not is_quiet() else show_lines
    finished = threading.Event()
    thread = threading.Thread(target=show, args=(display, finished), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


class RefreshEvent(Protocol):
    """What is waited for between refreshes."""

    def wait(self, timeout: float, /) -> bool:
        """Whether it happened within the time."""


def show_bar(display: ProgressDisplay, finished: RefreshEvent) -> None:
    """Draw a progress bar at every refresh until the body has finished."""
    start = time.monotonic()
    # tqdm's own rate would take the time between two refreshes for that of a batch.
    bar_format = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}{postfix}]"
    with tqdm(
        desc=display.label, total=display.total, initial=display.done, unit=display.units, bar_format=bar_format
    ) as bar:
        for figures, estimator in _refreshes(display, finished):
            now = time.monotonic()
            bar.n = figures.count
            state = figures.waiting_for or estimator.describe(now)
            hint = _hint(display, figures, estimator, start, now)
            bar.set_postfix_str(_join_parts(state, hint, figures.note))  # which draws the bar


def show_lines(display: ProgressDisplay, finished: RefreshEvent) -> None:
    """Print a line every few seconds until the body has finished, less often while nothing changes."""
    start = last_line = time.monotonic()
    last_shown: tuple[int, str, str] | None = None
    for figures, estimator in _refreshes(display, finished):
        now = time.monotonic()
        shown = figures.count, figures.note, figures.waiting_for
        pause = UNCHANGED_LINE_SECONDS if shown == last_shown else LINE_SECONDS
        if is_quiet() or now - last_line <= pause:
            continue
        last_line, last_shown = now, shown
        state = estimator.describe(now)
        if figures.waiting_for:
            state = f"{figures.waiting_for}, {now - start:.0f} s so far"
        finished_so_far = f"{display.label}: {figures.count} of {display.total} {display.units}"
        hint = _hint(display, figures, estimator, start, now)
        print(_join_parts(finished_so_far, state, hint, figures.note), file=sys.stderr)


def _hint(display: ProgressDisplay, figures: Figures, estimator: RateEstimator, start: float, now: float) -> str:
    """Where to look if the stage does not begin, or nothing gets finished any more."""
    does_not_begin = bool(figures.waiting_for) and now - start > STALLED_SECONDS
    return display.hint if does_not_begin or estimator.is_stalled(now) else ""


def _join_parts(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _refreshes(display: ProgressDisplay, finished: RefreshEvent) -> Iterator[tuple[Figures, RateEstimator]]:
    """The figures at every refresh, of which one comes after the end, so that the last figures are shown."""
    estimator = RateEstimator(display.total, display.done)
    is_last = False
    while not is_last:
        is_last = finished.wait(REFRESH_SECONDS)
        figures = display.read()
        if figures is not None:
            estimator.update(figures.count, time.monotonic(), figures.idle_seconds)
            yield figures, estimator
