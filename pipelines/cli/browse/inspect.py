"""`inspect RUN`: single questions of a run."""

import argparse
import itertools
import json
import sys
import textwrap
from typing import Any

from ..command_parsers import OF_READING, CommandParsers

_DESCRIPTION = """Show single questions of a run: the answers before and after training at every position of the gold
document, or with --samples the sampled responses.

RUN is the storage of a run (runs/quickstart), or one of its folders distilled-scores-…, base-scores-…, samples-….
"""


def add_inspect(commands: CommandParsers) -> None:
    """Add the command to the command line."""
    inspect = commands.add(
        "inspect",
        _run,
        "show single questions of a run: prompts, samples, answers before and after training",
        description=_DESCRIPTION,
        examples=("inspect runs/quickstart --outcome gained --position 1 --prompts",),
        ending=OF_READING,
    )
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


def _run(options: argparse.Namespace) -> int:
    # Imported here, so that --help is answered at once.
    from ...results.inspection.questions import QuestionFilter, iter_questions, require_limit

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
    return 0


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
