"""The command line: `python run.py`, `python -m pos2distill`, and `pos2distill` where it is installed.

COMMAND RECIPE [section.field=value ...] [--dry-run [--full]]
submit [COMMAND] RECIPE [section.field=value ...] --address URL
cluster ACTION SPEC [[COMMAND] RECIPE] [section.field=value ...] [spec.section.field=value ...]
"""

import argparse
import io
import os
import select
import sys
import time
import traceback

from pos2distill import __version__
from pos2distill.environment import skip_expected_ray_messages
from pos2distill.errors import ExitCode, GateError, MachineError, Stopped, TransientError, UserError, one_line
from pos2distill.faults import describe as describe_fault
from pos2distill.faults import is_transient
from pos2distill.node_pools import GATE_FAILED, JOB_DASHBOARD_VARIABLE, NOT_RETRIED
from pos2distill.secrets import mask_secrets
from pos2distill.startup import is_interrupt

from .argument_parser import OneLineParser, reject_unknown
from .browse.compare import add_compare
from .browse.export import add_export
from .browse.inspect import add_inspect
from .browse.push import add_push
from .browse.runs import add_runs
from .cluster import add_cluster
from .command_parsers import CommandParsers, program_name
from .recipe_commands import add_recipe_commands
from .recipes import add_recipes
from .submit import add_submit

# Each adds its commands, in the order of the help.
_COMMANDS = (
    add_recipes,
    add_recipe_commands,
    add_inspect,
    add_runs,
    add_compare,
    add_export,
    add_push,
    add_submit,
    add_cluster,
)
# How long an attempt of a job on a cluster waits before it ends with an error that may pass.
_FAILED_ATTEMPT_SECONDS = 900.0


def main(arguments: list[str] | None = None) -> int:
    """Parse, load the recipe, run the command. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal may lack characters of the messages; that should not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    skip_expected_ray_messages()
    try:
        parser = build_parser()
        # Overrides may precede and follow options; argparse alone takes them in one place only.
        options, remaining = parser.parse_known_args(arguments)
        reject_unknown(parser, options, remaining)
        if remaining:
            options.words = [*options.words, *remaining]
        return _run_and_flush(options)
    except SystemExit as stop:  # argparse has printed what is wrong, or the help
        if stop.code == ExitCode.USER_ERROR:
            _stop_retries()
        raise
    except GateError as error:
        print(f"gate failed: {error}", file=sys.stderr)
        _stop_retries(GATE_FAILED)
        return ExitCode.FAILED
    except UserError as error:
        exit_code = _report_error(str(error))
        _stop_or_delay_retries(error)
        return exit_code
    except (Stopped, KeyboardInterrupt) as stop:
        reason = str(stop) or "interrupted"
        print(f"{reason}; run the same command again to continue", file=sys.stderr)
        return ExitCode.of_interrupt(stop)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return ExitCode.OUTPUT_CLOSED
        line = describe_fault(error)
        if line is None:
            raise
        exit_code = _report_error(line)
        if is_transient(error):
            _delay_failed_attempt()
        return exit_code


def build_parser() -> OneLineParser:
    """The parser of all commands, with the parser of each in `commands`."""
    parser = OneLineParser(
        prog=program_name(),
        description="Reduce the position bias of a language model: distill its best document slot into all others.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pos2distill {__version__}")
    commands = CommandParsers(parser)
    for add in _COMMANDS:
        add(commands)
    return parser


def _run_and_flush(options: argparse.Namespace) -> int:
    try:
        exit_code: int = options.handler(options)
    except BaseException as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from None
        raise
    # Here, where a closed pipe is handled, and not when the interpreter ends.
    sys.stdout.flush()
    return exit_code


def _stop_or_delay_retries(error: UserError) -> None:
    """On a cluster whose operator repeats failed jobs: none if it would fail again, a later one if the cause may pass.

    After a fault that may be of this attempt's machine alone, the operator tries again at once.
    """
    if isinstance(error, TransientError):
        _delay_failed_attempt()
    elif not isinstance(error, MachineError):
        _stop_retries()


def _stop_retries(why: str = NOT_RETRIED) -> None:
    """On a cluster whose operator repeats failed jobs, stop the job, since it would fail in the same way."""
    if os.environ.get(JOB_DASHBOARD_VARIABLE):
        from ..jobs.own_job import stop_own_job

        stop_own_job(why)


def _delay_failed_attempt() -> None:
    """On such a cluster, wait before this attempt ends: the fault may pass, and attempts are limited."""
    if os.environ.get(JOB_DASHBOARD_VARIABLE):
        minutes = _FAILED_ATTEMPT_SECONDS / 60
        print(f"this attempt ends in {minutes:g} minutes, since the cause may pass", file=sys.stderr, flush=True)
        time.sleep(_FAILED_ATTEMPT_SECONDS)


def _report_error(line: str) -> int:
    """Print the line of the error that is being handled; with POS2DISTILL_DEBUG its traceback before it."""
    if os.environ.get("POS2DISTILL_DEBUG"):
        traceback.print_exc()
    # A message can hold line breaks of a name that the user gave.
    print(f"error: {one_line(mask_secrets(line))}", file=sys.stderr)
    return ExitCode.USER_ERROR


def _output_is_closed() -> bool:
    """Whether the reader of a pipe from this program has ended (`| head`). Then nothing more is written to it."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # it is not a file
        return False
    poll = select.poll()
    poll.register(output, 0)
    closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if closed:
        # Python flushes once more when it ends, and would report the error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return closed
