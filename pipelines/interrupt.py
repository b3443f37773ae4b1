"""Ctrl-C and SIGTERM. During training the first saves a checkpoint and the second quits; elsewhere the first quits."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from pos2distill.errors import Terminated
from pos2distill.startup import is_cli_process

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt."""

    def handle(_: int, __: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def interruptible(work: Callable[[], _T], request_stop: Callable[[], None]) -> tuple[_T, int]:
    """Run `work`, which ends soon after `request_stop` was called.

    It runs in a thread, since Python handles signals in the main one. A second signal ends the program immediately; the
    processes that it started end with it. A process that only calls this, such as a notebook, is not ended: there
    `work` is left to end by itself. Called in another thread, it runs `work` there, without any handler.

    Returns: what `work` returns, and the signal that was received, or 0.
    Raises:
        KeyboardInterrupt: at the second signal, unless it ends the process; Terminated if that is SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(), 0
    received: list[int] = []
    # The one queue that a signal handler may use, whatever lock the interrupted code holds.
    requests: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            if is_cli_process():
                os._exit(128 + number)
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        print("\nsaving a checkpoint; press Ctrl-C again to force quit", file=sys.stderr, flush=True)
        requests.put(True)

    def wait_for_request() -> None:
        if requests.get():
            request_stop()

    # A handler must not wait, and `request_stop` may: so a thread of its own calls it.
    stopper = threading.Thread(target=wait_for_request, name="stop", daemon=True)
    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        stopper.start()
        result = _start(work).result()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        # Ends the thread `stop` if no signal has done so.
        requests.put(False)
        if len(received) < 2:
            stopper.join()
    return result, received[0] if received else 0


def _start(work: Callable[[], _T]) -> "Future[_T]":
    """Run `work` in a thread, and return what will have its result.

    A daemon, unlike the threads of `ThreadPoolExecutor`, so that it does not keep the process alive.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again in the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="work", daemon=True).start()
    return outcome
