"""Ctrl-C and SIGTERM. While training: once for a checkpoint, twice to leave at once. Elsewhere: to leave at once."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from pos2distill.errors import Terminated

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt."""

    def handle(_: int, __: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interruptible(work: Callable[[], _T], ask_to_stop: Callable[[], None]) -> tuple[_T, int]:
    """Run `work`, which ends in good order soon after it was asked to stop.

    It runs in a thread, since signals are handled in the main one. A second signal ends the process at once; what it
    started ends with it.

    Returns: what `work` gives, and the signal that came, or 0.
    """
    came: list[int] = []
    # The one queue that a signal handler may use, whatever lock the interrupted code holds.
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def handle(number: int, _: FrameType | None) -> None:
        if came:
            os._exit(128 + number)
        came.append(number)
        print("\nstopping after a checkpoint; once more to leave at once", file=sys.stderr, flush=True)
        asked.put(True)

    def wait_to_ask() -> None:
        if asked.get():
            ask_to_stop()

    stopper = threading.Thread(target=wait_to_ask, name="stop")
    stopper.start()
    with ThreadPoolExecutor(1, "work") as worker:
        before = {number: signal.signal(number, handle) for number in _SIGNALS}
        try:
            result = worker.submit(work).result()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            asked.put(False)
            stopper.join()
    return result, came[0] if came else 0
