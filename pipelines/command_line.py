"""The command line: `python run.py`, `python -m pos2distill`, and `pos2distill` where it is installed.

COMMAND RECIPE [section.field=value ...] [--dry-run [--full]]
submit [COMMAND] RECIPE [section.field=value ...] --address URL
cluster ACTION SPEC [[COMMAND] RECIPE] [section.field=value ...] [spec.section.field=value ...]
"""

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pos2distill import __version__
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe, recipe_names
from pos2distill.environment import skip_expected_ray_messages, use_ray_token
from pos2distill.errors import (
    ExitCode,
    GateError,
    MachineError,
    Stopped,
    Terminated,
    TransientError,
    UserError,
    one_line,
)
from pos2distill.faults import describe as describe_fault
from pos2distill.faults import may_pass
from pos2distill.placement import GATE_FAILED, JOB_DASHBOARD_VARIABLE, NOT_RETRIED
from pos2distill.secrets import mask_secrets
from pos2distill.startup import is_interrupt, silent_interrupts

from .argument_parser import OneLineParser, refuse_unknown
from .browse import BROWSING, add_browsing, run_browsing
from .gate_options import add_gate, gate_arguments, gate_flags
from .help_texts import CLUSTER, CLUSTER_EXAMPLES, SUBMIT, examples
from .job_command import COMMANDS, WORDS_HELP, job_flags, split_command
from .model_options import add_model_options, load_evaluated_recipe

_RENDERING = ("render", "validate", "submit")  # the actions of `cluster` that take a job's command
# Actions of `cluster` that take these options. The output of those without --json or --quiet is a manifest or a log.
_CLUSTER_OPTIONS = {
    "json": ("submit", "status", "validate"),
    "quiet": ("submit", "validate", "delete"),
    "out": ("render",),
    "crds": _RENDERING,
    "server": _RENDERING,
}
# How long an attempt of a job on a cluster waits before it ends with an error that may pass.
_OUTAGE_S = 900.0


def main(arguments: list[str] | None = None) -> int:
    """Parse, load the recipe, run the command. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal may lack characters of the messages; that should not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    skip_expected_ray_messages()
    try:
        parser = _parser()
        # Overrides may precede and follow options; argparse alone takes them in one place only.
        options, remaining = parser.parse_known_args(arguments)
        refuse_unknown(parser, options, remaining)
        return _run_and_flush(options, remaining)
    except SystemExit as stop:  # argparse has printed what is wrong, or the help
        if stop.code == ExitCode.USER_ERROR:
            _stop_retries()
        raise
    except GateError as error:
        print(f"gate: {error}", file=sys.stderr)
        _stop_retries(GATE_FAILED)
        return 1
    except UserError as error:
        exit_code = _report_error(str(error))
        _prepare_retries(error)
        return exit_code
    except (Stopped, KeyboardInterrupt) as stop:
        # Stopped and Terminated know their signal. A plain KeyboardInterrupt is Ctrl-C: 128 + SIGINT.
        reason = str(stop) or "interrupted"
        print(f"{reason}; run the same command again to continue", file=sys.stderr)
        return stop.exit_code if isinstance(stop, Stopped | Terminated) else 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return ExitCode.OUTPUT_CLOSED
        line = describe_fault(error)
        if line is None:
            raise
        exit_code = _report_error(line)
        if may_pass(error):
            _wait_out()
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


def _prepare_retries(error: UserError) -> None:
    """On a cluster whose operator repeats failed jobs: none if it would fail again, a later one if the cause may pass.

    After a fault that may be of this attempt's machine alone, the operator tries again at once.
    """
    if isinstance(error, TransientError):
        _wait_out()
    elif not isinstance(error, MachineError):
        _stop_retries()


def _stop_retries(why: str = NOT_RETRIED) -> None:
    """On a cluster whose operator repeats failed jobs, stop the job, since it would fail in the same way."""
    if os.environ.get(JOB_DASHBOARD_VARIABLE):
        from .jobs.own_job import stop_own_job

        stop_own_job(why)


def _wait_out() -> None:
    """On such a cluster, leave a storage, a hub or the network time to come back: of attempts there are few."""
    if os.environ.get(JOB_DASHBOARD_VARIABLE):
        print(f"this attempt ends in {_OUTAGE_S / 60:g} minutes, since the cause may pass", file=sys.stderr, flush=True)
        time.sleep(_OUTAGE_S)


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
    except OSError:  # it is no file
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
        _list_recipes(as_json=options.json)
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
    gate = gate_arguments(options) if options.command == "evaluate" else {}
    if options.dry_run:
        if options.json:
            raise UserError("--json: --dry-run shows the settings as YAML; leave out one of the two")
        # Imported here, so that --help and a misspelt field are answered at once.
        with silent_interrupts():
            from .dry_run import show

        show(recipe, options.command, full=options.full, baseline=gate.get("baseline"))
        return 0
    _run_command(options, recipe, gate)
    return 0


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog=_program(),
        description="Reduce the position bias of a language model: distil its best document slot into all the others.",
        epilog=_as_typed(examples()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pos2distill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = _add_command(commands, name, text, text)
        nargs = "?" if name == "evaluate" else None
        command.add_argument(
            "recipe", nargs=nargs, metavar="RECIPE", help="a name (see `recipes`) or the path of a YAML file"
        )
        command.add_argument(
            "overrides", nargs="*", default=[], metavar="section.field=value", help="settings to change"
        )
        _add_output(command)
        command.add_argument(
            "--dry-run", action="store_true", help="check everything, show the settings and what would run, then stop"
        )
        command.add_argument("--full", action="store_true", help="--dry-run: show also the settings that are defaults")
    add_model_options(commands.choices["evaluate"])
    add_gate(commands.choices["evaluate"])
    add_browsing(functools.partial(_add_command, commands))
    _add_submit(commands)
    _add_cluster(commands)
    text = "list the recipes that come with the project"
    recipes = _add_command(commands, "recipes", text, text)
    recipes.add_argument("--json", action="store_true", help="as JSON")
    parser.commands = dict(commands.choices)
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[OneLineParser]",
    name: str,
    text: str,
    description: str,
    epilog: str | None = None,
) -> OneLineParser:
    return commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=_as_typed(epilog or examples(name)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _program() -> str:
    """How the program was started."""
    # Help and examples show a command that the reader can copy.
    is_installed_command = Path(sys.argv[0]).name == "pos2distill"
    return "pos2distill" if is_installed_command else "python run.py"


def _as_typed(examples: str) -> str:
    return examples.replace("python run.py", _program())


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    command.add_argument("--json", action="store_true", help="print one JSON object at the end, the rest on stderr")


def _add_submit(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    text = "run a command as a job on a running Ray cluster; follow its log to its end and exit code"
    command = _add_command(commands, "submit", text, SUBMIT)
    command.add_argument("words", nargs="+", metavar="[COMMAND] RECIPE or setting", help=WORDS_HELP)
    command.add_argument(
        "--address", required=True, metavar="URL", help="of the cluster's dashboard, for example http://127.0.0.1:8265"
    )
    command.add_argument(
        "--allow-plain-http", action="store_true", help="send the token to another machine without encryption"
    )
    _add_output(command)
    add_gate(command)


def _add_cluster(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    text = "a study on Kubernetes by KubeRay: render, validate and submit manifests (docs/cluster.md)"
    command = _add_command(commands, "cluster", text, CLUSTER, epilog=CLUSTER_EXAMPLES)
    command.add_argument("action", choices=["render", "validate", "submit", "status", "logs", "delete"])
    command.add_argument("spec", metavar="SPEC", help="a preset's name, or the path of a YAML file")
    command.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="[COMMAND] RECIPE or setting",
        help=f"{WORDS_HELP}, spec.section.field=value",
    )
    command.add_argument("--out", metavar="FOLDER", help="render: write FOLDER/NAME.yaml instead of printing")
    checking = ", ".join(_RENDERING)
    command.add_argument(
        "--crds", metavar="PATH", help=f"{checking}: file or folder with KubeRay's CRDs, to check the schema too"
    )
    command.add_argument(
        "--server", action="store_true", help=f"{checking}: also ask the cluster (kubectl apply --dry-run=server)"
    )
    _add_output(command)
    add_gate(command)


def _run_submit(options: argparse.Namespace, words: list[str]) -> int:
    command, words = split_command("submit", words)
    flags = job_flags(options, command)
    # Before the import of ray: Ray 2.60 reads its authentication mode when it is imported.
    use_ray_token()
    with silent_interrupts():
        from .jobs.submit import run_submit

    with _redirected_output(options):
        submitted = run_submit(
            command, words[0], words[1:], options.address, flags, allow_plain_http=options.allow_plain_http
        )
    if options.json:
        print(json.dumps(submitted.summary(), ensure_ascii=False))
    return submitted.exit_code


def _run_cluster(options: argparse.Namespace, words: list[str]) -> int:
    for name, actions in _CLUSTER_OPTIONS.items():
        is_given = getattr(options, name) not in (None, False)
        if is_given and options.action not in actions:
            raise UserError(f"--{name}: is an option of cluster {', '.join(actions)}, not of {options.action}")
    job_command, flags = "study", gate_flags(options)
    if options.action in _RENDERING:
        job_command, words = split_command(f"cluster {options.action}", words, needs_recipe=False)
        flags = job_flags(options, job_command)
    elif flags:
        name = flags[0].partition("=")[0]
        raise UserError(f"{name}: is an option of cluster {', '.join(_RENDERING)}, not of {options.action}")
    # `cluster` is beside this package: in a checkout both are top-level packages, in a wheel both are in pos2distill.
    parent = (__package__ or "").removesuffix("pipelines")
    with silent_interrupts():
        command = importlib.import_module(f"{parent}cluster.command")
    with _redirected_output(options):
        outcome = command.run_cluster(
            options.action,
            options.spec,
            words,
            command=job_command,
            flags=flags,
            out=options.out,
            crds=options.crds,
            server=options.server,
        )
    if options.json:
        print(json.dumps(outcome.summary, ensure_ascii=False))
    exit_code: int = outcome.exit_code
    return exit_code


def _run_command(options: argparse.Namespace, recipe: Recipe, gate: dict[str, Any]) -> None:
    # Imported here, so that --help and a misspelt field are answered at once.
    with silent_interrupts():
        from . import commands
        from .interrupt import terminable

    functions: dict[str, Callable[..., object]] = {
        "study": commands.run_study,
        "evaluate": commands.run_evaluate,
        "analyse": commands.run_analyse,
        "sample": commands.run_sample,
        "distill": commands.run_distill,
        "report": commands.run_report,
    }
    from .progress import be_quiet

    if options.quiet:
        be_quiet()
    gate_error = None
    try:
        # SIGTERM raises like Ctrl-C, so that `finally` blocks release the storage and remove unfinished files.
        with terminable(), _redirected_output(options):
            cells = commands.plan_command(recipe, options.command)
            functions[options.command](recipe, cells, **gate)
    except GateError as error:
        gate_error = error  # the results that the gate refuses are complete
    if options.json:
        print(json.dumps(commands.command_summary(recipe, options.command, cells), ensure_ascii=False))
    if gate_error is not None:
        raise gate_error


@contextlib.contextmanager
def _redirected_output(options: argparse.Namespace) -> Iterator[None]:
    """With --quiet nothing is printed but warnings and errors; with --json the lines for people go to stderr."""
    if options.quiet:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            yield
    elif options.json:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        yield


def _list_recipes(*, as_json: bool) -> None:
    descriptions = {name: load_recipe(name).description for name in recipe_names()}
    if as_json:
        listed = [{"name": name, "description": description} for name, description in descriptions.items()]
        print(json.dumps(listed, ensure_ascii=False))
        return
    width = max(map(len, descriptions))
    for name, description in descriptions.items():
        print(f"{name:<{width}}  {description}")
