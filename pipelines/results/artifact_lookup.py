"""Finished artifacts of any run, found by their folder alone: no recipe, data set or model is needed."""

import contextlib
import os
import sys
from collections.abc import Sequence

import fsspec
from pydantic import ValidationError

from pos2distill.config import Study
from pos2distill.config.load import validate_evaluated
from pos2distill.errors import UserError, did_you_mean_one, no_such_folder, warn
from pos2distill.literal_paths import last_part, list_matching, require_listable
from pos2distill.store.artifacts import MANIFEST, Artifact
from pos2distill.store.checkpoint_layout import MODEL_CARD, MODEL_FOLDER
from pos2distill.store.storage import RUN_FILE
from pos2distill.urls import open_url, storage_errors

from ..provenance import UNFINISHED_FILE, Provenance, corrupt_provenance, read_provenance
from ..stages.made_from import is_from_earlier_checkpoint


def list_artifacts(
    storage: str, names: Sequence[str], task: str | None = None, *, unfinished: bool = False
) -> list[Artifact]:
    """The finished artifacts of these names in a storage, the newest first; those of unknown date come last.

    Among those of the same moment, the first name comes first.

    Args:
        task: one of `evaluation.also_evaluate`. Default: the main task.
        unfinished: also samples that a run has stored without finishing them, after all that are finished.
    """
    fs, root = open_url(storage, "RUN")
    found = []
    finished = [path.rsplit("/", 2)[-2] for path in list_matching(fs, root, f"*/{MANIFEST}")]
    folders = [*finished]
    if unfinished:
        # The file can be left in a folder that was finished since.
        marked = [path.rsplit("/", 2)[-2] for path in list_matching(fs, root, f"*/{UNFINISHED_FILE}")]
        folders += [folder for folder in marked if folder not in finished]
    for folder in folders:
        name = folder.rpartition("-")[0]
        if name in names:
            artifact = Artifact.in_folder(storage, folder)
            provenance = read_provenance(artifact)
            if (provenance.task if provenance else None) == task:
                order = (folder in finished, provenance.date if provenance else "", -names.index(name))
                found.append((order, artifact))
    return [artifact for _, artifact in sorted(found, key=lambda each: each[0], reverse=True)]


def open_folder(folder: str, name: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a folder that the user named, and the path in it. There may be no such folder.

    Args:
        name: the name of the argument, for the message.
    Raises:
        UserError: for an empty name, or a folder that may not be read.
    """
    if not folder.strip():  # fsspec takes it for the working directory
        raise UserError(f"{name}: is empty; expected a folder")
    fs, path = open_url(folder.rstrip("/") or folder, name)
    with storage_errors(folder, name):
        require_listable(fs, path)
    return fs, path


def artifact_at(url: str) -> Artifact:
    """The artifact in this folder, which may be relative to the working directory."""
    storage, _, folder = url.rstrip("/").rpartition("/")
    return Artifact.in_folder(storage or ".", folder)


def open_artifact(
    run: str,
    kinds: Sequence[Sequence[str]],
    task: str | None = None,
    *,
    unfinished: bool = False,
    newest: bool = True,
) -> Artifact:
    """The artifact at a path, or the newest one in a run's storage, of the first kind of which there are any.

    Of several of the same name, such as those of a sweep, the one that is taken is printed on stderr. So is a warning
    of answers of a model that has been trained again since.

    Args:
        kinds: each by the names of its artifacts.
        task, unfinished: see `list_artifacts`.
        newest: False to reject a storage with several of the same name.
    Raises:
        UserError: if there is neither, or there are several.
    """
    run = run.rstrip("/") or run
    names = [name for kind in kinds for name in kind]
    fs, path = open_folder(run, "RUN")
    with storage_errors(run, "RUN"):
        if fs.exists(f"{path}/{MANIFEST}") or (unfinished and fs.exists(f"{path}/{UNFINISHED_FILE}")):
            artifact = artifact_at(run)
            if artifact.name not in names:
                folders = " or ".join(f"{name}-FINGERPRINT" for name in names)
                raise UserError(f"{run}: expected a folder named {folders}")
            _warn_if_outdated(artifact)
            return artifact
        if not fs.exists(f"{path}/{RUN_FILE}"):
            if not fs.exists(path):
                raise UserError(no_such_run(run))
            raise UserError(
                f"{run}: is neither the storage of a run nor one of its artifacts{_run_near(fs, path, names[0])}"
            )
        for kind in kinds:
            found = list_artifacts(run, kind, task, unfinished=unfinished)
            if found:
                found = _of_last_rounds(found)
                _require_one(run, found, newest=newest)
                _warn_if_outdated(found[0])
                return found[0]
    of_task = "" if task is None else f" of the task {task!r} (evaluation.also_evaluate)"
    raise UserError(f"{run}: holds no finished {' or '.join(names)}{of_task}")


def _of_last_rounds(artifacts: Sequence[Artifact]) -> list[Artifact]:
    """The artifacts of the first one's name, without checkpoints that a later round of training began with.

    Such a checkpoint stays if it is a study's result too, as in a sweep over `method.rounds`: then it has a model card.
    """
    students = set()
    for artifact in artifacts:
        provenance = read_provenance(artifact)
        students.add(provenance.inputs.get("student") if provenance else None)
    return [
        each
        for each in artifacts
        if each.name == artifacts[0].name
        and (each.folder not in students or each.fs.exists(f"{each.path}/{MODEL_FOLDER}/{MODEL_CARD}"))
    ]


def _require_one(run: str, artifacts: Sequence[Artifact], *, newest: bool) -> None:
    """Say which of several artifacts of a storage is taken, or refuse to take one."""
    if len(artifacts) < 2:
        return
    if newest:
        # Finished ones come first.
        finished = " finished" if artifacts[0].is_finished else ""
        note = f"the newest{finished} one of {len(artifacts)} in {run}; name a folder for another"
        print(f"{artifacts[0].url}: {note}", file=sys.stderr)
        return
    found = f"found {len(artifacts)} in it, the newest first: {', '.join(each.folder for each in artifacts)}"
    raise UserError(f"{run}: expected the folder of one {artifacts[0].name}, {found}")


def _warn_if_outdated(artifact: Artifact) -> None:
    """Warn of answers of a model that has been trained again since."""
    # A corrupt record must not keep anyone from looking at the artifact.
    with contextlib.suppress(UserError):
        provenance = read_provenance(artifact)
        folder = provenance.inputs.get("checkpoint") if provenance else None
        if provenance is None or folder is None:
            return
        if is_from_earlier_checkpoint(artifact, Artifact.in_folder(artifact.storage, folder)):
            command = "evaluate" if provenance.task is None else "study"
            warn(
                f"{artifact.url}: is of an earlier {folder}, which has been trained again since; run `{command}` again"
            )


def no_such_run(run: str) -> str:
    """A message on a run's folder that is missing: often the folder around it, `runs`, was left out."""
    if os.path.isdir(os.path.join("runs", run)):
        return f"{os.path.abspath(run)}: no such folder; did you mean 'runs/{run}'?"
    return no_such_folder(run, "folder")


def _run_near(fs: fsspec.AbstractFileSystem, path: str, name: str) -> str:
    """For a message: the run that a folder, such as a report's, is in, or the artifact in it that is probably meant."""
    storage = path.rpartition("/")[0]
    if fs.exists(f"{storage}/{RUN_FILE}"):
        return f"; its run is {storage}"
    if list_matching(fs, path, f"*/{RUN_FILE}"):
        return "; `runs` lists the runs in it"
    folders = [last_part(str(each)) for each in fs.ls(path, detail=False)] if fs.isdir(path) else []
    return did_you_mean_one(name, folders)


def provenance_of(artifact: Artifact) -> Provenance:
    """How an artifact was made.

    Raises:
        UserError: if that was not recorded, as where a process was killed at the end of the stage.
    """
    provenance = read_provenance(artifact)
    if provenance is None or not provenance.inputs:
        raise UserError(f"{artifact.url}: how it was made is not recorded; make it again")
    return provenance


def input_artifact(artifact: Artifact, name: str) -> Artifact:
    """An artifact that another one was made from."""
    inputs = provenance_of(artifact).inputs
    if name not in inputs:
        raise corrupt_provenance(artifact.url)
    return Artifact.in_folder(artifact.storage, inputs[name])


def study_of(artifact: Artifact) -> Study:
    """The settings that made an artifact, of the main task or of another one."""
    settings = provenance_of(artifact).settings
    # The section `analysis` is left out where a study has none.
    sections = {name: settings[name] for name in Study.model_fields if name in settings}
    try:
        return validate_evaluated(sections)
    except ValidationError:
        raise corrupt_provenance(artifact.url) from None
