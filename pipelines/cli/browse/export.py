"""`export RUN FOLDER`: the questions of a run for lm-evaluation-harness."""

import argparse
import json
import shlex
from pathlib import Path

from pos2distill.errors import warn

from ..command_parsers import OF_READING, CommandParsers

_DESCRIPTION = """Write the questions of a run as tasks of lm-evaluation-harness: one task for each position, and a
group for each prompt length.

  run.py export runs/quickstart tasks
  lm_eval --include_path tasks --tasks pos2distill_quickstart_30_documents --model hf --model_args pretrained=MODEL \\
    --log_samples --output_path answers
  run.py compare runs/quickstart answers

The prompts are formatted with the chat template of the run's model, so MODEL should be of the same kind.
"""


def add_export(commands: CommandParsers) -> None:
    """Add the command to the command line."""
    export = commands.add(
        "export",
        _run,
        "write the questions of a run as tasks of lm-evaluation-harness",
        description=_DESCRIPTION,
        examples=("export runs/quickstart tasks",),
        ending=OF_READING,
    )
    export.add_argument("run", metavar="RUN", help="the storage of a run, or one of its folders …-scores-FINGERPRINT")
    export.add_argument("folder", metavar="FOLDER", type=Path, help="output folder, which must be new or empty")
    export.add_argument("--json", action="store_true", help="print the result as JSON")


def _run(options: argparse.Namespace) -> int:
    from ...results.lm_eval import export_tasks

    export = export_tasks(options.run, options.folder)
    if export.caveat:
        warn(export.caveat)
    if options.json:
        print(json.dumps({"groups": export.groups}))
        return 0
    for group, tasks in export.groups.items():
        print(f"{options.folder}: group {group}, {len(tasks)} tasks")
    names = ",".join(export.groups)
    folder = shlex.quote(str(options.folder))
    print(
        f"lm_eval --include_path {folder} --tasks {names} --model hf --model_args pretrained=MODEL --log_samples "
        f"--output_path answers"
    )
    if export.compared_with is None:
        print("compare needs a report of this study alone: run `report` with its recipe, 'sweep={}' and its settings")
    else:
        print(f"python run.py compare {shlex.quote(export.compared_with)} answers")
    return 0
