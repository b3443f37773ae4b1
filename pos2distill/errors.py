"""Errors that are not bugs. A user error is one line and exit code 2; a bug keeps its traceback."""

import difflib
import enum
import re
from collections.abc import Iterable, Iterator

_TRACEBACK_LINE = re.compile(r"^pos2distill\.errors\.UserError: (.+)$", re.MULTILINE)


class ExitCode(enum.IntEnum):
    """Exit codes of the command line."""

    SUCCESS = 0
    FAILED = 1  # a gate was not passed, a job failed, or a bug
    USER_ERROR = 2
    STOPPED = 3  # the job was stopped or deleted
    INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


class UserError(Exception):
    """Invalid input from the user. Its message is one line: where, what was expected, what was given."""


class GateError(Exception):
    """A model does not pass the requested gate: one line, exit code 1."""


class Stopped(Exception):
    """A run stopped in good order after a signal. `exit_code`: 128 + the signal's number, as in shells."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM. As after Ctrl-C, the command ends immediately; stored results remain."""

    exit_code = 143


class CorruptPart(Exception):
    """A part of the sample store cannot be read and was quarantined: earlier indexes of the store are out of date."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """A hint with the nearest right name, to append to a message: `"; did you mean 'x'?"`, or the whole choice."""
    choices = sorted(options)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; expected one of: {', '.join(choices)}" if choices else ""


def find_user_error(error: BaseException) -> UserError | None:
    """The UserError inside an error that came from another process, or None.

    Ray 2.60 wraps the error of a remote function, sometimes several times, in `__cause__`, `__context__` or `cause`. Of
    an error in Ray Data only the text of its traceback remains.
    """
    errors = list(_error_chain(error))
    for link in errors:
        if isinstance(link, UserError):
            return link
    for link in errors:
        match = _TRACEBACK_LINE.search(str(link))
        if match:
            return UserError(match[1])
    return None


def find_corrupt_part(error: BaseException) -> CorruptPart | None:
    """The CorruptPart inside an error that came from another process, or None."""
    for link in _error_chain(error):
        if isinstance(link, CorruptPart):
            return link
    return None


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it wraps, each once."""
    remaining = [error]
    seen = set[int]()
    while remaining:
        link = remaining.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        # `worker_failures`: of Ray Train's WorkerGroupError, one error per rank.
        failures = getattr(link, "worker_failures", None) or {}
        wrapped = [link.__cause__, link.__context__, getattr(link, "cause", None), *failures.values()]
        remaining += [cause for cause in wrapped if isinstance(cause, BaseException)]
