"""Which results of earlier stages an artifact was made from, so that it is not used with others.

A fingerprint covers the inputs' fingerprints, not their bytes: a checkpoint that was deleted and trained again has the
same one, but other weights, and the answers of the first one are not its answers.
"""

import contextlib
import json
from typing import Any

from pos2distill.errors import UserError

from ..artifact_names import CHECKPOINT, SAMPLES
from .evaluate import slot_of_rank
from .stage import Input, Stage

RECORD = "made_from.json"

# Inputs that are models: one that is trained again is another one.
_MODELS = ("checkpoint", "student")
# What is measured again is usually the same. Inputs that are not named here are the same however often they are made
# (prepared examples), or may change (a corrupt part of the samples is sampled again).
_MEASURED = ("slot", "scales", "curve")

# Made of GPU hours, so that only people delete them.
_NEVER_DISCARDED = (SAMPLES, CHECKPOINT)


def record_inputs(stage: Stage) -> None:
    """Write down what an artifact is made from, before anything else is written to it.

    Nothing is recorded of a finished one, of which only corrupt parts are made again.
    """
    artifact = stage.artifact
    recorded = [name for name in stage.inputs if name in (*_MODELS, *_MEASURED)]
    if not recorded or artifact.is_finished or artifact.fs.exists(f"{artifact.path}/{RECORD}"):
        return
    artifact.fs.makedirs(artifact.path, exist_ok=True)
    artifact.write_json(RECORD, {name: _taken_from(stage, name) for name in recorded})


def is_current(stage: Stage) -> bool:
    """Whether the artifact is finished, and made from the results that are there now."""
    return stage.artifact.is_finished and changed_input(stage) is None


def changed_input(stage: Stage) -> Input | None:
    """The input that was made again with another result after the artifact was begun, or is about to be.

    An artifact without a record is taken to be made from what is there.
    """
    recorded = _read_record(stage)
    for name, each in stage.inputs.items():
        if name in recorded and _differs(stage, name, recorded[name]):
            return each
    return None


def reject_changed_input(stage: Stage) -> None:
    """Reject samples or a checkpoint that were made from a result that is not there any more.

    Raises:
        UserError: with what to delete.
    """
    if stage.artifact.name not in _NEVER_DISCARDED:
        return
    changed = changed_input(stage)
    if changed is not None:
        raise UserError(
            f"{stage.artifact.url}: made from an earlier {changed.artifact.folder}, which has been deleted or "
            f"replaced; delete this too, and run again to make it again"
        )


def _differs(stage: Stage, name: str, recorded: Any) -> bool:
    if not stage.inputs[name].artifact.is_finished:
        return name in _MODELS
    return bool(recorded != _taken_from(stage, name))


def _taken_from(stage: Stage, name: str) -> Any:
    """What the stage takes from an input that could be another one when it is made again."""
    taken = stage.inputs[name]
    if name in _MODELS:
        return taken.details().get("id")  # none of a checkpoint of an earlier version
    if name == "slot":
        return taken.details("slots")["slots"]
    if name == "scales":
        return taken.details("scales")["scales"]
    return {str(documents): list(slot_of_rank(taken, documents)) for documents in stage.study.prompt_lengths}


def _read_record(stage: Stage) -> dict[str, Any]:
    """The record of an artifact; empty without one.

    Raises:
        UserError: if it is corrupt.
    """
    artifact = stage.artifact
    with contextlib.suppress(ValueError, RecursionError):
        try:
            record = json.loads(artifact.fs.cat_file(f"{artifact.path}/{RECORD}"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        if isinstance(record, dict):
            return record
    raise UserError(f"{artifact.url}/{RECORD}: corrupt; delete this file and run again: all else is kept")
