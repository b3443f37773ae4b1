"""Pos2Distill on the command line.

python run.py COMMAND RECIPE [section.field=value ...] [--dry-run]
python run.py submit [COMMAND] RECIPE [section.field=value ...] --address URL
python run.py cluster ACTION SPEC [RECIPE] [section.field=value ...] [spec.section.field=value ...]
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe, recipe_names
from pos2distill.errors import GateError, Stopped, Terminated, UserError, did_you_mean

COMMANDS = {
    "study": "the whole chain: measure, sample, distil, measure again, report; finished stages are skipped",
    "evaluate": "accuracy at every slot, of the base model and of the checkpoint if there is one",
    "sample": "advantaged responses into the sample store, with the teacher's hidden states",
    "distill": "train on the samples that are there; with runtime.mode=streamed, sample meanwhile what is missing",
    "report": "the HTML page and summary.json, from results that are there",
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

Running a command again goes on where it stopped, and does nothing where all is done.
Exit codes: 0 done; 1 a gate not passed (one line), or a bug (with its traceback); 2 something you can mend (one line
says what); 3 a job that somebody stopped; 130 or 143 ended by Ctrl-C or SIGTERM.
"""

SUBMIT = """Run a command as a job on a running Ray cluster, through its job API, and follow its log to its end.

This project's code, recipes and examples go with the job, and a recipe of your own; secrets, data, results and
environments stay here. So runtime.storage must be a URL, or the absolute path of a folder that all nodes share; so must
data and models, if they are not below examples/. The nodes must have the packages of requirements/.

Submitting again follows the job if it still runs; if it has ended, a new job goes on where it stopped. Ctrl-C stops
following, not the job. A cluster with token authentication is given RAY_AUTH_TOKEN, or the file of RAY_AUTH_TOKEN_PATH.
"""

CLUSTER = """A study on Kubernetes by KubeRay, from a cluster spec (docs/cluster.md).

  render     print the manifests: with a recipe a job, without one a cluster
  validate   tell every fault of a spec, or of a file of manifests
  submit     apply the job with kubectl and follow it: changes, log, exit code (1 failed, 3 stopped or deleted)
  status     how the job stands, its pods and what they wait for
  logs       the job's log so far
  delete     take away the job or the cluster, and all that was made with it; results stay in the storage

submit follows a job that runs already. One that ended is taken away and applied again: it goes on from its storage.
Ctrl-C stops following, not the job. kubectl's current context says which Kubernetes it is.
"""

CLUSTER_EXAMPLES = """examples:
  cp cluster/presets/gke.yaml my_cluster.yaml
  python run.py cluster validate my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl --crds crds/
  python run.py cluster render my_cluster.yaml spec.sampling.max=16 --out manifests
  python run.py cluster submit my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl runtime.trainers.workers=8
  python run.py cluster status my_cluster.yaml
  python run.py cluster logs my_cluster.yaml
  python run.py cluster delete my_cluster.yaml

Exit codes: 0 done; 1 the job failed; 2 something you can mend (one line says what); 3 a job that somebody stopped or
deleted; 130 left by Ctrl-C.
"""


def main(arguments: list[str] | None = None) -> int:
    """Parse, load the recipe, run the command. Returns the exit code."""
    parser = _parser()
    # Overrides may stand before and after options; argparse alone takes them in one place.
    options, further = parser.parse_known_args(arguments)
    if unknown := [word for word in further if word.startswith("-") or options.command == "recipes"]:
        hint = "; cluster render and validate send nothing" if options.command == "cluster" else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint if '--dry-run' in unknown else ''}")
    try:
        if options.command == "recipes":
            _list_recipes()
            return 0
        if options.command in ("cluster", "submit"):
            run = _cluster if options.command == "cluster" else _submit
            return run(options, [*options.words, *further])
        recipe = load_recipe(options.recipe, [*options.overrides, *further])
        if options.dry_run:
            _show(recipe, options.command)
        else:
            gate = {"fail_if_gap_above": options.fail_if_gap_above} if options.command == "evaluate" else {}
            _work(_command(options.command), recipe, **gate)
    except GateError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Stopped, KeyboardInterrupt) as stop:
        print(f"{str(stop) or 'interrupted'}; run the same command again to go on", file=sys.stderr)
        return stop.exit_code if isinstance(stop, Stopped | Terminated) else 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Cure the position bias of a language model: distil its best document slot into all the others.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name, help=text, description=text, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
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


def _points(text: str) -> float:
    """A GAP in points of 100."""
    with contextlib.suppress(ValueError):
        if 0 <= (points := float(text)) <= 100:
            return points
    raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {text}")


def _add_gate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--fail-if-gap-above",
        type=_points,
        metavar="POINTS",
        help="evaluate: exit 1 with one line if the GAP (of the checkpoint, or without one of the model) is larger",
    )


def _add_submit(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run a command as a job on a running Ray cluster; follow its log to its end and exit code"
    command = commands.add_parser(
        "submit", help=text, description=SUBMIT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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


def _submit(options: argparse.Namespace, words: list[str]) -> int:
    if words[0] not in COMMANDS and words[1:] and (words[1] in recipe_names() or Path(words[1]).is_file()):
        raise UserError(f"submit: {words[0]}: no such command{did_you_mean(words[0], COMMANDS)}")
    command = words.pop(0) if words[0] in COMMANDS else "study"
    if not words or "=" in words[0]:
        raise UserError("submit: expected [COMMAND] RECIPE [section.field=value ...]; the recipe is missing")
    gate = options.fail_if_gap_above
    if gate is not None and command != "evaluate":
        raise UserError(f"--fail-if-gap-above: belongs to evaluate, not to {command}")
    # Read when Ray is imported; who gives a token wants it used.
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    from pipelines.jobs.submit import run_submit

    flags = [] if gate is None else [f"--fail-if-gap-above={gate:g}"]
    return run_submit(command, words[0], words[1:], options.address, flags)


def _add_cluster(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "a study on Kubernetes by KubeRay: manifests made, checked, submitted (docs/cluster.md)"
    command = commands.add_parser(
        "cluster",
        help=text,
        description=CLUSTER,
        epilog=CLUSTER_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("action", choices=["render", "validate", "submit", "status", "logs", "delete"])
    command.add_argument("spec", metavar="SPEC", help="an example's name, or the path of a YAML file")
    command.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="RECIPE or setting",
        help="section.field=value, spec.section.field=value",
    )
    command.add_argument("--out", metavar="FOLDER", help="render: write FOLDER/NAME.yaml instead of printing")
    command.add_argument("--crds", metavar="PATH", help="file or folder with KubeRay's CRDs, to check the schema too")


def _cluster(options: argparse.Namespace, words: list[str]) -> int:
    from cluster.command import run_cluster

    return run_cluster(options.action, options.spec, words, out=options.out, crds=options.crds)


def _command(name: str) -> Callable[..., None]:
    # Imported here, so that --help and a misspelt field answer at once.
    from pipelines import commands as study

    return {
        "study": study.run_study,
        "evaluate": study.run_evaluate,
        "sample": study.run_sample,
        "distill": study.run_distill,
        "report": study.run_report,
    }[name]


def _work(command: Callable[..., None], recipe: Recipe, **gate: float | None) -> None:
    from pipelines.interrupt import terminable

    with terminable():
        command(recipe, **gate)


def _list_recipes() -> None:
    names = recipe_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {load_recipe(name).description}")


def _show(recipe: Recipe, command: str) -> None:
    from pipelines.commands import describe

    shown = {"name": recipe.name, "description": recipe.description, **recipe.study.model_dump(mode="json")}
    if recipe.sweep:
        shown["sweep"] = {name: list(values) for name, values in recipe.sweep.items()}
    shown["runtime"] = recipe.runtime.model_dump(mode="json")
    print(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True), end="")
    print(describe(recipe, command))


if __name__ == "__main__":
    sys.exit(main())
