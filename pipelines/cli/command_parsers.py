"""The parsers of the commands: each with its function, its examples and its exit codes."""

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from .argument_parser import OneLineParser

_BUG = "a bug (with its traceback)"
_FAULT = "2 wrong input, or a fault of the machine, the network or a storage (one line)"
_STOPPED_JOB = "3 a job that was stopped, by someone or at its deadline"
_ENDED = "130 or 143 ended by Ctrl-C or SIGTERM; 141 the output was closed (`| head`)"


def _exit_codes(*codes: str) -> str:
    """The exit codes of a command: `0 success` and these, each with its meaning."""
    return textwrap.fill(f"Exit codes: {'; '.join(['0 success', *codes])}.", 115)


OF_READING = _exit_codes(f"1 {_BUG}", _FAULT, _ENDED)
"""What is printed below the examples of a command that runs nothing."""

OF_RUNNING = "The same command resumes an interrupted run, and does nothing if everything is finished.\n" + _exit_codes(
    f"1 a gate that failed (one line), or {_BUG}", _FAULT, _STOPPED_JOB, _ENDED
)
"""What is printed below the examples of a command that makes artifacts."""

OF_KUBERNETES = _exit_codes(
    "1 the job or its gate failed",
    _FAULT,
    "3 the job was stopped, at its deadline or by someone, or deleted",
    "130 ended by Ctrl-C",
)
"""What is printed below the examples of `cluster`."""


class CommandParsers:
    """Adds the commands to the parser of the program.

    Args:
        parser: also lists the first example of each command.
    """

    def __init__(self, parser: OneLineParser) -> None:
        self._parser = parser
        self._parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        self._first_examples: list[str] = []

    def add(
        self,
        name: str,
        handler: Callable[[argparse.Namespace], int],
        text: str,
        *,
        examples: Sequence[str],
        ending: str,
        description: str | None = None,
        takes_settings: bool = False,
    ) -> OneLineParser:
        """Add a command. Returns its parser, without arguments.

        Args:
            handler: runs the command with its options; returns the exit code.
            text: the line about it in the list of commands.
            examples: as they are typed after the program's name.
            ending: what is printed below them, such as `OF_READING`.
            description: what its own help says; None: `text`.
            takes_settings: words without a dash that argparse leaves over are settings, and are added to
                `options.words`. Otherwise they are errors.
        """
        command = self._parsers.add_parser(
            name,
            help=text,
            description=description or text,
            epilog=_epilog(examples, ending),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(handler=handler, takes_settings=takes_settings)
        self._first_examples.append(examples[0])
        self._parser.epilog = _epilog(self._first_examples, OF_RUNNING)
        self._parser.commands[name] = command
        return command


def program_name() -> str:
    """How the program was started, so that help shows commands that the reader can copy."""
    is_installed_command = Path(sys.argv[0]).name == "pos2distill"
    return "pos2distill" if is_installed_command else "python run.py"


def _epilog(examples: Sequence[str], ending: str) -> str:
    return "\n".join(["examples:", *(f"  {program_name()} {line}" for line in examples), "", ending, ""])
