"""The command line: `python run.py`, `python -m pos2distill`, and `pos2distill` where it is installed.

COMMAND RECIPE [section.field=value ...] [--dry-run [--full]]
submit [COMMAND] RECIPE [section.field=value ...] --address URL
cluster ACTION SPEC [[COMMAND] RECIPE] [section.field=value ...] [spec.section.field=value ...]
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import select
import sys
import time
import traceback
from collections.abc import Iterator

from pos2distill.config import Recipe
from pos2distill.config.gate import NO_GATE, Gate
from pos2distill.config.load import load_recipe
from pos2distill.config.read import RECIPES, recipe_names
from pos2distill.environment import skip_expected_ray_messages, use_ray_token
from pos2distill.errors import (
    ExitCode,
    GateError,
    MachineError,
    Stopped,
    TransientError,
    UserError,
    did_you_mean,
    one_line,
)
from pos2distill.faults import describe as describe_fault
from pos2distill.faults import is_transient
from pos2distill.node_pools import GATE_FAILED, JOB_DASHBOARD_VARIABLE, NOT_RETRIED
from pos2distill.secrets import mask_secrets
from pos2distill.startup import is_interrupt, silent_interrupts

from .argument_parser import reject_unknown
from .browse import BROWSING, run_browsing
from .command_parser import RENDERING, build_parser
from .gate_options import read_gate
from .model_options import load_evaluated_recipe
from .submitted_command import check_gate_options, split_command

# Actions of `cluster` that take these options. The output of those without --json or --quiet is a manifest or a log.
_CLUSTER_OPTIONS = {
    "json": ("submit", "status", "validate"),
    "quiet": ("submit", "validate", "delete"),
    "out": ("render",),
    "crds": RENDERING,
    "server": RENDERING,
}
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
        return _run_and_flush(options, remaining)
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


def _run_and_flush(options: argparse.Namespace, remaining: list[str]) -> int:
    try:
        exit_code = _run(options, remaining)
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


def _run(options: argparse.Namespace, remaining: list[str]) -> int:
    if options.command == "recipes":
        if options.name is None:
            _list_recipes(as_json=options.json)
        else:
            _print_recipe(options)
        return 0
    if options.command in BROWSING:
        run_browsing(options)
        return 0
    if options.command == "cluster":
        return _run_cluster(options, [*options.words, *remaining])
    if options.command == "submit":
        return _run_submit(options, [*options.words, *remaining])
    if options.full and not options.dry_run:
        raise UserError("--full: is an option of --dry-run")
    overrides = [*options.overrides, *remaining]
    if options.command == "evaluate":
        recipe = load_evaluated_recipe(options, overrides)
    else:
        recipe = load_recipe(options.recipe, overrides)
    gate = read_gate(options) if options.command == "evaluate" else NO_GATE
    if options.quiet:
        # Imported here, so that --help and a misspelled field are answered at once.
        with silent_interrupts():
            from ..progress_bar import set_quiet
        set_quiet()
    if options.dry_run:
        if options.json:
            raise UserError("--json: --dry-run shows the settings as YAML; leave out one of the two")
        # Imported here, so that --help and a misspelled field are answered at once.
        with silent_interrupts():
            from ..dry_run import show

        show(recipe, options.command, full=options.full, baseline=gate.baseline)
        return 0
    _run_command(options, recipe, gate)
    return 0


def _run_submit(options: argparse.Namespace, words: list[str]) -> int:
    command, words = split_command("submit", words)
    gate = read_gate(options)
    check_gate_options(gate, command)
    # Before the import of ray: Ray 2.60 reads its authentication mode when it is imported.
    use_ray_token()
    with silent_interrupts():
        from ..interrupt import terminable
        from ..jobs.submit import run_submit

    # SIGTERM raises like Ctrl-C, so that the job is left with a line.
    with terminable(), _redirected_output(options):
        submitted = run_submit(
            command, words[0], words[1:], options.address, gate, allow_plain_http=options.allow_plain_http
        )
    if options.json:
        print(json.dumps(submitted.summary(), ensure_ascii=False))
    return submitted.exit_code


def _run_cluster(options: argparse.Namespace, words: list[str]) -> int:
    for name, actions in _CLUSTER_OPTIONS.items():
        is_given = getattr(options, name) not in (None, False)
        if is_given and options.action not in actions:
            raise UserError(f"--{name}: is an option of cluster {', '.join(actions)}, not of {options.action}")
    job_command, gate = "study", read_gate(options)
    if options.action in RENDERING:
        job_command, words = split_command(f"cluster {options.action}", words, needs_recipe=False)
        check_gate_options(gate, job_command)
    elif gate != NO_GATE:
        option = next(iter(gate.given()))
        raise UserError(f"{option}: is an option of cluster {', '.join(RENDERING)}, not of {options.action}")
    # `cluster` is beside this package: in a checkout both are top-level packages, in a wheel both are in pos2distill.
    parent = (__package__ or "").removesuffix("pipelines.cli")
    with silent_interrupts():
        from ..interrupt import terminable

        command = importlib.import_module(f"{parent}cluster.command")
    # SIGTERM raises like Ctrl-C, so that the process that shows the job's log ends too.
    with terminable(), _redirected_output(options):
        outcome = command.run_cluster(
            options.action,
            options.spec,
            words,
            command=job_command,
            gate=gate,
            out=options.out,
            crds=options.crds,
            server=options.server,
        )
    if options.json:
        print(json.dumps(outcome.summary, ensure_ascii=False))
    exit_code: int = outcome.exit_code
    return exit_code


def _run_command(options: argparse.Namespace, recipe: Recipe, gate: Gate) -> None:
    # Imported here, so that --help and a misspelled field are answered at once.
    with silent_interrupts():
        from .. import commands
        from ..attempts import record_failure
        from ..interrupt import terminable

    gate_error = None
    try:
        # SIGTERM raises like Ctrl-C, so that `finally` blocks release the storage and remove unfinished files.
        with terminable(), _redirected_output(options):
            studies = commands.plan_command(recipe, options.command)
            arguments = {} if gate == NO_GATE else {"gate": gate}  # only `evaluate` takes one
            commands.COMMANDS[options.command].run(recipe, studies, **arguments)
    except GateError as error:
        gate_error = error  # the results that the gate rejects are complete
    except Exception as error:
        record_failure(recipe, options.command, error)
        raise
    if options.json:
        summary = commands.command_summary(recipe, options.command, studies)
        if gate != NO_GATE:
            summary["gate"] = {"passed": gate_error is None, "reason": str(gate_error) if gate_error else None}
        print(json.dumps(summary, ensure_ascii=False))
    if gate_error is not None:
        raise gate_error


@contextlib.contextmanager
def _redirected_output(options: argparse.Namespace) -> Iterator[None]:
    """With --quiet nothing is printed but warnings and errors; with --json the lines for people go to stderr."""
    if options.quiet:
        with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
            yield
    elif options.json:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        yield


def _print_recipe(options: argparse.Namespace) -> None:
    if options.json:
        raise UserError("--json: is an option of the list; leave it out to print a recipe")
    names = recipe_names()
    if options.name not in names:
        raise UserError(f"{options.name}: no recipe of the project{did_you_mean(options.name, names)}")
    print((RECIPES / f"{options.name}.yaml").read_text(encoding="utf-8"), end="")


def _list_recipes(*, as_json: bool) -> None:
    descriptions = {name: load_recipe(name).description for name in recipe_names()}
    if as_json:
        listed = [{"name": name, "description": description} for name, description in descriptions.items()]
        print(json.dumps(listed, ensure_ascii=False))
        return
    width = max(map(len, descriptions))
    for name, description in descriptions.items():
        print(f"{name:<{width}}  {description}")
