"""Ctrl-C while packages are imported, which takes seconds, and for some of them ends in a traceback or a panic."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_EXIT_CODE = 130  # 128 + SIGINT; `errors.ExitCode` would be another import before the handler is set
_cli_process: int | None = None  # the id of the process that runs the command line and nothing else


def mark_as_cli_process() -> None:
    """Record that this process runs the command line alone. Only such a process is ended, never a notebook."""
    global _cli_process  # noqa: PLW0603
    _cli_process = os.getpid()


def is_cli_process() -> bool:
    """Whether this process runs the command line alone, so that it may be ended; false in a notebook."""
    return _cli_process == os.getpid()


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """Within this context, Ctrl-C ends the program at once and prints nothing. For imports, which leave nothing behind.

    Without effect in a process that has not called `mark_as_cli_process`. A handler that the program or its parent has
    set (such as "ignore", in the background of a shell) stays.
    """
    is_main = threading.current_thread() is threading.main_thread()  # only there a handler can be set
    if not is_cli_process() or not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _quit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception is what a package made of Ctrl-C: extensions in Rust (pyo3) turn it into a panic."""
    return type(error).__name__ == "PanicException" and "KeyboardInterrupt" in str(error)


def _quit(_: int, __: FrameType | None) -> None:
    # Not by an exception, which the interrupted package could catch or wrap.
    os._exit(_EXIT_CODE)
