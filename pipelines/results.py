"""Finished results of any run, found by their folder alone: no recipe, data set or model is needed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import pydantic

from pos2distill.errors import UserError, did_you_mean_one, no_such_folder
from pos2distill.evaluation.scores import Curve, Grid, to_grid
from pos2distill.literal_paths import list_matching
from pos2distill.store.artifacts import RUN_FILE, Artifact
from pos2distill.urls import open_url, require_listable, storage_errors

from .provenance import UNFINISHED_FILE, Provenance, corrupt_provenance, read_provenance
from .stages.answers import PREDICTIONS, read_refused

_EVALUATION = "evaluation"  # the folder of the results of `evaluate`


def list_artifacts(
    storage: str, names: Sequence[str], task: str | None = None, *, unfinished: bool = False
) -> list[Artifact]:
    """The finished artifacts of these names in a storage, the newest first; those of unknown date come last.

    Of those of the same moment, the first name comes first.

    Args:
        task: one of `evaluation.also_evaluate`. Default: the main task.
        unfinished: also samples that a run has stored without finishing them, after all that are finished.
    """
    fs, root = open_url(storage, "RUN")
    found = []
    finished = [path.rsplit("/", 2)[-2] for path in list_matching(fs, root, "*/manifest.json")]
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
        name: of the argument, for the message.
    Raises:
        UserError: for an empty name, or a folder that may not be read.
    """
    if not folder.strip():  # fsspec takes it for the working directory
        raise UserError(f"{name}: is empty; expected a folder")
    fs, path = open_url(folder.rstrip("/") or folder, name)
    with storage_errors(folder, name):
        require_listable(fs, path)
    return fs, path


def open_artifact(
    run: str, kinds: Sequence[Sequence[str]], task: str | None = None, *, unfinished: bool = False
) -> Artifact:
    """The artifact at a path, or the newest one in a run's storage, of the first kind of which there are any.

    Args:
        kinds: each by the names of its artifacts. task, unfinished: as of `list_artifacts`.
    Raises:
        UserError: if there is neither.
    """
    run = run.rstrip("/") or run
    names = [name for kind in kinds for name in kind]
    fs, path = open_folder(run, "RUN")
    with storage_errors(run, "RUN"):
        if fs.exists(f"{path}/manifest.json") or (unfinished and fs.exists(f"{path}/{UNFINISHED_FILE}")):
            storage, _, folder = run.rpartition("/")
            artifact = Artifact.in_folder(storage or ".", folder)
            if artifact.name not in names:
                raise UserError(f"{run}: is no folder of answers; expected one named {', '.join(names)}-FINGERPRINT")
            return artifact
        if not fs.exists(f"{path}/{RUN_FILE}"):
            if not fs.exists(path):
                raise UserError(no_such_folder(run, "folder"))
            raise UserError(
                f"{run}: is neither the storage of a run nor one of its artifacts{_run_near(fs, path, names[0])}"
            )
        for kind in kinds:
            found = list_artifacts(run, kind, task, unfinished=unfinished)
            if found:
                return found[0]
    of_task = "" if task is None else f" of the task {task!r} (evaluation.also_evaluate)"
    raise UserError(f"{run}: holds no finished {' or '.join(names)}{of_task}")


def _run_near(fs: fsspec.AbstractFileSystem, path: str, name: str) -> str:
    """For a message: the run that a folder, such as a report's, is in, or the artifact in it that is probably meant."""
    storage = path.rpartition("/")[0]
    if fs.exists(f"{storage}/{RUN_FILE}"):
        return f"; its run is {storage}"
    folders = [str(each).rsplit("/", 1)[-1] for each in fs.ls(path, detail=False)] if fs.isdir(path) else []
    return did_you_mean_one(name, folders)


def provenance_of(artifact: Artifact) -> Provenance:
    """How an artifact was made.

    Raises:
        UserError: if it was made by a version that did not record it.
    """
    provenance = read_provenance(artifact)
    if provenance is None or not provenance.inputs:
        raise UserError(f"{artifact.url}: does not say how it was made; it is of an earlier version, make it again")
    return provenance


def input_artifact(artifact: Artifact, name: str) -> Artifact:
    """An artifact that another one was made from."""
    inputs = provenance_of(artifact).inputs
    if name not in inputs:
        raise corrupt_provenance(artifact)
    return Artifact.in_folder(artifact.storage, inputs[name])


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What the report of a study, or the results of `evaluate`, say of what is listed and compared.

    folder: of the report or the results. curves: of the models `base` and `distilled`, of which an evaluation may have
    the first one only; artifacts: the folders of their answers. model: the path of the base model. method: `none` if
    the base model alone was evaluated. inference: the method that all answered with. bootstrap: the settings of
    intervals.
    """

    folder: str
    name: str
    fingerprint: str
    date: str
    method: str
    inference: str
    model: str
    dataset: str
    curves: dict[str, Curve]
    artifacts: dict[str, str]
    bootstrap: dict[str, int]

    def read_grid(self, model: str) -> Grid:
        """The answers of a model, at the prompt length of its curve."""
        artifact = Artifact.in_folder(_parent(self.folder), self.artifacts[model])
        refused = read_refused(artifact)["example_id"].to_pylist()
        return to_grid(artifact.read_table(PREDICTIONS), self.curves[model].documents, refused)


_RUN_SUMMARY = pydantic.TypeAdapter(RunSummary)


def read_summaries(folder: str) -> dict[str, dict[str, Any]]:
    """Content of `summary.json` by its folder: of all reports in a run's storage, or of all runs in a folder.

    Of a run without a report, of the results of `evaluate`.

    Raises:
        UserError: if there is no such folder, it may not be read, or one of the files is corrupt.
    """
    fs, root = open_folder(folder, "FOLDER")
    with storage_errors(folder, "FOLDER"):
        if fs.isfile(root):
            raise UserError(f"{folder}: is a file; expected a folder of runs, or the storage of one run")
        if not fs.isdir(root):
            raise UserError(f"{folder}: no such folder; expected a folder of runs, or the storage of one run")
        storages = "" if fs.exists(f"{root}/{RUN_FILE}") else "*/"
        reports = [_parent(path) for path in list_matching(fs, root, f"{storages}report*/summary.json")]
        reported = {_parent(report) for report in reports}
        evaluations = [_parent(path) for path in list_matching(fs, root, f"{storages}{_EVALUATION}*/summary.json")]
        unreported = [evaluation for evaluation in evaluations if _parent(evaluation) not in reported]
        return {found: _read_summary(fs, found) for found in sorted(reports + unreported)}


def is_complete(summary: Mapping[str, Any]) -> bool:
    """Whether it is of one study or evaluation, by a version that recorded what is listed; a sweep has no curve."""
    return "base" in summary and "made_with" in summary and ("artifacts" in summary or _is_evaluation(summary))


def read_run_summary(run: str) -> RunSummary:
    """The report of a run's storage, or the report in a folder; without a report, the results of `evaluate`.

    Raises:
        UserError: if there is none, it is corrupt, or it is that of a sweep.
    """
    fs, path = open_folder(run, "RUN")
    with storage_errors(run, "RUN"):
        if not fs.exists(path):
            raise UserError(no_such_folder(run, "folder"))
        storage = run.rstrip("/")
        for folder in (storage, f"{storage}/report", f"{storage}/{_EVALUATION}"):
            fs, path = open_url(folder, "RUN")
            if not fs.exists(f"{path}/summary.json"):
                continue
            summary = _read_summary(fs, path)
            if "base" not in summary:
                raise UserError(f"{run}: is the report of a sweep; expected that of one study")
            if not is_complete(summary):
                command = _command(folder)
                kind = "an evaluation" if command == "evaluate" else "a report"
                raise UserError(f"{run}: is {kind} of an earlier version; make it again with `{command}`")
            return to_run_summary(folder, summary)
    raise UserError(
        f"{run}: holds no report and no results of `evaluate`; expected a run's storage or a folder report-FINGERPRINT"
    )


def summary_of(artifact: Artifact) -> str | None:
    """The folder of the summary that an artifact with answers belongs to: a report, or results of `evaluate`."""
    fs, root = open_url(artifact.storage, "RUN")
    for folder in ("report", _EVALUATION):
        if fs.exists(f"{root}/{folder}/summary.json"):
            summary = _read_summary(fs, f"{root}/{folder}")
            if is_complete(summary) and artifact.folder in to_run_summary(folder, summary).artifacts.values():
                return f"{artifact.storage}/{folder}"
    return None


def to_run_summary(folder: str, summary: Mapping[str, Any]) -> RunSummary:
    """The content of a `summary.json`.

    Raises:
        UserError: if values are missing or are no such values.
    """
    try:
        settings = summary["settings"]
        values = {
            "folder": folder,
            "name": summary["name"],
            "date": summary["made_with"].get("date", ""),
            "bootstrap": {name: settings["evaluation"][name] for name in ("bootstrap_samples", "seed")},
            # A report of an earlier version has no such section.
            "inference": settings.get("inference", {}).get("method", "none"),
        }
        if _is_evaluation(summary):
            models = [model for model in ("base", "distilled") if model in summary]
            last = models[-1]
            values |= {
                "fingerprint": summary[last]["fingerprint"],
                "method": settings["method"]["name"] if last == "distilled" else "none",
                "model": summary["base"]["model"],
                "dataset": summary["base"]["dataset"],
                "curves": {model: summary[model]["curves"][0] for model in models},
                "artifacts": {model: f"{model}-scores-{summary[model]['fingerprint']}" for model in models},
            }
        else:
            values |= {name: summary[name] for name in ("fingerprint", "method", "dataset", "artifacts")}
            values["model"] = settings["model"]["path"]
            values["curves"] = {model: summary[model] for model in ("base", "distilled")}
        return _RUN_SUMMARY.validate_python(values)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise _corrupt_summary(folder) from None


def _is_evaluation(summary: Mapping[str, Any]) -> bool:
    """Whether it is of `evaluate`, which writes all curves of a model at once."""
    base = summary["base"]
    return isinstance(base, dict) and "curves" in base


def _read_summary(fs: fsspec.AbstractFileSystem, folder: str) -> dict[str, Any]:
    """The content of a folder's `summary.json`: an object with a name."""
    try:
        summary = json.loads(fs.cat_file(f"{folder}/summary.json"))
    except ValueError:
        raise _corrupt_summary(folder) from None
    if not isinstance(summary, dict) or "name" not in summary:
        raise _corrupt_summary(folder)
    return summary


def _corrupt_summary(folder: str) -> UserError:
    command = _command(folder)
    return UserError(
        f"{folder}/summary.json: corrupt; expected what `{command}` writes; run `{command}` for this run to make it "
        f"again, or delete {folder}"
    )


def _command(folder: str) -> str:
    """The command that writes a folder."""
    return "evaluate" if folder.rpartition("/")[2].startswith(_EVALUATION) else "report"


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
