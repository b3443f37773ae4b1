"""Errors that are not bugs. A user error is one line and exit code 2; a bug keeps its traceback."""

import contextlib
import difflib
import enum
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator


class ExitCode(enum.IntEnum):
    """Exit codes of the command line."""

    SUCCESS = 0
    FAILED = 1  # a gate was not passed, a job failed, or a bug
    USER_ERROR = 2
    STOPPED = 3  # the job was stopped or deleted
    INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT
    OUTPUT_CLOSED = 141  # the reader of the output ended, as `head` does: 128 + SIGPIPE
    TERMINATED = 143  # 128 + SIGTERM

    @classmethod
    def of_interrupt(cls, interrupt: BaseException) -> "ExitCode":
        """The exit code after a signal: `Stopped` and `Terminated` contain it, a KeyboardInterrupt is Ctrl-C."""
        return cls(interrupt.exit_code) if isinstance(interrupt, Stopped | Terminated) else cls.INTERRUPTED


def status_name(exit_code: int) -> str:
    """How a job was left, as `--json` prints it. Left by Ctrl-C or SIGTERM, it continues to run."""
    statuses: dict[int, str] = {
        ExitCode.SUCCESS: "succeeded",
        ExitCode.STOPPED: "stopped",
        ExitCode.INTERRUPTED: "running",
        ExitCode.TERMINATED: "running",
    }
    return statuses.get(exit_code, "failed")


MESSAGE_LENGTH = 1000


def warn(text: str) -> None:
    """Print one warning, in one line on stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@functools.cache
def warn_once(text: str) -> None:
    """Print a warning once per process: the studies of a sweep share most settings."""
    warn(text)


class UserError(Exception):
    """Invalid input from the user. Its message is one line: where, what was expected, what was given."""


class TransientError(UserError):
    """A user error whose cause may pass by itself, such as a storage that does not answer."""


class CorruptState(UserError):
    """A training state has a missing or corrupt file, whose name is in the message. An earlier state may be intact."""


class MachineError(UserError):
    """A fault that may be of one machine alone, such as a full disk: another try may run on another machine."""


@contextlib.contextmanager
def reworded(change: Callable[[str], str]) -> Iterator[None]:
    """Give the errors of the body another message, made of their own.

    In place, so that their type and traceback stay: a `TransientError` in other words is still one that may pass.
    """
    try:
        yield
    except UserError as error:
        error.args = (change(str(error)),)
        raise


class GateError(Exception):
    """A model does not pass the requested gate: one line, exit code 1."""


class Stopped(Exception):
    """A run stopped cleanly after a signal. `exit_code`: 128 + the signal's number, as in shells."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM. As after Ctrl-C, the command ends immediately; stored results remain."""

    exit_code = ExitCode.TERMINATED


class CorruptPart(Exception):
    """A part of the sample store cannot be read and was quarantined: earlier indexes of the store are out of date."""


def one_line(message: str) -> str:
    """A message for a terminal. It may repeat what a user wrote, of any length and with any characters."""
    lines = " ".join(message.splitlines())
    printable = "".join(character if character.isprintable() else "?" for character in lines[: MESSAGE_LENGTH + 1])
    return printable if len(printable) <= MESSAGE_LENGTH else f"{printable[:MESSAGE_LENGTH]}…"


def collapse_whitespace(value: object, max_length: int | None = None) -> str:
    """The text of an error, or other text, on one line: each run of whitespace and line breaks becomes one space."""
    return " ".join(str(value).split())[:max_length]


def no_such_folder(path: str, kind: str, *, otherwise: str = "") -> str:
    """A message on a missing folder: its whole path, and the folder beside it whose name is most similar.

    otherwise: the hint where no name beside it is similar.
    """
    if "://" in path:
        return f"{path}: no such {kind}"
    parent, name = os.path.split(path.rstrip("/"))
    try:
        beside = [entry.name for entry in os.scandir(parent or ".") if entry.is_dir() and entry.name[0] != "."]
    except OSError:  # the folder around it is missing too
        beside = []
    hint = did_you_mean_one(name, beside, prefix=os.path.join(parent, "")) or otherwise
    return f"{os.path.abspath(path)}: no such {kind}{hint}"


def did_you_mean(name: str, options: Iterable[str], *, likeness: float = 0.5) -> str:
    """A hint with the nearest right name, to append to a message: `"; did you mean 'x'?"`, or the whole choice."""
    choices = sorted(options)
    near = did_you_mean_one(name, choices, likeness=likeness)
    if near:
        return near
    return f"; expected one of: {', '.join(choices)}" if choices else ""


def did_you_mean_one(name: str, options: Iterable[str], *, likeness: float = 0.5, prefix: str = "") -> str:
    """A hint with the nearest right name; nothing if none is near, where the whole choice would be too long.

    Args:
        likeness: the least, 0 to 1.
        prefix: shown before the right name.
    """
    near = difflib.get_close_matches(name, sorted(options), n=1, cutoff=likeness)
    return f"; did you mean '{prefix}{near[0]}'?" if near else ""
