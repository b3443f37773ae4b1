"""Finished results of any run, found by their folder alone: no recipe, data set or model is needed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pydantic

from pos2distill.errors import UserError, did_you_mean
from pos2distill.evaluation.scores import Curve
from pos2distill.store.artifacts import RUN_FILE, Artifact
from pos2distill.urls import open_url, storage_errors

from .provenance import Provenance, corrupt_provenance, read_provenance
from .stages.evaluate import PREDICTIONS


def list_artifacts(storage: str, names: Sequence[str]) -> list[Artifact]:
    """The finished artifacts of these names in a storage, the newest first; those of unknown date come last.

    Not those of other tasks (`evaluation.also_evaluate`), whose settings are in recipes of their own.
    """
    fs, root = open_url(storage, "RUN")
    found = []
    for path in fs.glob(f"{root}/*/manifest.json"):
        name, _, fingerprint = str(path).rsplit("/", 2)[-2].rpartition("-")
        if name in names:
            artifact = Artifact(storage, name, fingerprint)
            provenance = read_provenance(artifact)
            if provenance is None or not of_other_task(provenance):
                found.append(artifact)
    return sorted(found, key=_date, reverse=True)


def of_other_task(provenance: Provenance) -> bool:
    """Whether an artifact is of one of the tasks that `evaluation.also_evaluate` names."""
    return ": " in provenance.stage


def _date(artifact: Artifact) -> str:
    provenance = read_provenance(artifact)
    return provenance.date if provenance else ""


def open_artifact(run: str, names: Sequence[str]) -> Artifact:
    """The artifact at a path, or the newest one of these names in a run's storage, the first name before the others.

    Raises:
        UserError: if there is neither.
    """
    run = run.rstrip("/")
    with storage_errors(run, "RUN"):
        fs, path = open_url(run, "RUN")
        if fs.exists(f"{path}/manifest.json"):
            storage, _, folder = run.rpartition("/")
            name, _, fingerprint = folder.rpartition("-")
            if name not in names:
                raise UserError(f"{run}: is no folder of answers; expected one named {', '.join(names)}-FINGERPRINT")
            return Artifact(storage or ".", name, fingerprint)
        if not fs.exists(f"{path}/{RUN_FILE}"):
            folders = [str(each).rsplit("/", 1)[-1] for each in fs.ls(path, detail=False)] if fs.isdir(path) else []
            hint = did_you_mean(names[0], folders) if folders else ""
            raise UserError(f"{run}: is neither the storage of a run nor one of its artifacts{hint}")
        for name in names:
            found = list_artifacts(run, [name])
            if found:
                return found[0]
    raise UserError(f"{run}: holds no finished {' or '.join(names)}")


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
    folder = inputs[name]
    input_name, _, fingerprint = folder.rpartition("-")
    return Artifact(artifact.url.rpartition("/")[0], input_name, fingerprint)


@dataclass(frozen=True, slots=True)
class StudySummary:
    """What the report of a study says, of what is listed and compared.

    report: its folder. models: the curves of the models `base` and `distilled`; artifacts: the folders of their
    answers. model: the path of the base model. bootstrap: the settings of intervals.
    """

    report: str
    name: str
    fingerprint: str
    date: str
    method: str
    model: str
    dataset: str
    curves: dict[str, Curve]
    artifacts: dict[str, str]
    bootstrap: dict[str, int]

    def read_predictions(self, model: str) -> pa.Table:
        """The answers of a model."""
        name, _, fingerprint = self.artifacts[model].rpartition("-")
        return Artifact(self.report.rpartition("/")[0], name, fingerprint).read_table(PREDICTIONS)


_STUDY_SUMMARY = pydantic.TypeAdapter(StudySummary)


def read_reports(folder: str) -> dict[str, dict[str, Any]]:
    """The reports in a run's storage, or of all runs in a folder: `summary.json` by the report's folder.

    Raises:
        UserError: if there is no such folder, or a report is corrupt.
    """
    with storage_errors(folder, "FOLDER"):
        fs, root = open_url(folder.rstrip("/"), "FOLDER")
        if not fs.isdir(root):
            raise UserError(f"{folder}: no such folder; expected a folder of runs, or the storage of one run")
        pattern = (
            f"{root}/report*/summary.json" if fs.exists(f"{root}/{RUN_FILE}") else f"{root}/*/report*/summary.json"
        )
        reports = [str(path).rpartition("/")[0] for path in sorted(fs.glob(pattern))]
        return {report: _read_summary(fs, report) for report in reports}


def is_study_summary(summary: Mapping[str, Any]) -> bool:
    """Whether a report is of one study, by a version that recorded what is listed; that of a sweep has no curve."""
    return all(name in summary for name in ("base", "made_with", "artifacts"))


def read_study_summary(run: str) -> StudySummary:
    """The report of a run's storage, or the report in a folder.

    Raises:
        UserError: if there is none, it is corrupt, or it is that of a sweep.
    """
    with storage_errors(run, "RUN"):
        for folder in (run.rstrip("/"), f"{run.rstrip('/')}/report"):
            fs, path = open_url(folder, "RUN")
            if not fs.exists(f"{path}/summary.json"):
                continue
            summary = _read_summary(fs, path)
            if "base" not in summary:
                raise UserError(f"{run}: is the report of a sweep; expected that of one study")
            if not is_study_summary(summary):
                raise UserError(f"{run}: is a report of an earlier version; make it again with `report`")
            return to_study_summary(folder, summary)
    raise UserError(f"{run}: holds no report; expected a run's storage or a folder report-FINGERPRINT")


def to_study_summary(report: str, summary: Mapping[str, Any]) -> StudySummary:
    """The content of a report's `summary.json`.

    Raises:
        UserError: if values are missing or are no such values.
    """
    try:
        settings = summary["settings"]
        values = {
            "report": report,
            "date": summary["made_with"].get("date", ""),
            "model": settings["model"]["path"],
            "curves": {model: summary[model] for model in ("base", "distilled")},
            "bootstrap": {name: settings["evaluation"][name] for name in ("bootstrap_samples", "seed")},
        }
        values |= {name: summary[name] for name in ("name", "fingerprint", "method", "dataset", "artifacts")}
        return _STUDY_SUMMARY.validate_python(values)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _corrupt_summary(report) from None


def _read_summary(fs: fsspec.AbstractFileSystem, report: str) -> dict[str, Any]:
    """The content of a report's `summary.json`: an object with a name."""
    try:
        summary = json.loads(fs.cat_file(f"{report}/summary.json"))
    except ValueError:
        raise _corrupt_summary(report) from None
    if not isinstance(summary, dict) or "name" not in summary:
        raise _corrupt_summary(report)
    return summary


def _corrupt_summary(report: str) -> UserError:
    return UserError(
        f"{report}/summary.json: corrupt; expected the summary of a report; run `report` with the recipe of the run to "
        f"make it again, or delete {report}"
    )
