"""Several finished studies side by side: their curves, and paired differences where they asked the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config import EvaluationSection
from pos2distill.errors import UserError
from pos2distill.evaluation.scores import (
    Curve,
    Grid,
    GridMismatch,
    format_slots,
    may_be_same_questions,
    paired_difference,
    share_examples,
    to_curve,
    to_grid,
)

from .lm_eval import find_sample_logs, read_sample_logs
from .run_summaries import (
    RunSummary,
    is_complete,
    read_run_summary,
    read_summaries,
    read_unreported,
    to_run_summary,
)

# Of two base models that are compared: the same model, used in the same way.
_HOW_ANSWERED = ("model", "path", "inference", "scales", "search")


def list_runs(folder: str) -> list[dict[str, Any]]:
    """One entry for every report in a folder of runs or in one run's storage, and for every evaluation that no report
    shows. Last, runs that have neither yet: their `report` is null, `finished` has the folders of what is,
    and `driver` is the process that their lease names.

    `mean`, `gap`, `gap_ci95` and `gap_corrected`: of the base model and, if there is one, of the distilled one.
    `studies`: how many a sweep has. `rows`: of each of its settings the seeds, the means and the GAPs. `error`: what is
    wrong with a report that cannot be read.
    """
    runs: list[dict[str, Any]] = []
    summaries = read_summaries(folder)
    for path, content in summaries.items():
        try:
            runs.append({"report": path} | _describe_report(path, content))
        except UserError as error:  # which must not hide the other runs
            runs.append({"report": path, "name": None, "error": str(error)})
    for storage, run in read_unreported(folder, summaries).items():
        runs.append({"report": None, "storage": storage} | asdict(run))
    return runs


def _describe_report(path: str, content: Mapping[str, Any] | UserError) -> dict[str, Any]:
    """What `list_runs` says of a report.

    Raises:
        UserError: if it cannot be read.
    """
    if isinstance(content, UserError):
        raise content
    entry: dict[str, Any] = {"name": content["name"]}
    # The report of a sweep has no single curve; one of an earlier version may lack anything.
    if {"cells", "estimates", "date"} <= content.keys():
        return entry | _describe_sweep(path, content)
    if not is_complete(content):
        return entry
    summary = to_run_summary(path, content)
    first = next(iter(summary.curves.values()))
    return entry | {
        "fingerprint": summary.fingerprint,
        "date": summary.date,
        "method": summary.method,
        "inference": summary.inference,
        "scales": summary.scales,
        "search": summary.search,
        "model": summary.model,
        "dataset": summary.dataset,
        "documents": first.documents,
        "questions": first.examples,
        "mean": [curve.mean for curve in summary.curves.values()],
        "gap": [curve.gap for curve in summary.curves.values()],
        "gap_ci95": [list(curve.gap_ci95) for curve in summary.curves.values()],
        "gap_corrected": [curve.gap_corrected for curve in summary.curves.values()],
        "why_gap_is_meaningless": [curve.why_gap_is_meaningless for curve in summary.curves.values()],
    }


def _describe_sweep(path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """What `list_runs` says of the report of a sweep.

    Raises:
        UserError: if values are missing or of another type.
    """
    try:
        rows = []
        for row in content["estimates"]:
            trained = next(iter(row["tasks"].values()))
            models = [trained[name] for name in ("before", "after")]
            rows.append(
                {
                    "settings": row["label"],
                    "seeds": row["seeds"],
                    "mean": [model["mean"]["value"] for model in models],
                    "gap": [model["gap"]["value"] for model in models],
                    "gap_corrected": [model["gap_corrected"] for model in models],
                }
            )
        return {"date": content["date"], "studies": len(content["cells"]), "rows": rows}
    except (KeyError, TypeError, AttributeError, StopIteration):
        raise UserError(f"{path}/summary.json: corrupt; make it again with `report`") from None


def compare_runs(runs: list[str]) -> dict[str, Any]:
    """Curves of models, and their differences.

    Args:
        runs: storages with a report or results of `evaluate`, such folders, artifacts with answers that they show, or
            folders with lm-evaluation-harness's answers to exported questions.
    Returns: `runs`, in order: report, name, path of the base model, method, positions, accuracy, interval, mean and GAP
    (with its interval, corrected, and why it says nothing, if so) of each run's models; a base model that answered as
    an earlier one is left out.
    `differences`, `of` one entry of `runs` `less` another, paired over so many `questions` (0 where prompts differ,
    without the other values): of each to the first one, or of a distilled model to its own base model; then of the last
    model of each run to that of the first run.
    Raises:
        UserError: if a run has none of these, or its summary is corrupt.
    """
    found = [_read_run(run) for run in runs]
    summaries = [each for each in found if isinstance(each, RunSummary)]
    bootstrap: dict[str, Any] = {"bootstrap_samples": EvaluationSection().bootstrap_samples, "seed": 0}
    if summaries:
        bootstrap = summaries[0].bootstrap
    preferred = _preferred_lengths(summaries, [each for each in found if not isinstance(each, RunSummary)])
    models: list[_Model] = []
    pairs: list[tuple[int, int]] = []  # which model, less which
    last_of_runs: list[int] = []
    for run, each in zip(runs, found, strict=True):
        if isinstance(each, RunSummary):
            pairs += _add_models(models, each)
        else:
            models.append(_logged_model(each, run, preferred, bootstrap))
            pairs.append((len(models) - 1, 0))
        last_of_runs.append(len(models) - 1)
    pairs += [(last, last_of_runs[0]) for last in last_of_runs[1:]]
    differences = []
    for of, less in dict.fromkeys(pairs):
        if of != less:
            differences.append({"of": of, "less": less} | _difference(models[less], models[of], bootstrap))
    return {"runs": [model.entry for model in models], "differences": differences}


def _read_run(run: str) -> RunSummary | pa.Table:
    """The summary of a run, or lm-evaluation-harness's answers in a folder.

    Raises:
        UserError: if there is neither, or it is corrupt.
    """
    logs = find_sample_logs(run)
    if not logs:
        return read_run_summary(run)
    table = read_sample_logs(logs, run)
    if not len(table):
        raise UserError(f"{run}: its logs of samples are empty")
    return table


def _preferred_lengths(summaries: Sequence[RunSummary], logged: Sequence[pa.Table]) -> list[int]:
    """The prompt lengths at which logs of several are compared, the best first, wherever they stand among the runs.

    Those of the runs' curves; then those that all logs have.
    """
    preferred = [next(iter(summary.curves.values())).documents for summary in summaries]
    if logged:
        preferred += sorted(set.intersection(*map(_lengths, logged)))
    return preferred


def _lengths(table: pa.Table) -> set[int]:
    """The numbers of documents in prompts."""
    return set(pc.unique(table["documents"]).to_pylist())


@dataclass(frozen=True, slots=True)
class _Model:
    """A model whose answers are compared.

    Attributes:
        entry: what is shown of it.
        question_settings: see the function of this name; None for logs of another program, which do not say.
    """

    entry: dict[str, Any]
    grid: Grid
    question_settings: dict[str, str] | None

    def answered_as(self, other: "_Model") -> bool:
        """Whether both are the same model, and gave the same right and wrong answers to the same questions."""
        one, two = self.grid, other.grid
        return (
            all(self.entry.get(name) == other.entry.get(name) for name in _HOW_ANSWERED)
            and self.question_settings == other.question_settings
            and may_be_same_questions(one, two)
            and (one.documents, one.slots, one.example_ids) == (two.documents, two.slots, two.example_ids)
            and np.array_equal(one.correct_ES, two.correct_ES)
        )


def _add_models(models: list[_Model], summary: RunSummary) -> list[tuple[int, int]]:
    """Append the models of a run, except a base model that answered as one that is there.

    Returns: numbers of two models each: that of a new one, and that of the one it is compared with.
    """
    pairs = []
    base = 0
    for name, curve in summary.curves.items():
        entry = {
            "report": summary.folder,
            "name": summary.name,
            "model": name,
            "path": summary.model,
            "method": summary.method if name == "distilled" else "none",
            "inference": summary.inference,
            "scales": summary.scales,
            "search": summary.search,
        }
        model = _Model(entry | _curve_values(curve), summary.read_grid(name), summary.question_settings)
        # A run's only model is shown in any case.
        may_be_known = name == "base" and len(summary.curves) > 1
        known = [number for number, each in enumerate(models) if each.answered_as(model)] if may_be_known else []
        if known:
            base = known[0]
            continue
        models.append(model)
        number = len(models) - 1
        pairs.append((number, base))
        if name == "base":
            base = number
    return pairs


def _logged_model(table: pa.Table, folder: str, preferred: Sequence[int], bootstrap: dict[str, Any]) -> _Model:
    """A model by the harness's answers, at the first of the preferred prompt lengths that these have."""
    lengths = _lengths(table)
    grid = _logged_grid(table, folder, next((each for each in preferred if each in lengths), min(lengths)))
    entry = {"report": folder, "name": folder, "model": "lm-eval", "method": "lm-eval"}
    return _Model(entry | _curve_values(to_curve(grid, **bootstrap)), grid, None)


def _curve_values(curve: Curve) -> dict[str, Any]:
    """The values of a curve that are compared."""
    return {
        "documents": curve.documents,
        "questions": curve.examples,
        "positions": [format_slots(slot) for slot in curve.slots],
        "accuracy": list(curve.accuracy_by_slot),
        "accuracy_ci95": [list(interval) for interval in curve.accuracy_ci95],
        "mean": curve.mean,
        "gap": curve.gap,
        "gap_ci95": list(curve.gap_ci95),
        "gap_corrected": curve.gap_corrected,
        "why_gap_is_meaningless": curve.why_gap_is_meaningless,
    }


def _logged_grid(table: pa.Table, folder: str, documents: int) -> Grid:
    """The answers at one prompt length.

    Raises:
        UserError: if a question was not asked at every position.
    """
    try:
        return to_grid(table, documents)
    except ValueError:
        raise UserError(
            f"{folder}: expected an answer to each question at every position; run all tasks of an exported group"
        ) from None


def _difference(first: _Model, other: _Model, bootstrap: dict[str, Any]) -> dict[str, Any]:
    """The paired difference of two models; 0 questions if these were of another task."""
    both = [model.question_settings for model in (first, other)]
    if None not in both and both[0] != both[1]:
        return {"questions": 0}
    try:
        before, after = share_examples(first.grid, other.grid)
    except GridMismatch:
        return {"questions": 0}
    return {"questions": len(before.example_ids), **paired_difference(before, after, **bootstrap)}
