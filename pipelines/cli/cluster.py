"""`cluster ACTION SPEC [[COMMAND] RECIPE] [section.field=value ...] [spec.section.field=value ...]`: KubeRay."""

import argparse
import importlib
import json

from pos2distill.config.gate import NO_GATE
from pos2distill.errors import UserError
from pos2distill.startup import silent_interrupts

from .command_parsers import OF_KUBERNETES, CommandParsers
from .gate_options import add_gate, read_gate
from .output_options import add_output_options, redirected_output
from .recipe_commands import JOB_WORDS_HELP
from .submitted_command import check_gate_options, split_command

_DESCRIPTION = """Run a study or another command on Kubernetes with KubeRay, from a cluster spec (docs/cluster.md).

  render     print the manifests: of a job if a recipe is given, else of a cluster
  validate   report the first error in a spec, or every error in a file of manifests
  submit     create the job with kubectl and follow it: status changes, log, exit code (1 failed, 3 stopped or deleted)
  status     print the state of the job and its pods, and what pending pods wait for
  logs       print the job's log so far
  delete     delete the job or the cluster, and everything that was created with it; results stay in the storage

A spec of your own begins as a copy of a preset: cp cluster/presets/gke.yaml my_cluster.yaml
The job runs `study RECIPE`, or the COMMAND before the recipe; with `evaluate`, the gate options below are possible.
RECIPE may be your own file, which a ConfigMap brings to the cluster.
If the job is already running, submit only follows it. If it has ended, submit deletes it and creates it again; the new
job resumes from the storage. Ctrl-C stops following the job, not the job itself.
The Kubernetes cluster is the one of kubectl's current context.
"""
_EXAMPLES = (
    "cluster submit my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl runtime.trainers.workers=8",
    "cluster submit my_cluster.yaml evaluate nq_mistral_7b data.path=gs://b/nq.jsonl --fail-if-gap-above 5",
    "cluster validate my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl --crds crds/",
    "cluster render my_cluster.yaml spec.sampling.max=16 --out manifests",
    "cluster status my_cluster.yaml --json",
    "cluster logs my_cluster.yaml",
    "cluster delete my_cluster.yaml",
)
_ACTIONS = ("render", "validate", "submit", "status", "logs", "delete")
_RENDERING = ("render", "validate", "submit")  # the actions that take a job's command
# The actions that take these options. The output of those without --json or --quiet is a manifest or a log.
_ACTIONS_OF_OPTIONS = {
    "json": ("submit", "status", "validate"),
    "quiet": ("submit", "validate", "delete"),
    "out": ("render",),
    "crds": _RENDERING,
    "server": _RENDERING,
}


def add_cluster(commands: CommandParsers) -> None:
    """Add the command to the command line."""
    command = commands.add(
        "cluster",
        _run,
        "run a study on Kubernetes with KubeRay: render, validate and submit manifests (docs/cluster.md)",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        ending=OF_KUBERNETES,
        takes_settings=True,
    )
    command.add_argument("action", choices=_ACTIONS)
    command.add_argument("spec", metavar="SPEC", help="name of a preset or path of a YAML file with a cluster spec")
    command.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="WORD",
        help=f"{JOB_WORDS_HELP}; for the spec: spec.section.field=value",
    )
    command.add_argument(
        "--out", metavar="FOLDER", help="for render: write the manifests to FOLDER/NAME.yaml instead of printing them"
    )
    checking = ", ".join(_RENDERING)
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
    add_output_options(command)
    add_gate(command)


def _run(options: argparse.Namespace) -> int:
    _check_options(options)
    job_command, words, gate = "study", options.words, read_gate(options)
    if options.action in _RENDERING:
        job_command, words = split_command(f"cluster {options.action}", words, needs_recipe=False)
        check_gate_options(gate, job_command)
    elif gate != NO_GATE:
        option = next(iter(gate.given()))
        raise UserError(f"{option}: is an option of cluster {', '.join(_RENDERING)}, not of {options.action}")
    # `cluster` is beside this package: in a checkout both are top-level packages, in a wheel both are in pos2distill.
    parent = (__package__ or "").removesuffix("pipelines.cli")
    with silent_interrupts():
        from ..interrupt import terminable

        command = importlib.import_module(f"{parent}cluster.command")
    # SIGTERM raises like Ctrl-C, so that the process that shows the job's log ends too.
    with terminable(), redirected_output(options):
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


def _check_options(options: argparse.Namespace) -> None:
    """Reject options of other actions.

    Raises:
        UserError: naming the option.
    """
    for name, actions in _ACTIONS_OF_OPTIONS.items():
        is_given = getattr(options, name) not in (None, False)
        if is_given and options.action not in actions:
            raise UserError(f"--{name}: is an option of cluster {', '.join(actions)}, not of {options.action}")
