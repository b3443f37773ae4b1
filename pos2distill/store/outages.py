"""Storages and hubs that do not answer for a while."""

import time
from collections.abc import Callable
from typing import TypeVar

from pos2distill.errors import TransientError, one_line
from pos2distill.faults import is_transient

_RETRY_SECONDS = 5.0  # between two requests
_WAIT_SECONDS = 600.0  # after it, a storage that does not answer is an error

_T = TypeVar("_T")


def once_storage_answers(call: Callable[[], _T], warn: Callable[[str], None]) -> _T:
    """What a function returns, called again while a storage or a hub does not answer, for at most ten minutes.

    Args:
        call: may be called again after it has failed half-way. warn: is called once if it has to wait.
    """
    began = time.monotonic()
    warned = False
    while True:
        try:
            return call()
        except Exception as error:  # of file systems that share no base class
            waited = time.monotonic() - began
            if waited > _WAIT_SECONDS or not (isinstance(error, TransientError) or is_transient(error)):
                raise
            if not warned:
                minutes = _WAIT_SECONDS / 60
                warn(f"{one_line(str(error))}; workers wait for the storage, at most {minutes:g} minutes")
                warned = True
        time.sleep(_RETRY_SECONDS)
