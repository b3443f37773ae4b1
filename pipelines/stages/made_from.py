"""Which results of earlier stages an artifact was made from, so that it is not used with others.

A fingerprint covers the inputs' fingerprints, not their bytes: a checkpoint that was deleted and trained again has the
same one, but other weights, and the answers of the first one are not its answers.
"""

import json
from typing import Any

from pos2distill.errors import UserError

from ..artifact_names import CHECKPOINT, SAMPLES
from .evaluate import slot_of_rank
from .stage import Input, Stage

RECORD = "made_from.json"

# Inputs that are models: one that is trained again is another one. What is measured again (the slot, the scales, the
# curve) is usually the same. Other inputs are the same however often they are made (prepared examples), or may change
# (a corrupt part of the samples is sampled again).
_MODELS = ("checkpoint", "student")

# Made of GPU hours, so that only people delete them.
_NEVER_DISCARDED = (SAMPLES, CHECKPOINT)


def record_inputs(stage: Stage) -> None:
    """Write down what an artifact is made from, before anything else is written to it."""
    artifact, taken = stage.artifact, {}
    for name, each in stage.inputs.items():
        value = _taken_from(stage, name, each)
        if value is not None:
            taken[name] = value
    if taken and not artifact.fs.exists(f"{artifact.path}/{RECORD}"):
        artifact.fs.makedirs(artifact.path, exist_ok=True)
        artifact.write_json(RECORD, taken)


def is_current(stage: Stage) -> bool:
    """Whether the artifact is finished, and made from the results that are there now."""
    return stage.artifact.is_finished and changed_input(stage) is None


def changed_input(stage: Stage) -> Input | None:
    """The input that was made again with another result after the artifact was begun, or is about to be.

    An artifact without a record is taken to be made from what is there.
    """
    recorded = _read_record(stage)
    for name, each in stage.inputs.items():
        if name in recorded and _differs(stage, name, each, recorded[name]):
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


def _differs(stage: Stage, name: str, each: Input, recorded: Any) -> bool:
    if not each.artifact.is_finished:
        return name in _MODELS
    return bool(recorded != _taken_from(stage, name, each))


def _taken_from(stage: Stage, name: str, each: Input) -> Any:
    """What the stage takes from an input that could be another one when it is made again; None for other inputs."""
    if name in _MODELS:
        return each.details().get("id")
    if name == "slot":
        return each.details("slots")["slots"]
    if name == "scales":
        return each.details("scales")["scales"]
    if name == "curve":
        return {str(documents): list(slot_of_rank(each, documents)) for documents in stage.study.prompt_lengths}
    return None


def _read_record(stage: Stage) -> dict[str, Any]:
    """The record of an artifact; empty without one.

    Raises:
        UserError: if it is corrupt.
    """
    artifact = stage.artifact
    path = f"{artifact.path}/{RECORD}"
    if not artifact.fs.exists(path):
        return {}
    try:
        record = json.loads(artifact.fs.cat_file(path))
        if isinstance(record, dict):
            return record
    except (ValueError, RecursionError):
        pass
    raise UserError(f"{artifact.url}/{RECORD}: corrupt; delete this file and run again: all else is kept")
