"""Which results of earlier stages an artifact was made from, so that it is not used with others.

A fingerprint covers the inputs' fingerprints, not their bytes: a checkpoint that was deleted and trained again has the
same one, but other weights, and the answers of the first one are not its answers.
"""

import contextlib
import json
from collections.abc import Collection, Sequence
from typing import Any

from pos2distill.errors import UserError
from pos2distill.literal_paths import last_part, make_folder
from pos2distill.store.artifacts import Artifact
from pos2distill.store.files import read_if_any

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
    make_folder(artifact.fs, artifact.path)
    artifact.write_json(RECORD, {name: _taken_from(stage, name) for name in recorded})


def is_current(stage: Stage) -> bool:
    """Whether the artifact is finished, and made from the results that are there now."""
    return stage.artifact.is_finished and changed_input(stage) is None


def changed_input(stage: Stage) -> Input | None:
    """The first input whose result has changed since the artifact was begun, or is about to; None if none has."""
    return _changed(stage, (*_MODELS, *_MEASURED))


def _changed(stage: Stage, names: Collection[str]) -> Input | None:
    """The first of these inputs that was made again with another result."""
    if not any(name in stage.inputs for name in names):
        return None
    recorded = _read_record(stage.artifact, of_model=any(name in stage.inputs for name in _MODELS))
    if recorded is None:
        if not _is_begun(stage.artifact):
            return None
        # Written by a version that recorded nothing, whose checkpoints had no id. What it measured is taken to be what
        # is there.
        recorded = dict.fromkeys(_MODELS)
    for name in names:
        if name in stage.inputs and name in recorded and _differs(stage, name, recorded[name]):
            return stage.inputs[name]
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
        raise UserError(f"{_made_from_earlier(stage, changed)}; delete this too, and run again to make it again")


def _is_begun(artifact: Artifact) -> bool:
    """Whether anything is stored: a folder may be empty, or have what is left of a record that was not finished."""
    try:
        found = artifact.fs.ls(artifact.path, detail=False)
    except FileNotFoundError:
        return False
    return any(not last_part(path).startswith(RECORD) for path in found)


def require_unchanged_measurements(checkpoint: Stage, stages: Sequence[Stage]) -> None:
    """Reject a finished checkpoint whose slot or scales are missing, or were measured again with another result.

    Args:
        stages: those of a command that uses the checkpoint, and may measure what is missing.
    Raises:
        UserError: with what to do.
    """
    if not checkpoint.artifact.is_finished:
        return
    made = [stage.artifact.url for stage in stages]
    for name in _MEASURED:
        measured = checkpoint.inputs.get(name)
        if measured is not None and not measured.artifact.is_finished and measured.artifact.url not in made:
            raise UserError(
                f"{measured.artifact.url}: missing, but {checkpoint.artifact.folder} was trained with it; run `study` "
                f"to measure it again"
            )
    changed = _changed(checkpoint, _MEASURED)
    if changed is not None:
        raise UserError(f"{_made_from_earlier(checkpoint, changed)}; delete this too, and run `study` to train again")


def _made_from_earlier(stage: Stage, changed: Input) -> str:
    return f"{stage.artifact.url}: made from an earlier {changed.artifact.folder}, which has been deleted or replaced"


def is_from_earlier_checkpoint(answers: Artifact, checkpoint: Artifact) -> bool:
    """Whether answers or an analysis are not of the checkpoint that is there now; False if there is none."""
    record = _read_record(answers, of_model=True)
    if record is None or "checkpoint" not in record:
        return False
    manifest = checkpoint.manifest()
    return manifest is not None and record["checkpoint"] != manifest.details.get("id")


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


def _read_record(artifact: Artifact, *, of_model: bool) -> dict[str, Any] | None:
    """The record of an artifact, if there is one.

    Args:
        of_model: whether a model is among the inputs. Without the record, it is not known of which one the artifact is.

    Raises:
        UserError: if it is corrupt.
    """
    content = read_if_any(artifact.fs, f"{artifact.path}/{RECORD}")
    if content is None:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(content)
        if isinstance(record, dict):
            return record
    remedy = f"delete {artifact.url} and run again to make it again" if of_model else "delete this file and run again"
    raise UserError(f"{artifact.url}/{RECORD}: corrupt; {remedy}")
