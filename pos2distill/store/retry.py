"""Retries while a storage or a hub is unreachable."""

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

from pos2distill.errors import TransientError, one_line
from pos2distill.faults import is_transient

_RETRY_SECONDS = 5.0  # between two requests
# After it, and so many calls, an unreachable storage is an error: one call may upload for longer than this.
_WAIT_SECONDS = 600.0
_MIN_CALLS = 3

_T = TypeVar("_T")


def retry_while_unreachable(call: Callable[[], _T], warn: Callable[[str], None]) -> _T:
    """Call a function, and again while its storage or hub is unreachable.

    It is called for ten minutes after the first error, and at least three times. The driver ends the run earlier where
    it cannot renew its lease in the same storage.

    Args:
        call: the function, which may be called again after it has failed half-way.
        warn: called once, with a line, if the function has to be called again.
    Returns: the function's result.
    """
    first_failure = 0.0
    for number in itertools.count(1):
        try:
            return call()
        except Exception as error:  # errors of file systems share no base class
            if not (isinstance(error, TransientError) or is_transient(error)):
                raise
            if number == 1:
                first_failure = time.monotonic()
                warn(f"{one_line(str(error))}; workers wait until the storage answers")
            if number >= _MIN_CALLS and time.monotonic() - first_failure > _WAIT_SECONDS:
                raise
        time.sleep(_RETRY_SECONDS)
    raise AssertionError("the loop does not end")
