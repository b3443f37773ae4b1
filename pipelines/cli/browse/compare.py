"""`compare RUN ...`: several runs side by side."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..command_parsers import OF_READING, CommandParsers
from .formatting import format_inference, format_run_gap


def add_compare(commands: CommandParsers) -> None:
    """Add the command to the command line."""
    compare = commands.add(
        "compare",
        _run,
        "compare several studies or evaluated models: accuracy by position side by side, with paired differences",
        examples=("compare runs/quickstart runs/slow",),
        ending=OF_READING,
    )
    compare.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="the storage of a run, one of its folders report-FINGERPRINT, evaluation-FINGERPRINT, "
        "base-scores-FINGERPRINT or distilled-scores-FINGERPRINT, or the output folder of lm-eval for exported tasks",
    )
    compare.add_argument("--json", action="store_true", help="print the result as JSON")


def _run(options: argparse.Namespace) -> int:
    # Imported here, so that --help is answered at once.
    from ...results.comparison import compare_runs

    result = compare_runs(options.runs)
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        _print_comparison(result["runs"], result["differences"])
    return 0


def _print_comparison(entries: Sequence[Mapping[str, Any]], differences: Sequence[Mapping[str, Any]]) -> None:
    from pos2distill.evaluation.scores import position_order

    for number, entry in enumerate(entries):
        names = {"base": f"base model {entry.get('path')}", "lm-eval": "answers of lm-eval"}
        model = names.get(entry["model"], f"{entry['method']} of {entry.get('path')}")
        model += format_inference(entry)
        print(f"[{number}] {entry['report']}: {model}, {entry['documents']} documents, {entry['questions']} questions")
    print("\nposition" + "".join(f"{f'[{number}]':>8}" for number in range(len(entries))))
    positions = sorted({position for entry in entries for position in entry["positions"]}, key=position_order)
    by_position = [dict(zip(entry["positions"], entry["accuracy"], strict=True)) for entry in entries]
    for position in positions:
        cells = [f"{each[position]:8.3f}" if position in each else f"{'-':>8}" for each in by_position]
        print(f"{position:>8}{''.join(cells)}")
    means = [f"{entry['mean']:8.3f}" for entry in entries]
    print(f"    mean{''.join(means)}\n")
    for number, entry in enumerate(entries):
        gap = (entry[name] for name in ("gap", "gap_ci95", "gap_corrected", "why_gap_is_meaningless"))
        print(f"[{number}]: GAP {format_run_gap(*gap)}")
    for difference in differences:
        of, less = difference["of"], difference["less"]
        has_gaps = all(entries[each]["why_gap_is_meaningless"] is None for each in (of, less))
        print(f"[{of}] - [{less}]: {_format_difference(difference, has_gaps=has_gaps)}")


def _format_difference(difference: Mapping[str, Any], *, has_gaps: bool) -> str:
    """has_gaps: whether the GAPs of both models mean something."""
    if not difference["questions"]:
        return "other questions, positions, documents or metric, so there is no paired difference"
    low, high = difference["ci95"]
    gap_low, gap_high = difference["gap_change_ci95"]
    gap = f", corrected GAP {difference['gap_change']:+.3f} [{gap_low:+.3f}, {gap_high:+.3f}]" if has_gaps else ""
    return (
        f"mean {difference['mean_difference']:+.3f} [{low:+.3f}, {high:+.3f}]{gap} (paired over "
        f"{difference['questions']} questions, 95 % intervals)"
    )
