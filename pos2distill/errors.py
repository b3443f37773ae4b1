"""Errors that are no bugs, above all the one that a user can mend: one line, exit code 2. A bug keeps its traceback."""

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
    """What a user gave cannot be used. Its message is one line: where, what was expected, what came."""


class GateError(Exception):
    """A model does not pass a gate that was asked for: one line, exit code 1."""


class Stopped(Exception):
    """A run was asked to stop, and did, in good order. `exit_code`: 128 + the signal's number, as shells count."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(KeyboardInterrupt):
    """A SIGTERM came. As after Ctrl-C, the command ends at once; what is stored stays."""

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
    """The UserError inside an error that crossed process borders, or None.

    Ray wraps what a remote function raises, sometimes several times, in `__cause__`, `__context__` or `cause`; Ray Data
    keeps nothing of it but the text of its traceback.
    """
    links = list(_chain(error))
    if found := next((link for link in links if isinstance(link, UserError)), None):
        return found
    told = next((match for link in links if (match := _TRACEBACK_LINE.search(str(link)))), None)
    return UserError(told[1]) if told else None


def find_corrupt_part(error: BaseException) -> CorruptPart | None:
    """The CorruptPart inside an error that crossed process borders, or None."""
    return next((link for link in _chain(error) if isinstance(link, CorruptPart)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        inner = (link.__cause__, link.__context__, getattr(link, "cause", None))
        failures = getattr(link, "worker_failures", None) or {}  # Ray Train: one error a rank
        waiting += [cause for cause in (*inner, *failures.values()) if isinstance(cause, BaseException)]
