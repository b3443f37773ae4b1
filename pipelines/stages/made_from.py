"""Which results of earlier stages an artifact was made from, so that it is not used with others.

A fingerprint covers the inputs' fingerprints, not their bytes: a checkpoint that was deleted and trained again has the
same one, but other weights, and the answers of the first one are not its answers.
"""

from typing import Any

from pos2distill.errors import UserError

from ..artifact_names import CHECKPOINT, SAMPLES
from .stage import Input, Stage

_FILE = "made_from.json"

# What a stage takes from the manifest of an input, by the input's name. Other inputs (prepared examples) are the same
# however often they are made, or are allowed to change: a corrupt part of the samples is sampled again.
_TAKEN = {"slot": "slots", "scales": "scales", "curve": "curve", "checkpoint": "id", "student": "id"}

# Made of GPU hours, so that only people delete them.
_KEPT = (SAMPLES, CHECKPOINT)


def record_inputs(stage: Stage) -> None:
    """Write down what an artifact is made from, before anything else is written to it."""
    taken = {name: _value(name, each) for name, each in stage.inputs.items() if name in _TAKEN}
    artifact = stage.artifact
    if taken and not artifact.fs.exists(f"{artifact.path}/{_FILE}"):
        artifact.fs.makedirs(artifact.path, exist_ok=True)
        artifact.write_json(_FILE, taken)


def is_current(stage: Stage) -> bool:
    """Whether the artifact is finished, and made from the results that are there now."""
    return stage.artifact.is_finished and changed_input(stage) is None


def changed_input(stage: Stage) -> Input | None:
    """The input that was made again with another result after the artifact was begun, or is about to be.

    An artifact without a record is taken to be made from what is there.
    """
    if not any(name in _TAKEN for name in stage.inputs):
        return None
    artifact = stage.artifact
    if not artifact.fs.exists(f"{artifact.path}/{_FILE}"):
        return None
    recorded = artifact.read_json(_FILE)
    for name, each in stage.inputs.items():
        # A model that is trained again is another one; what is measured again is usually the same.
        if not each.artifact.is_finished:
            is_other = _TAKEN.get(name) == "id"
        else:
            is_other = name in _TAKEN and recorded.get(name) != _value(name, each)
        if is_other:
            return each
    return None


def reject_changed_input(stage: Stage) -> None:
    """Reject samples or a checkpoint that were made from a result that is not there any more.

    Raises:
        UserError: with what to delete.
    """
    changed = changed_input(stage)
    if changed is not None and stage.artifact.name in _KEPT:
        raise UserError(
            f"{stage.artifact.url}: made from an earlier {changed.artifact.folder}, which has been deleted or "
            f"replaced; delete this too, and run again to make it again"
        )


def _value(name: str, each: Input) -> Any:
    return each.details().get(_TAKEN[name])
