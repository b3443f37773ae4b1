"""The questions of an evaluation with the answers of one or two models, as data for a page's browser of questions.

Every question is stored once, with its gold documents first; a view (one prompt length of one task) holds the order of
documents at each position, and the answers. Prompts are put together by the page, from these and the task's template.
Everything is text: the page shows it, and never runs it.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config.data import Metric
from pos2distill.config.template import DOCUMENTS
from pos2distill.evaluation.attribution import Attribution
from pos2distill.evaluation.scores import format_slots
from pos2distill.records import Document, Example, Slots, example_from_row
from pos2distill.tasks.permutations import arrange
from pos2distill.tasks.prompts import Wording, raw_messages, to_template

# Bits of an answer's flags.
CORRECT, CUT = 1, 2

# Base64 characters. With the charts' library of 0.9 MB, a report stays below 10 MB.
_MOST_CHARACTERS = 8_500_000
# Documents are shortened to these lengths, one after the other, until the data fits.
_DOCUMENT_LENGTHS = (None, 1000, 400, 150)


@dataclass(frozen=True, slots=True)
class EvaluatedPrompts:
    """One prompt length of one task, with the predictions of the models.

    Attributes:
        label: its name on the page.
        slot_of_rank: where the prompts' documents are reordered, as in `arrange`.
        models: tables of `PREDICTION_SCHEMA`, also with other prompt lengths; that of the base model first. Of several
            orders of the distractors, only the data set's is shown.
    """

    label: str
    documents: int
    models: Sequence[pa.Table]
    slot_of_rank: Slots = ()


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """The questions of one task and the prompts that were made of them.

    Attributes:
        examples: a table of `EXAMPLE_SCHEMA`.
        locations: where the data set has each example, by its id.
        chat: what the chat template writes before and after the message with the documents, with the other message
            (`PromptBuilder.chat_frame`); None if it is not known.
    """

    metric: Metric
    wording: Wording
    examples: pa.Table
    locations: Mapping[str, str]
    prompts: Sequence[EvaluatedPrompts]
    chat: tuple[str, str] | None = None


def encode_questions(tasks: Sequence[EvaluatedTask], most_characters: int = _MOST_CHARACTERS) -> str:
    """The data of the browser as base64 text of gzip-compressed JSON, in at most about `most_characters`.

    Long documents are shortened first, then the last questions are left out; the data says so.
    """
    data = _collect(tasks)
    for length in _DOCUMENT_LENGTHS:
        text = _encode(_shorten(data, length))
        if len(text) <= most_characters:
            return text
    shortened = _shorten(data, _DOCUMENT_LENGTHS[-1])
    most_questions = max(len(task["questions"]) for task in shortened["tasks"])
    while len(text) > most_characters and most_questions > 1:
        most_questions //= 2
        text = _encode(_leave_out(shortened, most_questions))
    return text


def _encode(data: Mapping[str, Any]) -> str:
    raw = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    # No time in the header: the same results give the same bytes.
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()


def _shorten(data: dict[str, Any], length: int | None) -> dict[str, Any]:
    if length is None:
        return data
    tasks = []
    for task in data["tasks"]:
        questions = []
        for question in task["questions"]:
            documents = [[title, _cut(text, length)] for title, text in question["documents"]]
            questions.append({**question, "documents": documents})
        tasks.append({**task, "questions": questions})
    return {**data, "tasks": tasks, "document_length": length}


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _leave_out(data: dict[str, Any], count: int) -> dict[str, Any]:
    tasks = []
    left_out = 0
    for task in data["tasks"]:
        left_out += max(0, len(task["questions"]) - count)
        views = [{**view, "answers": view["answers"][:count]} for view in task["views"]]
        tasks.append({**task, "questions": task["questions"][:count], "views": views})
    return {**data, "tasks": tasks, "left_out": left_out}


def _collect(tasks: Sequence[EvaluatedTask]) -> dict[str, Any]:
    return {"tasks": [_collect_task(task) for task in tasks], "document_length": None, "left_out": 0}


def _collect_task(task: EvaluatedTask) -> dict[str, Any]:
    answered = set(task.prompts[0].models[0]["example_id"].to_pylist())
    examples = [example_from_row(row) for row in task.examples.to_pylist() if row["example_id"] in answered]
    questions = [_to_question(example, task.locations) for example in examples]
    views = [_to_view(prompts, task.metric, examples) for prompts in task.prompts]
    return {"questions": questions, "template": _page_template(task.wording, task.chat), "views": views}


def _page_template(wording: Wording, chat: tuple[str, str] | None) -> dict[str, Any]:
    """The parts that the page builds prompts from. Without a chat frame, the messages follow each other."""
    template = to_template(wording)
    texts = list(raw_messages(template).values())
    if chat is not None:
        texts = [text for text in texts if DOCUMENTS in text]
    before, _, after = "\n\n".join(texts).partition(DOCUMENTS)
    shown = {"document": template.document, "separator": template.separator, "json_strings": template.json_strings}
    return {"before": before, "after": after, **shown, "chat": chat}


def _to_question(example: Example, locations: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": example.example_id,
        "location": locations.get(example.example_id, ""),
        "question": example.question,
        "answers": example.answers,
        "golds": len(example.golds),
        "documents": [[document.title, document.text] for document in golds_first(example)],
    }


def golds_first(example: Example) -> tuple[Document, ...]:
    """The documents of an example in the order in which the page numbers them."""
    return (*example.golds, *example.distractors)


def _to_view(prompts: EvaluatedPrompts, metric: Metric, examples: Sequence[Example]) -> dict[str, Any]:
    models = [_by_prompt(table, prompts.documents) for table in prompts.models]
    placements = sorted({placement for _, placement in models[0]})
    positions: list[dict[str, Any]] = []
    for placement in placements:
        rows = [models[0][example.example_id, placement] for example in examples]
        # Examples with fewer hops name a placement, as in `Grid`.
        fewest = min(rows, key=lambda row: len(row["slots"]))
        orders = {}
        for row in rows:
            hops = len(row["slots"])
            orders[str(hops)] = document_order(prompts.documents, tuple(row["slots"]), prompts.slot_of_rank)
        label = format_slots(tuple(fewest["slots"]))
        positions.append({"label": label, "group": fewest["group"], "orders": orders})
    answers = []
    for example in examples:
        found_in = Attribution(example.question, metric, golds_first(example))
        by_placement = []
        for placement in placements:
            by_placement.append([_to_answer(model[example.example_id, placement], found_in) for model in models])
        answers.append(by_placement)
    return {"label": prompts.label, "documents": prompts.documents, "positions": positions, "answers": answers}


def _by_prompt(predictions: pa.Table, documents: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Answers, by example and placement, to prompts of this length with the data set's order of distractors."""
    columns = ["example_id", "placement", "group", "slots", "text", "correct", "finish_reason"]
    selected = predictions.filter((pc.field("documents") == documents) & (pc.field("order") == 0)).select(columns)
    return {(row["example_id"], row["placement"]): row for row in selected.to_pylist()}


def _to_answer(answer: Mapping[str, Any], found_in: Attribution) -> list[Any]:
    """[text, flags, the documents that hold it if it is wrong, else null]."""
    flags = (CORRECT if answer["correct"] else 0) | (CUT if answer["finish_reason"] == "length" else 0)
    sources = None if answer["correct"] else found_in(answer["text"])
    return [answer["text"], flags, sources]


def document_order(documents: int, slots: Slots, slot_of_rank: Slots = ()) -> list[int]:
    """Which document of an example the prompt shows at each slot: indices among the gold documents, then the others.

    Args:
        documents: number of documents in the prompt.
        slots, slot_of_rank: as in `arrange`, which decides the order.
    """
    numbered = []
    for index in range(documents):
        numbered.append(Document(str(index), "", hop=index if index < len(slots) else None))
    example = Example("order", "", (), tuple(numbered))
    return [int(document.title) for document in arrange(example, documents, slots, slot_of_rank=slot_of_rank)]
