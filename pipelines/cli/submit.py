"""`submit [COMMAND] RECIPE [section.field=value ...] --address URL`: a command as a job on a running Ray cluster."""

import argparse
import json

from pos2distill.environment import use_ray_token
from pos2distill.startup import silent_interrupts

from .command_parsers import OF_RUNNING, CommandParsers
from .gate_options import add_gate, read_gate
from .output_options import add_output_options, redirected_output
from .recipe_commands import JOB_WORDS_HELP
from .submitted_command import check_gate_options, split_command

_DESCRIPTION = """Run a command as a job on a running Ray cluster through its job API, and follow its log until it ends.

The job gets this project's code, recipes and examples, and your own recipe if you name one. Secrets, data, results and
environments are not uploaded. Therefore runtime.storage must be a URL, or the absolute path of a folder that all nodes
share, and so must data and models outside examples/. The nodes need the packages of requirements/.

Run the same command again to follow a job that is still running, or, if it has ended, to resume it in a new job.
Ctrl-C stops following the job, not the job itself. For a cluster with token authentication, set RAY_AUTH_TOKEN or
RAY_AUTH_TOKEN_PATH.
"""


def add_submit(commands: CommandParsers) -> None:
    """Add the command to the command line."""
    command = commands.add(
        "submit",
        _run,
        "run a command as a job on a running Ray cluster and follow its log; exits with the job's exit code",
        description=_DESCRIPTION,
        examples=(
            "submit nq_mistral_7b data.path=s3://bucket/nq.jsonl.gz runtime.storage=s3://bucket/runs/nq "
            "--address http://127.0.0.1:8265",
        ),
        ending=OF_RUNNING,
        takes_settings=True,
    )
    command.add_argument("words", nargs="+", metavar="WORD", help=JOB_WORDS_HELP)
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
    add_output_options(command)
    add_gate(command)


def _run(options: argparse.Namespace) -> int:
    command, words = split_command("submit", options.words)
    gate = read_gate(options)
    check_gate_options(gate, command)
    # Before the import of ray: Ray 2.60 reads its authentication mode when it is imported.
    use_ray_token()
    with silent_interrupts():
        from ..interrupt import terminable
        from ..jobs.submit import run_submit

    # SIGTERM raises like Ctrl-C, so that the job is left with a line.
    with terminable(), redirected_output(options):
        submitted = run_submit(
            command, words[0], words[1:], options.address, gate, allow_plain_http=options.allow_plain_http
        )
    if options.json:
        print(json.dumps(submitted.summary(), ensure_ascii=False))
    return submitted.exit_code
