"""Rows of published files, and of one's own, to examples. The table of formats is in docs/data.md.

A row that breaks its format is refused. One that is as published, but of no use here, gives the reason instead.
"""

import difflib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pos2distill.errors import UserError
from pos2distill.records import Document, Example
from pos2distill.tasks.metrics import normalize, sub_exact_match

Reason = Literal[
    "no_answer",
    "no_gold",
    "unanswerable",
    "hop_without_paragraph",
    "shared_paragraph",
    "unclear_support",
    "missing_title",
    "ambiguous_title",
    "other_hops",
    "too_few_documents",
]

REASONS: dict[Reason, str] = {
    "no_answer": "normalisation leaves nothing of the answers",
    "no_gold": "no positive context holds an answer",
    "unanswerable": "marked so",
    "hop_without_paragraph": "a hop names no paragraph",
    "shared_paragraph": "two hops share a paragraph",
    "unclear_support": "the hops and is_supporting name different paragraphs",
    "missing_title": "a supporting title is not in the context",
    "ambiguous_title": "a supporting title stands in the context twice",
    "other_hops": "so many gold documents are not asked for in data.hops",
    "too_few_documents": "shorter than the longest prompt; lower data.documents or set data.distractors=random",
}

# Of these files a user cannot mend a row, so one of no use is passed over and counted.
PUBLISHED = ("dpr", "musique", "hotpotqa", "2wiki")

_GENERIC_FIELDS = {"question", "answers", "documents", "id"}
_GENERIC_DOCUMENT_FIELDS = {"text", "gold", "title", "hop"}

_KINDS: dict[type, str] = {
    str: "text",
    list: "a list",
    bool: "true or false",
    dict: "an object",
    int: "a whole number",
}


def parse_row(form: str, row: dict[str, Any], where: str) -> Example | Reason:
    """The example in a row, its gold documents numbered in hop order, or why it has none.

    Args:
        form: `data.format`.
        where: file and row, for messages.
    Raises:
        UserError: naming the field, what was expected and what came.
    """
    absent = [name for name in _REQUIRED[form] if name not in row]
    if len(absent) > 1:  # no slip of the pen
        told = f"fields {', '.join(absent)} are missing; there is {', '.join(row) or 'nothing'}"
        raise UserError(f"{where}: {told} (is data.format={form} right?)")
    return _PARSERS[form](row, where)


def question_id(question: str) -> str:
    """What stands for a question that has no id: equal for questions that are equal once normalised."""
    return hashlib.sha256(normalize(question).encode()).hexdigest()[:16]


def holds_answer(document: Document, answers: tuple[str, ...]) -> bool:
    """Whether title or text of a document hold an answer."""
    return sub_exact_match(document.text, answers) or sub_exact_match(document.title, answers)


def _parse_lost_in_the_middle(row: dict[str, Any], where: str) -> Example:
    documents, golds = [], 0
    for at, context in _objects(row, "ctxs", where):
        gold = _field(context, "isgold", bool, at)
        documents.append(
            Document(_field(context, "title", str, at), _field(context, "text", str, at), golds if gold else None)
        )
        golds += gold
    question = _field(row, "question", str, where)
    return Example(question_id(question), question, _strings(row, "answers", where), tuple(documents))


def _parse_key_value(row: dict[str, Any], where: str) -> Example:
    key, value = _field(row, "key", str, where), _field(row, "value", str, where)
    documents, golds = [], 0
    for index, record in enumerate(_field(row, "ordered_kv_records", list, where)):
        if not (isinstance(record, list) and len(record) == 2 and all(isinstance(part, str) for part in record)):
            raise UserError(f"{where}, ordered_kv_records[{index}]: expected [key, value], got {record!r:.80}")
        gold = record[0] == key
        documents.append(Document(record[0], record[1], golds if gold else None))
        golds += gold
    return Example(question_id(key), key, (value,), tuple(documents))


def _parse_generic(row: dict[str, Any], where: str) -> Example:
    shown: list[tuple[str, str, bool]] = []
    hops: list[int | None] = []
    for at, document in _objects(row, "documents", where):
        title = _field(document, "title", str, at) if "title" in document else ""
        gold = _field(document, "gold", bool, at)
        hop = _field(document, "hop", int, at) if document.get("hop") is not None else None
        if gold:
            hops.append(hop)
        elif hop is not None:
            raise UserError(f"{at}, hop: {hop}, but the document is not gold; leave hop out or set gold to true")
        shown.append((title, _field(document, "text", str, at), gold))
        _refuse_misspelt(document, _GENERIC_DOCUMENT_FIELDS, at)
    places = list(range(1, len(hops) + 1))
    if any(hop is not None for hop in hops):
        if Counter(hops) != Counter(places):
            raise UserError(
                f"{where}, documents: the gold ones have the hops {hops}; expected each of {places} once, or none"
            )
        places = [hop for hop in hops if hop is not None]
    hop_of = iter(places)  # in file order where the row does not say
    documents = tuple(Document(title, text, next(hop_of) - 1 if gold else None) for title, text, gold in shown)
    question = _field(row, "question", str, where)
    identity = _field(row, "id", str, where) if "id" in row else question_id(question)
    example = Example(identity, question, _strings(row, "answers", where), documents)
    _refuse_misspelt(row, _GENERIC_FIELDS, where)
    return example


def _parse_dpr(row: dict[str, Any], where: str) -> Example | Reason:
    question = _field(row, "question", str, where)
    answers = _telling(_strings(row, "answers", where))
    contexts = {
        name: [
            Document(_field(context, "title", str, at), _field(context, "text", str, at))
            for at, context in _objects(row, name, where)
        ]
        for name in ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
    }
    if not answers:
        return "no_answer"
    gold = next((each for each in contexts["positive_ctxs"] if sub_exact_match(each.text, answers)), None)
    if gold is None:
        return "no_gold"
    negatives = dict.fromkeys(contexts["hard_negative_ctxs"] + contexts["negative_ctxs"])
    distractors = [document for document in negatives if not holds_answer(document, answers)]
    return Example(question_id(question), question, answers, (Document(gold.title, gold.text, 0), *distractors))


def _parse_musique(row: dict[str, Any], where: str) -> Example | Reason:
    identity, question = _field(row, "id", str, where), _field(row, "question", str, where)
    answers = _telling((_field(row, "answer", str, where), *_strings(row, "answer_aliases", where)))
    if not _field(row, "answerable", bool, where):
        return "unanswerable"
    if not answers:
        return "no_answer"
    paragraphs: dict[int, Document] = {}
    supporting = set[int]()
    for at, paragraph in _objects(row, "paragraphs", where):
        index = _field(paragraph, "idx", int, at)
        if index in paragraphs:
            raise UserError(f"{at}, idx: {index} for the second time; expected a number for each paragraph")
        paragraphs[index] = Document(_field(paragraph, "title", str, at), _field(paragraph, "paragraph_text", str, at))
        if _field(paragraph, "is_supporting", bool, at):
            supporting.add(index)
    hops: list[int] = []
    for at, step in _objects(row, "question_decomposition", where):
        if "paragraph_support_idx" in step and step["paragraph_support_idx"] is None:
            return "hop_without_paragraph"
        index = _field(step, "paragraph_support_idx", int, at)
        if index not in paragraphs:
            raise UserError(f"{at}, paragraph_support_idx: {index} is the idx of no paragraph")
        hops.append(index)
    if len(set(hops)) < len(hops):
        return "shared_paragraph"
    if set(hops) != supporting:
        return "unclear_support"
    documents = (
        Document(paragraph.title, paragraph.text, hops.index(index) if index in supporting else None)
        for index, paragraph in paragraphs.items()
    )
    return Example(identity, question, answers, tuple(documents))


def _parse_hotpotqa(row: dict[str, Any], where: str) -> Example | Reason:
    identity = _field(row, "id" if "id" in row and "_id" not in row else "_id", str, where)
    question = _field(row, "question", str, where)
    answers = _telling((_field(row, "answer", str, where),))
    facts = _pairs(row, "supporting_facts", ("title", str), ("sentence", int), where)
    hops = list(dict.fromkeys(title for _, (title, _) in facts))  # in the order of first mention
    documents = []
    for at, (title, sentences) in _pairs(row, "context", ("title", str), ("sentences", list), where):
        for index, sentence in enumerate(sentences):
            _check(sentence, str, f"{at}[1][{index}]")
        text = " ".join(stripped for sentence in sentences if (stripped := sentence.strip()))
        documents.append(Document(title, text, hops.index(title) if title in hops else None))
    found = Counter(document.title for document in documents)
    if not answers:
        return "no_answer"
    if any(not found[title] for title in hops):
        return "missing_title"
    if any(found[title] > 1 for title in hops):
        return "ambiguous_title"
    return Example(identity, question, answers, tuple(documents))


def _parse_2wiki(row: dict[str, Any], where: str) -> Example | Reason:
    _field(row, "evidences", list, where)  # a file of HotpotQA is not taken for this one
    return _parse_hotpotqa(row, where)


_REQUIRED: dict[str, tuple[str, ...]] = {
    "nq": ("question", "answers", "ctxs"),
    "nq_oracle": ("question", "answers", "ctxs"),
    "kv": ("key", "value", "ordered_kv_records"),
    "jsonl": ("question", "answers", "documents"),
    "dpr": ("question", "answers", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs"),
    "musique": ("id", "question", "answer", "answer_aliases", "answerable", "paragraphs", "question_decomposition"),
    "hotpotqa": ("question", "answer", "supporting_facts", "context"),
    "2wiki": ("question", "answer", "supporting_facts", "context", "evidences"),
}

_PARSERS: dict[str, Callable[[dict[str, Any], str], Example | Reason]] = {
    "nq": _parse_lost_in_the_middle,
    "nq_oracle": _parse_lost_in_the_middle,
    "kv": _parse_key_value,
    "jsonl": _parse_generic,
    "dpr": _parse_dpr,
    "musique": _parse_musique,
    "hotpotqa": _parse_hotpotqa,
    "2wiki": _parse_2wiki,
}


def _telling(answers: tuple[str, ...]) -> tuple[str, ...]:
    """The answers of which normalisation leaves something; published files hold others (the band The The)."""
    return tuple(answer for answer in answers if normalize(answer))


def _field(row: dict[str, Any], name: str, kind: type, where: str) -> Any:
    if name not in row:
        near = difflib.get_close_matches(name, row, n=1, cutoff=0.6)
        hint = f"is '{near[0]}' meant to be it?" if near else f"there is {', '.join(row) or 'nothing'}"
        raise UserError(f"{where}: field '{name}' is missing; {hint}{'' if near else ' (is data.format right?)'}")
    _check(row[name], kind, f"{where}, {name}")
    return row[name]


def _refuse_misspelt(row: dict[str, Any], known: set[str], where: str) -> None:
    """Of a row with all it needs: an optional field under a wrong name would be passed over, and nobody would know."""
    for name in row:
        if name not in known and (near := difflib.get_close_matches(name.lower(), known - row.keys(), 1, cutoff=0.8)):
            raise UserError(f"{where}: unknown field '{name}'; is '{near[0]}' meant? If not, call it something else")


def _check(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: expected {_KINDS[kind]}, got {value!r:.80}")


def _strings(row: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    values = _field(row, name, list, where)
    for index, value in enumerate(values):
        _check(value, str, f"{where}, {name}[{index}]")
    return tuple(values)


def _objects(row: dict[str, Any], name: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) for each element of a list of objects."""
    for index, value in enumerate(_field(row, name, list, where)):
        at = f"{where}, {name}[{index}]"
        _check(value, dict, at)
        yield at, value


def _pairs(
    row: dict[str, Any], name: str, first: tuple[str, type], second: tuple[str, type], where: str
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(place, pair) for each element of a list of pairs, whose halves are called and typed so."""
    for index, value in enumerate(_field(row, name, list, where)):
        at = f"{where}, {name}[{index}]"
        if not isinstance(value, list) or len(value) != 2:
            raise UserError(f"{at}: expected [{first[0]}, {second[0]}], got {value!r:.80}")
        for place, (half, (_, kind)) in enumerate(zip(value, (first, second), strict=True)):
            _check(half, kind, f"{at}[{place}]")
        yield at, (value[0], value[1])
