"""What `summary.json` says of a finished run: the report of a study, or the results of `evaluate`."""

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import numpy as np
import pydantic

from pos2distill.errors import UserError
from pos2distill.evaluation.scores import Curve, Grid, to_grid
from pos2distill.literal_paths import last_part, list_matching
from pos2distill.store.artifacts import MANIFEST, Artifact
from pos2distill.store.lease_file import named_holder
from pos2distill.store.storage import RUN_FILE, run_name
from pos2distill.urls import as_url, open_url, storage_errors

from ..artifact_names import SCORES
from ..stages.predictions import read_predictions, read_refused
from .artifact_lookup import artifact_at, no_such_run, open_folder
from .folders import EVALUATION_FOLDER, MODELS, REPORT_FOLDER, SUMMARY


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What the report of a study, or the results of `evaluate`, say of what is listed and compared.

    Attributes:
        folder: that of the report or the results.
        curves: those of the models `base` and `distilled`, of which an evaluation may have the first one only.
        artifacts: the folders of their answers.
        model: the path of the base model, absolute if it is a folder, so that it is the same however it was typed.
        method: `none` if the base model alone was evaluated.
        inference: the method that all answered with.
        scales: those that were given to it; none if they were searched.
        search: the strategy of the search, if they were.
        bootstrap: the settings of intervals.
        question_settings: must be equal where answers are compared question by question; see the function.
    """

    folder: str
    name: str
    fingerprint: str
    date: str
    method: str
    inference: str
    scales: list[float]
    search: str | None
    model: str
    dataset: str
    curves: dict[str, Curve]
    artifacts: dict[str, str]
    bootstrap: dict[str, int]
    question_settings: dict[str, str]

    def answers(self, model: str) -> Artifact:
        """The answers of a model."""
        return Artifact.in_folder(_parent(self.folder), self.artifacts[model])

    def read_grid(self, model: str) -> Grid:
        """The answers of a model, at the prompt length of its curve.

        Raises:
            UserError: if these answers are not those of its curve.
        """
        artifact = self.answers(model)
        refused = read_refused(artifact)["example_id"].to_pylist()
        curve = self.curves[model]
        grid = to_grid(read_predictions(artifact), curve.documents, refused)
        accuracy_S = grid.correct_ES.mean(0)
        if len(accuracy_S) != len(curve.accuracy_by_slot) or not np.allclose(accuracy_S, curve.accuracy_by_slot):
            command = "evaluate" if _command(self.folder) == "evaluate" else "study"
            raise UserError(
                f"{self.folder}: shows earlier answers than those of {artifact.folder}, which have been made again "
                f"since; run `{command}` for this run again"
            )
        return grid


_RUN_SUMMARY = pydantic.TypeAdapter(RunSummary)


def question_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings of the data that make a question of one id another task: its documents, and what counts as correct.

    Without the path, of which there may be copies, and without the wording, which may be what is compared.
    """
    return {name: settings["data"][name] for name in ("format", "distractors", "metric")}


def read_summaries(folder: str) -> dict[str, dict[str, Any] | UserError]:
    """The contents of `summary.json`, by folder: all reports in a run's storage, or all runs in a folder.

    Results of `evaluate` too, unless a report shows the same answers. Of a corrupt file, what is wrong with it.

    Raises:
        UserError: if there is no such folder, or it may not be read.
    """
    fs, root = open_folder(folder, "FOLDER")
    with storage_errors(folder, "FOLDER"):
        if fs.isfile(root):
            raise UserError(f"{folder}: is a file; expected a folder of runs, or the storage of one run")
        if not fs.isdir(root):
            raise UserError(f"{folder}: no such folder; expected a folder of runs, or the storage of one run")
        if fs.exists(f"{root}/{SUMMARY}"):  # the folder of one report
            return {as_url(fs, root): _summary_or_error(fs, as_url(fs, root))}
        storages = "" if fs.exists(f"{root}/{RUN_FILE}") else "*/"
        reports, evaluations = (
            [_parent(as_url(fs, path)) for path in list_matching(fs, root, f"{storages}{name}*/{SUMMARY}")]
            for name in (REPORT_FOLDER, EVALUATION_FOLDER)
        )
        summaries = {found: _summary_or_error(fs, found) for found in sorted(reports + evaluations)}
    shown: dict[str, set[_ShownAnswers]] = {}
    for report in reports:
        shown.setdefault(_parent(report), set()).update(_answers_shown(report, summaries[report]))
    for evaluation in evaluations:
        answers = _answers_shown(evaluation, summaries[evaluation])
        if answers and answers <= shown.get(_parent(evaluation), set()):
            del summaries[evaluation]
    return summaries


_ShownAnswers = tuple[str, tuple[float, ...]]
"""The folder of a model's answers, and their accuracy by slot: those of a model that is trained again have the same
folder."""


def _answers_shown(folder: str, summary: Mapping[str, Any] | UserError) -> set[_ShownAnswers]:
    """The answers that a summary shows; none of one that cannot be read, or of a sweep."""
    if isinstance(summary, UserError) or not is_complete(summary):
        return set()
    with contextlib.suppress(UserError):
        run = to_run_summary(folder, summary)
        return {(run.artifacts[model], curve.accuracy_by_slot) for model, curve in run.curves.items()}
    return set()


def _summary_or_error(fs: fsspec.AbstractFileSystem, folder: str) -> dict[str, Any] | UserError:
    """The content of a folder's `summary.json`, or what is wrong with it, which must not hide the other runs."""
    try:
        return _read_summary(fs, folder)
    except UserError as error:
        return error


def find_runs_below(folder: str) -> str | None:
    """A folder of runs in a folder that has none itself."""
    fs, root = open_folder(folder, "FOLDER")
    with storage_errors(folder, "FOLDER"):
        found = list_matching(fs, root, f"*/*/{RUN_FILE}")
    return f"{folder.rstrip('/')}/{found[0].split('/')[-3]}" if found else None


@dataclass(frozen=True, slots=True)
class UnreportedRun:
    """A run that has no results for people yet.

    Attributes:
        name: that of its recipe.
        finished: the folders of its artifacts.
        driver: the process that runs it, or that was killed while it did; None if no process is named.
    """

    name: str
    finished: list[str]
    driver: str | None


def read_unreported(folder: str, reports: Collection[str]) -> dict[str, UnreportedRun]:
    """The runs in a folder that have none of these reports, by storage.

    Raises:
        UserError: if the folder may not be read.
    """
    fs, root = open_folder(folder, "FOLDER")
    with storage_errors(folder, "FOLDER"):
        reported = {_parent(report) for report in reports}
        own = fs.exists(f"{root}/{RUN_FILE}")
        storages = [root] if own else [_parent(path) for path in list_matching(fs, root, f"*/{RUN_FILE}")]
        found = {}
        for storage in storages:
            if as_url(fs, storage) in reported:
                continue
            manifests = list_matching(fs, storage, f"*/{MANIFEST}")
            name = f"(corrupt {RUN_FILE})"  # which must not hide the other runs
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                name = run_name(fs, storage)
            finished = [path.rsplit("/", 2)[-2] for path in manifests]
            found[as_url(fs, storage)] = UnreportedRun(name, finished, named_holder(fs, storage))
        return found


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
            raise UserError(no_such_run(run))
        if fs.isfile(path):
            raise UserError(f"{run}: is a file; expected a run's storage, or one of its folders")
        storage = run.rstrip("/")
        if fs.exists(f"{path}/{MANIFEST}"):
            artifact = artifact_at(run)
            if artifact.name in SCORES:
                return _summary_with(artifact)
        for folder in (storage, f"{storage}/{REPORT_FOLDER}", f"{storage}/{EVALUATION_FOLDER}"):
            fs, path = open_url(folder, "RUN")
            if not fs.exists(f"{path}/{SUMMARY}"):
                continue
            summary = _read_summary(fs, path)
            if "base" not in summary:
                raise UserError(
                    f"{run}: is the report of a sweep; expected that of one study: run `report` with the recipe, "
                    f"'sweep={{}}' and the study's settings"
                )
            if not is_complete(summary):
                command = _command(folder)
                kind = "an evaluation" if command == "evaluate" else "a report"
                raise UserError(f"{run}: is {kind} of an earlier version; make it again with `{command}`")
            return to_run_summary(folder, summary)
    raise UserError(
        f"{run}: holds no report and no results of `evaluate`; expected a run's storage, or one of its folders "
        f"report-FINGERPRINT, evaluation-FINGERPRINT, base-scores-FINGERPRINT and distilled-scores-FINGERPRINT"
    )


def _summary_with(answers: Artifact) -> RunSummary:
    """The summary that shows these answers, with their curve alone.

    Raises:
        UserError: if there is none.
    """
    folder = summary_of(answers)
    if folder is None:
        raise UserError(
            f"{answers.url}: is in no report and no results of `evaluate` by itself; run `report` with its settings "
            f"first (of a study of a sweep, with 'sweep={{}}')"
        )
    fs, path = open_url(folder, "RUN")
    summary = to_run_summary(folder, _read_summary(fs, path))
    (model,) = (model for model, found in summary.artifacts.items() if found == answers.folder)
    return replace(summary, curves={model: summary.curves[model]})


def summary_of(artifact: Artifact) -> str | None:
    """The folder of the summary that an artifact with answers belongs to: a report, or results of `evaluate`."""
    fs, root = open_url(artifact.storage, "RUN")
    for name in (REPORT_FOLDER, EVALUATION_FOLDER):
        # The current one first, then those that were kept of other settings.
        for path in sorted(list_matching(fs, root, f"{name}*/{SUMMARY}"), key=len):
            folder = _parent(path)
            with contextlib.suppress(UserError):  # one that is corrupt shows nothing
                summary = _read_summary(fs, folder)
                if is_complete(summary) and artifact.folder in to_run_summary(folder, summary).artifacts.values():
                    return f"{artifact.storage}/{last_part(folder)}"
    return None


def to_run_summary(folder: str, summary: Mapping[str, Any]) -> RunSummary:
    """The content of a `summary.json`.

    Raises:
        UserError: if values are missing or of another type.
    """
    try:
        settings = summary["settings"]
        # The settings hold the scales that were found as if they had been given.
        is_searched = summary.get("search") is not None
        values = {
            "folder": folder,
            "name": summary["name"],
            "date": summary["made_with"].get("date", ""),
            "model": settings["model"]["path"],
            "bootstrap": {name: settings["evaluation"][name] for name in ("bootstrap_samples", "seed")},
            "inference": settings["inference"]["method"],
            "scales": [] if is_searched else settings["inference"]["scales"],
            "search": settings["inference"]["search"]["strategy"] if is_searched else None,
            "question_settings": question_settings(settings),
        }
        if _is_evaluation(summary):
            models = [model for model in MODELS if model in summary]
            last = models[-1]
            values |= {
                "fingerprint": summary[last]["fingerprint"],
                "method": settings["method"]["name"] if last == "distilled" else "none",
                "dataset": summary["base"]["dataset"],
                "curves": {model: summary[model]["curves"][0] for model in models},
                "artifacts": {model: f"{model}-scores-{summary[model]['fingerprint']}" for model in models},
            }
        else:
            values |= {name: summary[name] for name in ("fingerprint", "method", "dataset", "artifacts")}
            values["curves"] = {model: summary[model] for model in MODELS}
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
        summary = json.loads(fs.cat_file(f"{folder}/{SUMMARY}"))
    except (ValueError, RecursionError):
        raise _corrupt_summary(folder) from None
    if not isinstance(summary, dict) or "name" not in summary:
        raise _corrupt_summary(folder)
    return summary


def _corrupt_summary(folder: str) -> UserError:
    command = _command(folder)
    return UserError(
        f"{folder}/{SUMMARY}: corrupt; expected what `{command}` writes; run `{command}` for this run to make it "
        f"again, or delete {folder}"
    )


def _command(folder: str) -> str:
    """The command that writes a folder."""
    return "evaluate" if last_part(folder).startswith(EVALUATION_FOLDER) else "report"


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
