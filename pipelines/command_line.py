"""The command line: `python run.py`, `python -m pos2distill`, and `pos2distill` where it is installed.

COMMAND RECIPE [section.field=value ...] [--dry-run]
submit [COMMAND] RECIPE [section.field=value ...] --address URL
cluster ACTION SPEC [RECIPE] [section.field=value ...] [spec.section.field=value ...]
"""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from pos2distill import __version__
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe, recipe_names
from pos2distill.environment import use_ray_token
from pos2distill.errors import GateError, Stopped, Terminated, UserError, did_you_mean

COMMANDS = {
    "study": "the whole chain: evaluate, sample, distil, evaluate again, report; finished stages are skipped",
    "evaluate": "accuracy at every slot, of the base model and of the checkpoint if there is one",
    "sample": "advantaged responses into the sample store, with the teacher's hidden states",
    "distill": "train on the stored samples; with runtime.mode=streamed, sample what is missing at the same time",
    "report": "the HTML page and summary.json, from finished results",
}

EXAMPLES = """examples:
  python run.py recipes
  python run.py study quickstart
  python run.py study quickstart --dry-run
  python run.py study quickstart training.learning_rate=5e-4 runtime.storage=/tmp/slow
  python run.py evaluate quickstart --fail-if-gap-above 5
  python run.py study my_recipe.yaml model.engine=vllm runtime.trainers.workers=2
  python run.py evaluate nq_mistral_7b data.path=s3://bucket/nq-open-20_total_documents_gold_at_0.jsonl.gz
  python run.py submit nq_mistral_7b data.path=s3://bucket/nq.jsonl.gz runtime.storage=s3://bucket/runs/nq --address http://127.0.0.1:8265
  python run.py cluster submit my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl runtime.trainers.workers=8

The same command resumes an interrupted run, and does nothing if everything is finished.
Exit codes: 0 success; 1 a gate that failed (one line), or a bug (with its traceback); 2 a user error (one line);
3 a job that was stopped by someone else; 130 or 143 ended by Ctrl-C or SIGTERM.
"""

SUBMIT = """Run a command as a job on a running Ray cluster, through its job API, and follow its log until it ends.

It uploads this project's code, recipes and examples, and a recipe of your own; secrets, data, results and
environments stay here. So runtime.storage must be a URL, or the absolute path of a folder that all nodes share; the
same is true of data and models outside examples/. The nodes need the packages of requirements/.

Submitting again follows a job that still runs; if it has ended, a new job resumes where it stopped. Ctrl-C stops
following, not the job. For a cluster with token authentication set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
"""

CLUSTER = """A study on Kubernetes by KubeRay, from a cluster spec (docs/cluster.md).

  render     print the manifests: of a job if a recipe is given, else of a cluster
  validate   report every error of a spec, or of a file of manifests
  submit     apply the job with kubectl and follow it: changes, log, exit code (1 failed, 3 stopped or deleted)
  status     the state of the job and its pods, and what pending pods wait for
  logs       the job's log so far
  delete     delete the job or the cluster, and everything that was created with it; results stay in the storage

submit follows a job that already runs. A job that has ended is deleted and applied again: it resumes from its storage.
Ctrl-C stops following, not the job. The Kubernetes cluster is that of kubectl's current context.
"""

CLUSTER_EXAMPLES = """examples:
  cp cluster/presets/gke.yaml my_cluster.yaml
  python run.py cluster validate my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl --crds crds/
  python run.py cluster render my_cluster.yaml spec.sampling.max=16 --out manifests
  python run.py cluster submit my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl runtime.trainers.workers=8
  python run.py cluster status my_cluster.yaml
  python run.py cluster logs my_cluster.yaml
  python run.py cluster delete my_cluster.yaml

Exit codes: 0 success; 1 the job failed; 2 a user error (one line); 3 the job was stopped or deleted by someone else;
130 ended by Ctrl-C.
"""


def main(arguments: list[str] | None = None) -> int:
    """Parse, load the recipe, run the command. Returns the exit code."""
    parser = _parser()
    # Overrides may precede and follow options; argparse alone takes them in one place only.
    options, remaining = parser.parse_known_args(arguments)
    _refuse_unknown(parser, options, remaining)
    try:
        return _run(options, remaining)
    except GateError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Stopped, KeyboardInterrupt) as stop:
        # Stopped and Terminated know their signal. A plain KeyboardInterrupt is Ctrl-C: 128 + SIGINT.
        reason = str(stop) or "interrupted"
        print(f"{reason}; run the same command again to continue", file=sys.stderr)
        return stop.exit_code if isinstance(stop, Stopped | Terminated) else 130


def _refuse_unknown(parser: argparse.ArgumentParser, options: argparse.Namespace, remaining: list[str]) -> None:
    """End the program if a word is neither an option nor an override."""
    # A left-over word without a dash is an override, except for `recipes`, which takes no settings.
    unknown = [word for word in remaining if word.startswith("-") or options.command == "recipes"]
    if not unknown:
        return
    hint = ""
    if options.command == "cluster" and "--dry-run" in unknown:
        hint = "; cluster render and validate send nothing"
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _run(options: argparse.Namespace, remaining: list[str]) -> int:
    if options.command == "recipes":
        _list_recipes()
        return 0
    if options.command == "cluster":
        return _run_cluster(options, [*options.words, *remaining])
    if options.command == "submit":
        return _run_submit(options, [*options.words, *remaining])
    recipe = load_recipe(options.recipe, [*options.overrides, *remaining])
    if options.dry_run:
        _show(recipe, options.command)
        return 0
    _run_command(options, recipe)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(),
        description="Reduce the position bias of a language model: distil its best document slot into all the others.",
        epilog=_as_typed(EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pos2distill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = _add_command(commands, name, text, text, EXAMPLES)
        command.add_argument("recipe", metavar="RECIPE", help="a name (see `recipes`) or the path of a YAML file")
        command.add_argument(
            "overrides", nargs="*", default=[], metavar="section.field=value", help="settings to change"
        )
        command.add_argument("--dry-run", action="store_true", help="show the settings and what would run, then stop")
    _add_gate(commands.choices["evaluate"])
    _add_submit(commands)
    _add_cluster(commands)
    commands.add_parser("recipes", help="list the recipes that come with the project")
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    description: str,
    examples: str,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=_as_typed(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _program() -> str:
    """How the program was started."""
    # Help and examples show a command that the reader can copy.
    is_installed_command = Path(sys.argv[0]).name == "pos2distill"
    return "pos2distill" if is_installed_command else "python run.py"


def _as_typed(examples: str) -> str:
    return examples.replace("python run.py", _program())


def _percentage_points(text: str) -> float:
    """A GAP in percentage points."""
    with contextlib.suppress(ValueError):
        points = float(text)
        if 0 <= points <= 100:
            return points
    raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {text}")


def _add_gate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--fail-if-gap-above",
        type=_percentage_points,
        metavar="POINTS",
        help="evaluate: exit 1 with one line if the GAP (of the checkpoint, or without one of the model) is larger",
    )


def _add_submit(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run a command as a job on a running Ray cluster; follow its log to its end and exit code"
    command = _add_command(commands, "submit", text, SUBMIT, EXAMPLES)
    command.add_argument(
        "words",
        nargs="+",
        metavar="[COMMAND] RECIPE or setting",
        help=f"{', '.join(COMMANDS)} (study if left out); a recipe; section.field=value",
    )
    command.add_argument(
        "--address", required=True, metavar="URL", help="of the cluster's dashboard, for example http://127.0.0.1:8265"
    )
    _add_gate(command)


def _add_cluster(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "a study on Kubernetes by KubeRay: render, validate and submit manifests (docs/cluster.md)"
    command = _add_command(commands, "cluster", text, CLUSTER, CLUSTER_EXAMPLES)
    command.add_argument("action", choices=["render", "validate", "submit", "status", "logs", "delete"])
    command.add_argument("spec", metavar="SPEC", help="a preset's name, or the path of a YAML file")
    command.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="RECIPE or setting",
        help="section.field=value, spec.section.field=value",
    )
    command.add_argument("--out", metavar="FOLDER", help="render: write FOLDER/NAME.yaml instead of printing")
    command.add_argument("--crds", metavar="PATH", help="file or folder with KubeRay's CRDs, to check the schema too")


def _run_submit(options: argparse.Namespace, words: list[str]) -> int:
    first = words[0]
    # The command may be left out, so a misspelt one would be read as a recipe and the recipe as a setting.
    if first not in COMMANDS and words[1:] and (words[1] in recipe_names() or Path(words[1]).is_file()):
        raise UserError(f"submit: {first}: no such command{did_you_mean(first, COMMANDS)}")
    command = words.pop(0) if first in COMMANDS else "study"
    if not words or "=" in words[0]:
        raise UserError("submit: expected [COMMAND] RECIPE [section.field=value ...]; the recipe is missing")
    flags = []
    if options.fail_if_gap_above is not None:
        if command != "evaluate":
            raise UserError(f"--fail-if-gap-above: is an option of evaluate, not of {command}")
        flags.append(f"--fail-if-gap-above={options.fail_if_gap_above:g}")
    # Before the import of ray: Ray 2.60 reads its authentication mode when it is imported.
    use_ray_token()
    from .jobs.submit import run_submit

    return run_submit(command, words[0], words[1:], options.address, flags)


def _run_cluster(options: argparse.Namespace, words: list[str]) -> int:
    # `cluster` is beside this package: in a checkout both are top-level packages, in a wheel both are in pos2distill.
    parent = (__package__ or "").removesuffix("pipelines")
    command = importlib.import_module(f"{parent}cluster.command")
    exit_code: int = command.run_cluster(options.action, options.spec, words, out=options.out, crds=options.crds)
    return exit_code


def _run_command(options: argparse.Namespace, recipe: Recipe) -> None:
    # Imported here, so that --help and a misspelt field are answered at once.
    from . import commands
    from .interrupt import terminable

    functions: dict[str, Callable[..., None]] = {
        "study": commands.run_study,
        "evaluate": commands.run_evaluate,
        "sample": commands.run_sample,
        "distill": commands.run_distill,
        "report": commands.run_report,
    }
    arguments = {}
    if options.command == "evaluate":
        arguments["fail_if_gap_above"] = options.fail_if_gap_above
    # SIGTERM raises like Ctrl-C, so that `finally` blocks release the storage and remove unfinished files.
    with terminable():
        functions[options.command](recipe, **arguments)


def _list_recipes() -> None:
    names = recipe_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {load_recipe(name).description}")


def _show(recipe: Recipe, command: str) -> None:
    from .commands import describe

    settings = {"name": recipe.name, "description": recipe.description, **recipe.study.model_dump(mode="json")}
    if recipe.sweep:
        settings["sweep"] = {name: list(values) for name, values in recipe.sweep.items()}
    settings["runtime"] = recipe.runtime.model_dump(mode="json")
    # Unsorted, so that the sections are in the order in which recipes have them.
    print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")
    print(describe(recipe, command))
