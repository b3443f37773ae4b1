"""The commands and their options, as the command line takes them."""

import argparse
import functools
import sys
from pathlib import Path

from pos2distill import __version__

from .argument_parser import OneLineParser
from .browse import add_browsing
from .gate_options import add_gate
from .help_texts import CLUSTER, CLUSTER_EXAMPLES, COMMAND_HELP, SUBMIT, WORDS_HELP, examples
from .model_options import add_model_options

RENDERING = ("render", "validate", "submit")
"""The actions of `cluster` that take a job's command."""


def build_parser() -> OneLineParser:
    """The parser of all commands, with the parser of each in `commands`."""
    parser = OneLineParser(
        prog=_program(),
        description="Reduce the position bias of a language model: distill its best document slot into all others.",
        epilog=_as_typed(examples()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pos2distill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMAND_HELP.items():
        command = _add_command(commands, name, text, text)
        nargs = "?" if name == "evaluate" else None
        command.add_argument(
            "recipe", nargs=nargs, metavar="RECIPE", help="name of a recipe (see `recipes`) or path of a YAML file"
        )
        command.add_argument(
            "overrides", nargs="*", default=[], metavar="section.field=value", help="settings of the recipe to change"
        )
        _add_output(command)
        command.add_argument(
            "--dry-run", action="store_true", help="check everything, print the settings and what would run, and exit"
        )
        command.add_argument(
            "--full", action="store_true", help="with --dry-run: also print settings that have their default value"
        )
    add_model_options(commands.choices["evaluate"])
    add_gate(commands.choices["evaluate"])
    add_browsing(functools.partial(_add_command, commands))
    _add_submit(commands)
    _add_cluster(commands)
    text = "list the recipes that come with the project, or print one to begin your own from"
    recipes = _add_command(commands, "recipes", text, text)
    recipes.add_argument("name", nargs="?", metavar="NAME", help="print this recipe's file instead of the list")
    recipes.add_argument("--json", action="store_true", help="print the list as JSON")
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
    command.add_argument("--quiet", action="store_true", help="print only warnings and errors")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object at the end, and everything else to stderr"
    )


def _add_submit(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    text = "run a command as a job on a running Ray cluster and follow its log; exits with the job's exit code"
    command = _add_command(commands, "submit", text, SUBMIT)
    command.add_argument("words", nargs="+", metavar="WORD", help=WORDS_HELP)
    command.add_argument(
        "--address",
        required=True,
        metavar="URL",
        help="URL of the cluster's dashboard, for example http://127.0.0.1:8265",
    )
    command.add_argument(
        "--allow-plain-http",
        action="store_true",
        help="allow sending the token to another machine over http, without encryption",
    )
    _add_output(command)
    add_gate(command)


def _add_cluster(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    text = "run a study on Kubernetes with KubeRay: render, validate and submit manifests (docs/cluster.md)"
    command = _add_command(commands, "cluster", text, CLUSTER, epilog=CLUSTER_EXAMPLES)
    command.add_argument("action", choices=["render", "validate", "submit", "status", "logs", "delete"])
    command.add_argument("spec", metavar="SPEC", help="name of a preset or path of a YAML file with a cluster spec")
    command.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="WORD",
        help=f"{WORDS_HELP}; for the spec: spec.section.field=value",
    )
    command.add_argument(
        "--out", metavar="FOLDER", help="for render: write the manifests to FOLDER/NAME.yaml instead of printing them"
    )
    checking = ", ".join(RENDERING)
    command.add_argument(
        "--crds",
        metavar="PATH",
        help=f"for {checking}: file or folder with KubeRay's CRDs, to also check manifests against their schemas",
    )
    command.add_argument(
        "--server",
        action="store_true",
        help=f"for {checking}: also let the cluster check the manifests (kubectl apply --dry-run=server)",
    )
    _add_output(command)
    add_gate(command)
