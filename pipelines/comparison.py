"""Several finished studies side by side: their curves, and paired differences where they asked the same prompts."""

from typing import Any

import pyarrow.compute as pc

from pos2distill.config.study import EvaluationSection
from pos2distill.errors import UserError
from pos2distill.evaluation.scores import Curve, Grid, format_slots, paired_difference, to_curve, to_grid

from .lm_eval import find_sample_logs, read_sample_logs
from .results import is_study_summary, read_reports, read_study_summary, to_study_summary


def list_runs(folder: str) -> list[dict[str, Any]]:
    """One entry for every report in a folder of runs, or in one run's storage."""
    runs = []
    for report, summary in read_reports(folder).items():
        entry = {"report": report, "name": summary["name"]}
        # The report of a sweep has no single curve, one of an earlier version no date.
        if is_study_summary(summary):
            study = to_study_summary(report, summary)
            base, distilled = study.curves["base"], study.curves["distilled"]
            entry |= {
                "fingerprint": study.fingerprint,
                "date": study.date,
                "method": study.method,
                "model": study.model,
                "dataset": study.dataset,
                "mean": [base.mean, distilled.mean],
                "gap": [base.gap, distilled.gap],
            }
        runs.append(entry)
    return runs


def compare_runs(runs: list[str]) -> dict[str, Any]:
    """Curves of distilled models, and the difference of each to the first one.

    Args:
        runs: storages with a report, reports, or folders with lm-evaluation-harness's answers to exported questions.
    Returns: `runs`, in order: report, name, method, positions, accuracy, interval, mean and GAP of each; the base model
    of the first one comes before it. `differences`: of all but the first, paired, or null where prompts differ.
    Raises:
        UserError: if a run has neither a report nor such answers, or its report is corrupt.
    """
    entries: list[dict[str, Any]] = []
    grids: list[Grid] = []
    bootstrap: dict[str, Any] = {}
    for run in runs:
        logs = find_sample_logs(run)
        if logs:
            defaults = EvaluationSection()
            bootstrap = bootstrap or {"bootstrap_samples": defaults.bootstrap_samples, "seed": 0}
            grid = _logged_grid(logs, run, entries[0]["documents"] if entries else None)
            curve = to_curve(grid, **bootstrap)
            entries.append({"report": run, "name": run, "model": "lm-eval", "method": "lm-eval"} | _curve_values(curve))
            grids.append(grid)
            continue
        study = read_study_summary(run)
        bootstrap = bootstrap or study.bootstrap
        for model in ("distilled",) if entries else ("base", "distilled"):
            curve = study.curves[model]
            method = study.method if model == "distilled" else "none"
            entry = {"report": study.report, "name": study.name, "model": model, "method": method}
            entries.append(entry | _curve_values(curve))
            grids.append(to_grid(study.read_predictions(model), curve.documents))
    differences = [_difference(grids[0], grid, bootstrap) for grid in grids[1:]]
    return {"runs": entries, "differences": differences}


def _curve_values(curve: Curve) -> dict[str, Any]:
    """Those values of a curve that are compared."""
    return {
        "documents": curve.documents,
        "questions": curve.examples,
        "positions": [format_slots(slot) for slot in curve.slots],
        "accuracy": list(curve.accuracy_by_slot),
        "accuracy_ci95": [list(interval) for interval in curve.accuracy_ci95],
        "mean": curve.mean,
        "gap": curve.gap,
    }


def _logged_grid(logs: list[str], folder: str, documents: int | None) -> Grid:
    """The answers at one prompt length, the given one if there are some.

    Raises:
        UserError: if a question was not asked at every position.
    """
    table = read_sample_logs(logs, folder)
    lengths = pc.unique(table["documents"]).to_pylist()
    if not lengths:
        raise UserError(f"{folder}: its logs of samples are empty")
    if documents is None or documents not in lengths:
        documents = min(lengths)
    try:
        return to_grid(table, documents)
    except ValueError:
        raise UserError(
            f"{folder}: expected an answer to each question at every position; run all tasks of an exported group"
        ) from None


def _difference(first: Grid, other: Grid, bootstrap: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return paired_difference(first, other, **bootstrap)
    except ValueError:  # other questions or positions
        return None
