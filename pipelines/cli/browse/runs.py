"""`runs [FOLDER]`: the finished studies and evaluations in a folder."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from pos2distill.errors import UserError

from ..command_parsers import OF_READING, CommandParsers
from .formatting import format_inference, format_run_gap


def add_runs(commands: CommandParsers) -> None:
    """Add the command to the command line."""
    runs = commands.add(
        "runs",
        _run,
        "list finished studies and evaluations: date, method or model, mean and GAP",
        examples=("runs", "runs s3://bucket/runs --json"),
        ending=OF_READING,
    )
    runs.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="runs", help="a folder with runs, or one run (default: runs)"
    )
    runs.add_argument("--json", action="store_true", help="print the result as JSON")


def _run(options: argparse.Namespace) -> int:
    # Imported here, so that --help is answered at once.
    from ...results.comparison import list_runs
    from ...results.run_summaries import find_runs_below

    runs = list_runs(options.folder)
    if options.json:
        print(json.dumps(runs, ensure_ascii=False))
        return 0
    if not runs:
        below = find_runs_below(options.folder)
        print(f"{options.folder}: no runs" + (f"; did you mean '{below}'?" if below else ""))
    if runs and all("error" in run for run in runs):
        raise UserError(runs[0]["error"])
    for run in runs:
        print(_format_run(run))
    return 0


def _format_run(run: Mapping[str, Any]) -> str:
    if "error" in run:
        return str(run["error"])
    if "finished" in run:
        finished = ", ".join(run["finished"]) or "nothing"
        driver = f"its lease names {run['driver']}; " if run["driver"] else ""
        return f"{run['storage']}  {run['name']}: no results yet; {driver}finished: {finished}"
    if "rows" in run:
        line = f"{run['report']}  {run['date']}  {run['name']}: a sweep of {run['studies']} studies"
        return "\n".join([line, *(f"    {_format_sweep_row(row)}" for row in run["rows"])])
    if "mean" not in run:
        return f"{run['report']}  {run['name']}: of an earlier version"
    mean = " to ".join(f"{value:.3f}" for value in run["mean"])
    gaps = zip(run["gap"], run["gap_ci95"], run["gap_corrected"], run["why_gap_is_meaningless"], strict=True)
    gap = "; after ".join(format_run_gap(*each) for each in gaps)
    what = run["model"] if run["method"] == "none" else run["method"]
    what += format_inference(run)
    data = f"{run['dataset']}, {run['documents']} documents, {run['questions']} questions"
    return f"{run['report']}  {run['date'] or 'date unknown'}  {what} on {data}: mean {mean}, GAP {gap}"


def _format_sweep_row(row: Mapping[str, Any]) -> str:
    """Means and GAPs of the studies that differ in the seed only, before and after."""
    from pos2distill.evaluation.formatting import format_value

    mean, gap, corrected = (" to ".join(map(format_value, row[name])) for name in ("mean", "gap", "gap_corrected"))
    seeds = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
    return f"{row['settings']}, {seeds}: mean {mean}, GAP {gap}, corrected {corrected}"
