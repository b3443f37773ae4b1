"""`push RUN OWNER/NAME`: a run's checkpoint on the Hugging Face hub."""

import argparse
import json

from ..command_parsers import OF_READING, CommandParsers

_DESCRIPTION = """Upload the checkpoint of a run and its model card to the Hugging Face hub. If it was trained with
training.lora, the adapter alone is also uploaded, to the folder `adapter` of the repository.

Log in with `hf auth login`, or set HF_TOKEN. Run the same command again to continue an interrupted upload.
"""


def add_push(commands: CommandParsers) -> None:
    """Add the command to the command line."""
    push = commands.add(
        "push",
        _run,
        "upload a run's checkpoint and its model card to the Hugging Face hub",
        description=_DESCRIPTION,
        examples=("push runs/my-study my-name/my-model --private",),
        ending=OF_READING,
    )
    push.add_argument("run", metavar="RUN", help="the storage of a run, or its folder checkpoint-FINGERPRINT")
    push.add_argument(
        "repository",
        metavar="OWNER/NAME",
        help="repository on the hub, created if it does not exist; an earlier model's weights and adapters are deleted",
    )
    push.add_argument(
        "--private", action="store_true", help="create a private repository; an existing public one is an error"
    )
    push.add_argument("--dry-run", action="store_true", help="list the files and their sizes, and ask no hub")
    push.add_argument("--json", action="store_true", help="print the result as JSON")


def _run(options: argparse.Namespace) -> int:
    from ...results.hub import files_to_push, push_checkpoint

    if not options.dry_run:
        url = push_checkpoint(options.run, options.repository, private=options.private)
        print(json.dumps({"url": url}) if options.json else url)
        return 0
    files = files_to_push(options.run, options.repository)
    if options.json:
        print(json.dumps({"files": files}))
        return 0
    for name, size in files.items():
        print(f"{size / 1e6:12,.3f} MB  {name}")
    print(f"{sum(files.values()) / 1e6:12,.3f} MB  in {len(files)} files, to {options.repository}")
    return 0
