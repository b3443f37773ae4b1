"""The commands that run stages of a recipe: `COMMAND RECIPE [section.field=value ...] [--dry-run [--full]]`."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

from pos2distill.config import Recipe
from pos2distill.config.commands import COMMAND_FACTS
from pos2distill.config.gate import NO_GATE, Gate
from pos2distill.config.load import load_recipe
from pos2distill.errors import GateError, UserError
from pos2distill.startup import silent_interrupts

from .command_parsers import OF_RUNNING, CommandParsers
from .gate_options import add_gate, read_gate
from .model_options import add_model_options, load_evaluated_recipe
from .output_options import add_output_options, redirected_output


@dataclass(frozen=True, slots=True)
class _Help:
    text: str
    examples: Sequence[str]


_HELP = {
    "study": _Help(
        "run the whole study: evaluate, sample, distill, evaluate again, report; finished stages are skipped",
        (
            "study quickstart",
            "study quickstart --dry-run",
            "study quickstart training.learning_rate=5e-4 runtime.storage=/tmp/slow",
            "study my_recipe.yaml model.engine=vllm runtime.trainers.workers=2",
        ),
    ),
    "evaluate": _Help(
        "measure accuracy at every slot: of a recipe's base model and its checkpoint if any, or of any --model",
        (
            "evaluate quickstart --fail-if-gap-above 5",
            "evaluate --model Qwen/Qwen2.5-0.5B-Instruct --data questions.jsonl --documents 10",
            "evaluate --model Qwen/Qwen3-0.6B --data questions.jsonl model.chat_template_kwargs.enable_thinking=false",
            "evaluate --model qwen2.5 --data questions.jsonl --base-url http://127.0.0.1:8000/v1 --documents 10",
            "evaluate nq_mistral_7b data.path=s3://bucket/nq-open-20_total_documents_gold_at_0.jsonl.gz",
        ),
    ),
    "analyze": _Help(
        "analyze why a recipe's models answer differently by position: KL by token, recovery, attention, failed steps",
        ("analyze quickstart", "analyze quickstart analysis.examples=30"),
    ),
    "sample": _Help(
        "sample responses to advantageous prompts and store them, with the teacher's hidden states",
        ("sample quickstart", "sample nq_mistral_7b data.path=nq.jsonl.gz runtime.samplers.max=4"),
    ),
    "distill": _Help(
        "train on the stored samples; with runtime.mode=streamed, sample missing ones at the same time",
        ("distill quickstart", "distill quickstart runtime.mode=streamed"),
    ),
    "report": _Help("write the HTML page and summary.json from finished results", ("report quickstart",)),
}

JOB_WORDS_HELP = (
    f"command of the job ({', '.join(COMMAND_FACTS)}; default: study), then a recipe, then settings as "
    "section.field=value"
)


def add_recipe_commands(commands: CommandParsers) -> None:
    """Add these commands to the command line."""
    for name, facts in COMMAND_FACTS.items():
        texts = _HELP[name]
        command = commands.add(name, _run, texts.text, examples=texts.examples, ending=OF_RUNNING, takes_settings=True)
        nargs = "?" if name == "evaluate" else None
        command.add_argument(
            "recipe", nargs=nargs, metavar="RECIPE", help="name of a recipe (see `recipes`) or path of a YAML file"
        )
        command.add_argument(
            "words", nargs="*", default=[], metavar="section.field=value", help="settings of the recipe to change"
        )
        add_output_options(command)
        command.add_argument(
            "--dry-run", action="store_true", help="check everything, print the settings and what would run, and exit"
        )
        command.add_argument(
            "--full", action="store_true", help="with --dry-run: also print settings that have their default value"
        )
        if name == "evaluate":
            add_model_options(command)
        if facts.takes_gate:
            add_gate(command)


def _run(options: argparse.Namespace) -> int:
    if options.full and not options.dry_run:
        raise UserError("--full: is an option of --dry-run")
    is_evaluation = options.command == "evaluate"
    recipe = load_evaluated_recipe(options) if is_evaluation else load_recipe(options.recipe, options.words)
    gate = read_gate(options) if COMMAND_FACTS[options.command].takes_gate else NO_GATE
    if options.quiet:
        # Imported here, so that --help and a misspelled field are answered at once.
        with silent_interrupts():
            from ..progress_bar import set_quiet
        set_quiet()
    if options.dry_run:
        _show(options, recipe, gate)
    else:
        _run_stages(options, recipe, gate)
    return 0


def _show(options: argparse.Namespace, recipe: Recipe, gate: Gate) -> None:
    if options.json:
        raise UserError("--json: --dry-run shows the settings as YAML; leave out one of the two")
    # Imported here, so that --help and a misspelled field are answered at once.
    with silent_interrupts():
        from ..dry_run import show

    show(recipe, options.command, full=options.full, baseline=gate.baseline)


def _run_stages(options: argparse.Namespace, recipe: Recipe, gate: Gate) -> None:
    # Imported here, so that --help and a misspelled field are answered at once.
    with silent_interrupts():
        from .. import commands
        from ..attempts import record_failure
        from ..interrupt import terminable

    gate_error = None
    try:
        # SIGTERM raises like Ctrl-C, so that `finally` blocks release the storage and remove unfinished files.
        with terminable(), redirected_output(options):
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
