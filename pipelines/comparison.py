"""Several finished studies side by side: their curves, and paired differences where they asked the same prompts."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pyarrow.compute as pc

from pos2distill.config.study import EvaluationSection
from pos2distill.errors import UserError
from pos2distill.evaluation.scores import Grid, format_slots, paired_difference, to_curve, to_grid
from pos2distill.store.artifacts import Artifact

from .lm_eval import find_sample_logs, read_sample_logs
from .results import read_summaries, read_summary
from .stages.evaluate import PREDICTIONS


def list_runs(folder: str) -> list[dict[str, Any]]:
    """One entry for every report in a folder of runs, or in one run's storage."""
    runs = []
    for path, summary in read_summaries(folder).items():
        entry = {"report": path, "name": summary["name"]}
        # The report of a sweep has no single curve, one of an earlier version no date.
        if "base" in summary and "made_with" in summary:
            entry |= {
                "fingerprint": summary["fingerprint"],
                "date": summary["made_with"].get("date", ""),
                "method": summary["method"],
                "model": summary["settings"]["model"]["path"],
                "dataset": summary["dataset"],
                "mean": [summary["base"]["mean"], summary["distilled"]["mean"]],
                "gap": [summary["base"]["gap"], summary["distilled"]["gap"]],
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
        UserError: if a run has neither a report nor such answers.
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
            curve = asdict(to_curve(grid, **bootstrap))
            entries.append({"report": run, "name": run, "model": "lm-eval", "method": "lm-eval"} | _curve_values(curve))
            grids.append(grid)
            continue
        folder, summary = read_summary(run)
        settings = summary["settings"]["evaluation"]
        bootstrap = bootstrap or {name: settings[name] for name in ("bootstrap_samples", "seed")}
        for model in ("distilled",) if entries else ("base", "distilled"):
            curve = summary[model]
            method = summary["method"] if model == "distilled" else "none"
            entry = {"report": folder, "name": summary["name"], "model": model, "method": method}
            entries.append(entry | _curve_values(curve))
            name, _, fingerprint = summary["artifacts"][model].rpartition("-")
            artifact = Artifact(folder.rpartition("/")[0], name, fingerprint)
            grids.append(to_grid(artifact.read_table(PREDICTIONS), curve["documents"]))
    differences = [_difference(grids[0], grid, bootstrap) for grid in grids[1:]]
    return {"runs": entries, "differences": differences}


def _curve_values(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Those values of a report's curve, or of a `Curve`, that are compared."""
    slots = [slot if isinstance(slot, int) else tuple(slot) for slot in curve["slots"]]
    return {
        "documents": curve["documents"],
        "questions": curve["examples"],
        "positions": [format_slots(slot) for slot in slots],
        "accuracy": curve["accuracy_by_slot"],
        "accuracy_ci95": curve["accuracy_ci95"],
        "mean": curve["mean"],
        "gap": curve["gap"],
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
            f"{folder}: expected an answer to each question at every position; run all tasks of the exported group"
        ) from None


def _difference(first: Grid, other: Grid, bootstrap: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return paired_difference(first, other, **bootstrap)
    except ValueError:  # other questions or positions
        return None
