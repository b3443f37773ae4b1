"""Several finished studies side by side: their curves, and paired differences where they asked the same prompts."""

from typing import Any

from pos2distill.evaluation.scores import Grid, format_slots, paired_difference, to_grid
from pos2distill.store.artifacts import Artifact

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

    Returns: `runs`, in order: report, name, method, positions, accuracy, interval, mean and GAP of each; the base model
    of the first one comes before it. `differences`: of all but the first, paired, or null where prompts differ.
    Raises:
        UserError: if a run has no report.
    """
    entries: list[dict[str, Any]] = []
    grids: list[Grid] = []
    settings: dict[str, Any] = {}
    for number, run in enumerate(runs):
        folder, summary = read_summary(run)
        models = ("base", "distilled") if number == 0 else ("distilled",)
        settings = settings or summary["settings"]["evaluation"]
        for model in models:
            curve = summary[model]
            slots = [slot if isinstance(slot, int) else tuple(slot) for slot in curve["slots"]]
            entries.append(
                {
                    "report": folder,
                    "name": summary["name"],
                    "model": model,
                    "method": summary["method"] if model == "distilled" else "none",
                    "documents": curve["documents"],
                    "questions": curve["examples"],
                    "positions": [format_slots(slot) for slot in slots],
                    "accuracy": curve["accuracy_by_slot"],
                    "accuracy_ci95": curve["accuracy_ci95"],
                    "mean": curve["mean"],
                    "gap": curve["gap"],
                }
            )
            name, _, fingerprint = summary["artifacts"][model].rpartition("-")
            artifact = Artifact(folder.rpartition("/")[0], name, fingerprint)
            grids.append(to_grid(artifact.read_table(PREDICTIONS), curve["documents"]))
    differences = [_difference(grids[0], grid, settings) for grid in grids[1:]]
    return {"runs": entries, "differences": differences}


def _difference(first: Grid, other: Grid, settings: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return paired_difference(first, other, bootstrap_samples=settings["bootstrap_samples"], seed=settings["seed"])
    except ValueError:  # other questions or positions
        return None
