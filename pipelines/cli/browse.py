"""Commands for finished results: `inspect`, `runs` and `compare` read them, `export` and `push` copy them elsewhere."""

import argparse
import itertools
import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pos2distill.errors import UserError, warn

BROWSING = ("inspect", "runs", "compare", "export", "push")

_INSPECT = """Show single questions of a run: the answers before and after training at every position of the gold
document, or with --samples the sampled responses.

RUN is the storage of a run (runs/quickstart), or one of its folders distilled-scores-…, base-scores-…, samples-….
"""
_EXPORT = """Write the questions of a run as tasks of lm-evaluation-harness: one task for each position, and a group for
each prompt length.

  run.py export runs/quickstart tasks
  lm_eval --include_path tasks --tasks pos2distill_quickstart_30_documents --model hf --model_args pretrained=MODEL \\
    --log_samples --output_path answers
  run.py compare runs/quickstart answers

The prompts are formatted with the chat template of the run's model, so MODEL should be of the same kind.
"""
_PUSH = """Upload the checkpoint of a run and its model card to the Hugging Face hub. If it was trained with
training.lora, the adapter alone is also uploaded, to the folder `adapter` of the repository.

Log in with `hf auth login`, or set HF_TOKEN. Run the same command again to continue an interrupted upload.
"""


def add_browsing(add_command: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Add the commands to the command line.

    Args:
        add_command: makes the parser of a command from its name, the line about it and its description.
    """
    text = "show single questions of a run: prompts, samples, answers before and after training"
    _add_inspect(add_command("inspect", text, _INSPECT))
    text = "list finished studies and evaluations: date, method or model, mean and GAP"
    runs = add_command("runs", text, text)
    runs.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="runs", help="a folder with runs, or one run (default: runs)"
    )
    text = "compare several studies or evaluated models: accuracy by position side by side, with paired differences"
    compare = add_command("compare", text, text)
    compare.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="the storage of a run, one of its folders report-FINGERPRINT, evaluation-FINGERPRINT, "
        "base-scores-FINGERPRINT or distilled-scores-FINGERPRINT, or the output folder of lm-eval for exported tasks",
    )
    export = add_command("export", "write the questions of a run as tasks of lm-evaluation-harness", _EXPORT)
    export.add_argument("run", metavar="RUN", help="the storage of a run, or one of its folders …-scores-FINGERPRINT")
    export.add_argument("folder", metavar="FOLDER", type=Path, help="output folder, which must be new or empty")
    push = add_command("push", "upload a run's checkpoint and its model card to the Hugging Face hub", _PUSH)
    push.add_argument("run", metavar="RUN", help="the storage of a run, or its folder checkpoint-FINGERPRINT")
    push.add_argument(
        "repository",
        metavar="OWNER/NAME",
        help="repository on the hub, created if it does not exist; an earlier model's weights and adapters are deleted",
    )
    push.add_argument(
        "--private", action="store_true", help="create a private repository; an existing public one is an error"
    )
    push.add_argument("--dry-run", action="store_true", help="list the files and their sizes, and ask no hub")
    for command in (runs, compare, export, push):
        command.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("run", metavar="RUN", help="the storage of a run, or one of its folders (see above)")
    inspect.add_argument(
        "--example",
        metavar="TEXT",
        help="show only questions with this text in their id, their location in the data or their wording",
    )
    inspect.add_argument(
        "--position",
        metavar="N",
        help="show only prompts with the gold document at this position, counted from 1 (two hops: 1>5; 'none': "
        "prompts without documents)",
    )
    inspect.add_argument("--documents", type=int, metavar="N", help="show only prompts with N documents")
    inspect.add_argument(
        "--outcome",
        metavar="NAME",
        help="show only answers with this outcome: correct, wrong, gained, lost, flipped, cut or refused; with "
        "--samples: kept, wrong, empty, failed or cut",
    )
    inspect.add_argument(
        "--limit", type=int, default=5, metavar="N", help="number of answers to show (default: 5; 0: all)"
    )
    inspect.add_argument("--samples", action="store_true", help="show the samples, not the answers of the evaluations")
    inspect.add_argument(
        "--entropy", action="store_true", help="also show the teacher's entropy at each token of kept samples, in nats"
    )
    inspect.add_argument(
        "--task", metavar="NAME", help="show this task of evaluation.also_evaluate instead of the main task"
    )
    inspect.add_argument("--prompts", action="store_true", help="also show the text of each prompt")
    inspect.add_argument("--json", action="store_true", help="print JSON, one object per line")


def run_browsing(options: argparse.Namespace) -> None:
    """Run one of the commands."""
    functions = {"inspect": _inspect, "runs": _runs, "compare": _compare, "export": _export, "push": _push}
    functions[options.command](options)


def _inspect(options: argparse.Namespace) -> None:
    from ..results.inspection.questions import QuestionFilter, iter_questions, require_limit

    require_limit(options.limit)
    question_filter = QuestionFilter(options.example, options.position, options.outcome, options.documents)
    shown = {name: getattr(options, name) for name in ("samples", "prompts", "entropy", "task")}
    rows = iter_questions(options.run, question_filter, **shown)
    limit = options.limit or None
    count = 0
    question = None
    for row in itertools.islice(rows, limit):
        count += 1
        if options.json:
            print(json.dumps(row, ensure_ascii=False))
            continue
        # Answers to one question at several positions follow each other.
        if row["example_id"] != question:
            question = row["example_id"]
            print(_format_question(row))
        print(_format_answers(row))
    if limit is not None and next(rows, None) is not None:
        print(f"the first {limit}; --limit 0 shows all", file=sys.stderr)
    if not count and not options.json:
        print("no question matches")


def _format_question(row: dict[str, Any]) -> str:
    label = f"{row['example_id']}, {row['location']}" if row["location"] else row["example_id"]
    return f"--- {label}\nquestion  {row['question']}\nanswers   {' | '.join(row['answers'])}"


def _format_answers(row: dict[str, Any]) -> str:
    # A server may not count them.
    tokens = "" if row["prompt_tokens"] is None else f", {row['prompt_tokens']} tokens"
    lines = [f"position  {row['position']} of {row['documents']}{tokens}: {', '.join(row['outcomes'])}"]
    if "prompt" in row:
        lines += ["prompt", textwrap.indent(row["prompt"], "    ")]
    models = [name for name in ("before", "after") if name in row]
    for name in models:
        label = "answer" if models == ["before"] else name  # of a model that was evaluated only
        lines.append(f"{label:<8}  {_format_answer(row[name])}")
    if "text" in row:
        lines.append(f"sampled   {row['text']}")
        if row["kept_text"] and row["kept_text"] != row["text"]:
            lines.append(f"kept      {row['kept_text']}")
        if "entropy" in row:
            tokens = "  ".join(f"{token.strip() or repr(token)} {nats:.2f}" for token, nats in row["entropy"]["tokens"])
            lines.append(f"entropy   mean {row['entropy']['mean']:.2f} nats: {tokens}")
    if row.get("error"):
        lines.append(f"error     {row['error']}")
    return "\n".join(lines)


def _format_answer(answer: dict[str, Any]) -> str:
    notes = ["correct" if answer["correct"] else "wrong"]
    if answer["cut"]:
        notes.append("cut at the length limit")
    if answer.get("found_in_documents"):
        notes.append(f"in document {', '.join(map(str, answer['found_in_documents']))}")
    return f"{answer['text']}  ({'; '.join(notes)})"


def _format_sweep_row(row: Mapping[str, Any]) -> str:
    """Means and GAPs of the studies that differ in the seed only, before and after."""
    from pos2distill.evaluation.formatting import format_value

    mean, gap, corrected = (" to ".join(map(format_value, row[name])) for name in ("mean", "gap", "gap_corrected"))
    seeds = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
    return f"{row['settings']}, {seeds}: mean {mean}, GAP {gap}, corrected {corrected}"


def _runs(options: argparse.Namespace) -> None:
    from ..results.comparison import list_runs
    from ..results.run_summaries import find_runs_below

    runs = list_runs(options.folder)
    if options.json:
        print(json.dumps(runs, ensure_ascii=False))
        return
    if not runs:
        below = find_runs_below(options.folder)
        print(f"{options.folder}: no runs" + (f"; did you mean '{below}'?" if below else ""))
    if runs and all("error" in run for run in runs):
        raise UserError(runs[0]["error"])
    for run in runs:
        if "error" in run:
            print(run["error"])
            continue
        if "finished" in run:
            finished = ", ".join(run["finished"]) or "nothing"
            driver = f"its lease names {run['driver']}; " if run["driver"] else ""
            print(f"{run['storage']}  {run['name']}: no results yet; {driver}finished: {finished}")
            continue
        if "rows" in run:
            print(f"{run['report']}  {run['date']}  {run['name']}: a sweep of {run['studies']} studies")
            for row in run["rows"]:
                print(f"    {_format_sweep_row(row)}")
            continue
        if "mean" not in run:
            print(f"{run['report']}  {run['name']}: of an earlier version")
            continue
        mean = " to ".join(f"{value:.3f}" for value in run["mean"])
        gaps = zip(run["gap"], run["gap_ci95"], run["gap_corrected"], run["why_gap_is_meaningless"], strict=True)
        gap = "; after ".join(_format_gap(*each) for each in gaps)
        what = run["model"] if run["method"] == "none" else run["method"]
        what += _format_inference(run)
        data = f"{run['dataset']}, {run['documents']} documents, {run['questions']} questions"
        print(f"{run['report']}  {run['date'] or 'date unknown'}  {what} on {data}: mean {mean}, GAP {gap}")


def _compare(options: argparse.Namespace) -> None:
    from pos2distill.evaluation.scores import position_order

    from ..results.comparison import compare_runs

    result = compare_runs(options.runs)
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    entries = result["runs"]
    for number, entry in enumerate(entries):
        names = {"base": f"base model {entry.get('path')}", "lm-eval": "answers of lm-eval"}
        model = names.get(entry["model"], f"{entry['method']} of {entry.get('path')}")
        model += _format_inference(entry)
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
        print(f"[{number}]: GAP {_format_gap(*gap)}")
    for difference in result["differences"]:
        of, less = difference["of"], difference["less"]
        has_gaps = all(entries[each]["why_gap_is_meaningless"] is None for each in (of, less))
        print(f"[{of}] - [{less}]: {_format_difference(difference, has_gaps=has_gaps)}")


def _export(options: argparse.Namespace) -> None:
    from ..results.lm_eval import export_tasks

    export = export_tasks(options.run, options.folder)
    if export.caveat:
        warn(export.caveat)
    if options.json:
        print(json.dumps({"groups": export.groups}))
        return
    for group, tasks in export.groups.items():
        print(f"{options.folder}: group {group}, {len(tasks)} tasks")
    names = ",".join(export.groups)
    folder = shlex.quote(str(options.folder))
    print(
        f"lm_eval --include_path {folder} --tasks {names} --model hf --model_args pretrained=MODEL --log_samples "
        f"--output_path answers"
    )
    if export.compared_with is None:
        print("compare needs a report of this study alone: run `report` with its recipe, 'sweep={}' and its settings")
    else:
        print(f"python run.py compare {shlex.quote(export.compared_with)} answers")


def _push(options: argparse.Namespace) -> None:
    from ..results.hub import files_to_push, push_checkpoint

    if options.dry_run:
        files = files_to_push(options.run, options.repository)
        if options.json:
            print(json.dumps({"files": files}))
            return
        for name, size in files.items():
            print(f"{size / 1e6:12,.3f} MB  {name}")
        print(f"{sum(files.values()) / 1e6:12,.3f} MB  in {len(files)} files, to {options.repository}")
        return
    url = push_checkpoint(options.run, options.repository, private=options.private)
    print(json.dumps({"url": url}) if options.json else url)


def _format_inference(entry: Mapping[str, Any]) -> str:
    """The inference-time method of a run, with the scales that it was given; empty if it has none."""
    method, scales = entry.get("inference", "none"), entry.get("scales")
    if method == "none":
        return ""
    if not scales:
        return f" with {method}"
    smallest, largest = min(scales), max(scales)
    return f" with {method} {smallest:g}" + (f" to {largest:g}" if len(scales) > 1 else "")


def _format_gap(gap: float, interval: tuple[float, float], corrected: float, why_meaningless: str | None) -> str:
    from pos2distill.evaluation.formatting import format_gap

    return f"means nothing ({why_meaningless})" if why_meaningless else format_gap(gap, interval, corrected)


def _format_difference(difference: dict[str, Any], *, has_gaps: bool) -> str:
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
