"""Records of published files and of a user's own to examples. docs/data.md describes the formats.

A record that breaks its format is rejected. One that follows it but cannot be used gives the reason instead.
"""

import difflib
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from pos2distill.config.formats import FORMATS
from pos2distill.errors import UserError
from pos2distill.records import Document, Example
from pos2distill.tasks.metrics import mentions, normalize, sub_exact_match

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
    "no_answer": "the answers are empty once normalized",
    "no_gold": "no positive context contains an answer",
    "unanswerable": "marked as unanswerable",
    "hop_without_paragraph": "a hop names no paragraph",
    "shared_paragraph": "two hops need the same paragraph",
    "unclear_support": "the hops and is_supporting name different paragraphs",
    "missing_title": "a supporting title is not in the context",
    "ambiguous_title": "a supporting title is in the context twice",
    "other_hops": "a number of gold documents that is not in data.hops",
    "too_few_documents": "shorter than the longest prompt; lower data.documents or set data.distractors=random",
}

_GENERIC_FIELDS = {"question", "answers", "documents", "id"}
_GENERIC_DOCUMENT_FIELDS = {"text", "gold", "title", "hop", "score"}

# How messages name the types of JSON values.
_TYPE_NAMES: dict[type, str] = {
    str: "text",
    list: "a list",
    bool: "true or false",
    dict: "an object",
    int: "a whole number",
}


def parse_record(form: str, record: dict[str, Any], location: str) -> Example | Reason:
    """The example in a record, its gold documents numbered in hop order, or why it has none.

    Args:
        form: `data.format`.
        location: file and record, for messages.
    Raises:
        UserError: naming the field, what was expected and what came.
    """
    spec = FORMATS[form]
    missing = [name for name in spec.required if name not in record]
    # One missing field is probably misspelled, and its own message says so; several mean another format.
    if len(missing) > 1:
        raise UserError(
            f"{location}: fields {', '.join(missing)} are missing; found fields: {', '.join(record) or 'none'} "
            f"({_format_hint(record, 'is data.format right?')})"
        )
    return PARSERS[spec.parser](record, location)


def _format_hint(record: dict[str, Any], otherwise: str) -> str:
    """A hint for a message: the formats that have the fields of this record, or where the records probably are.

    Args:
        otherwise: the hint where neither is known.
    """
    fitting = [each.name for each in FORMATS.values() if all(name in record for name in each.required)]
    if fitting:
        return f"those of data.format={' or '.join(fitting)}"
    if len(record) == 1:
        ((name, value),) = record.items()
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return f"if the records are in '{name}', write that list alone"
    return otherwise


def question_id(question: str) -> str:
    """The id of a question that has none: equal for questions that are equal once normalized."""
    return hashlib.sha256(normalize(question).encode()).hexdigest()[:16]


def holds_answer(document: Document, answers: Sequence[str]) -> bool:
    """Whether the title or text of a document contains an answer (`mentions`)."""
    return mentions(document.title, answers) or mentions(document.text, answers)


def _parse_lost_in_the_middle(record: dict[str, Any], location: str) -> Example:
    documents = []
    golds = 0
    for at, context in _objects(record, "ctxs", location):
        title, text = _field(context, "title", str, at), _field(context, "text", str, at)
        if _field(context, "isgold", bool, at):
            documents.append(Document(title, text, hop=golds))
            golds += 1
        else:
            documents.append(Document(title, text))
    question = _field(record, "question", str, location)
    return Example(question_id(question), question, _strings(record, "answers", location), tuple(documents))


def _parse_key_value(record: dict[str, Any], location: str) -> Example:
    key, value = _field(record, "key", str, location), _field(record, "value", str, location)
    documents = []
    golds = 0
    for index, pair in enumerate(_field(record, "ordered_kv_records", list, location)):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise UserError(f"{location}, ordered_kv_records[{index}]: expected [key, value], got {pair!r:.80}")
        if pair[0] == key:
            documents.append(Document(pair[0], pair[1], hop=golds))
            golds += 1
        else:
            documents.append(Document(pair[0], pair[1]))
    if not golds:
        raise UserError(f"{location}, key: {key!r:.80} is the key of no pair in ordered_kv_records")
    return Example(question_id(key), key, (value,), tuple(documents))


def _parse_generic(record: dict[str, Any], location: str) -> Example:
    documents: list[Document] = []
    gold_indices: list[int] = []
    hops: list[int | None] = []  # hops of the gold documents, counted from 1 as in the file
    scores: list[float | None] = []
    for at, given in _objects(record, "documents", location):
        title = _field(given, "title", str, at) if "title" in given else ""
        gold = _field(given, "gold", bool, at, hint="every document needs gold: true or false")
        hop = _field(given, "hop", int, at) if given.get("hop") is not None else None
        if gold:
            gold_indices.append(len(documents))
            hops.append(hop)
        elif hop is not None:
            raise UserError(f"{at}, hop: {hop}, but the document is not gold; leave hop out or set gold to true")
        documents.append(Document(title, _field(given, "text", str, at)))
        scores.append(_score(given, at))
        _reject_misspelled(given, _GENERIC_DOCUMENT_FIELDS, at)
    for index, hop in zip(gold_indices, _generic_hops(hops, location), strict=True):
        documents[index] = replace(documents[index], hop=hop)
    documents = _ranked(documents, scores, location)
    question = _field(record, "question", str, location)
    identity = _field(record, "id", str, location) if "id" in record else question_id(question)
    example = Example(identity, question, _strings(record, "answers", location), tuple(documents))
    _reject_misspelled(record, _GENERIC_FIELDS, location)
    return example


def _generic_hops(given: list[int | None], location: str) -> list[int]:
    """The hop of each gold document, counted from 0: as the record says, else in its order."""
    expected = list(range(1, len(given) + 1))
    hops = [hop for hop in given if hop is not None]
    if not hops:
        return list(range(len(given)))
    if Counter(given) != Counter(expected):
        raise UserError(
            f"{location}, documents: the gold ones have the hops {given}; expected each of {expected} once, or none"
        )
    return [hop - 1 for hop in hops]


def _score(document: dict[str, Any], location: str) -> float | None:
    """A retriever's score of a document; None if it has none."""
    score = document.get("score")
    if score is None:
        return None
    # In Python, True is an int, and integers have no largest one.
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if not is_number or not abs(score) <= sys.float_info.max:
        raise UserError(f"{location}, score: expected a number, the higher the better, got {score!r:.80}")
    return float(score)


def _ranked(documents: list[Document], scores: list[float | None], location: str) -> list[Document]:
    """The documents from the highest score to the lowest, equal ones in their order; as they come if none has one."""
    known = [score for score in scores if score is not None]
    if not known:
        return documents
    if len(known) < len(scores):
        raise UserError(
            f"{location}, documents: {len(known)} of {len(scores)} have a score; expected one on each, or on none"
        )
    by_score = sorted(range(len(documents)), key=known.__getitem__, reverse=True)
    return [documents[index] for index in by_score]


def _parse_dpr(record: dict[str, Any], location: str) -> Example | Reason:
    question = _field(record, "question", str, location)
    answers = _nonempty_answers(_strings(record, "answers", location))
    positives = _contexts(record, "positive_ctxs", location)
    negatives = _contexts(record, "hard_negative_ctxs", location) + _contexts(record, "negative_ctxs", location)
    if not answers:
        return "no_answer"
    gold = next((each for each in positives if sub_exact_match(each.text, answers)), None)
    if gold is None:
        return "no_gold"
    # A dictionary and not a set: the order of distractors must be the same in every run.
    unique = dict.fromkeys(negatives)
    distractors = [document for document in unique if not holds_answer(document, answers)]
    return Example(question_id(question), question, answers, (replace(gold, hop=0), *distractors))


def _contexts(record: dict[str, Any], name: str, location: str) -> list[Document]:
    """A list of {title, text}."""
    documents = []
    for at, context in _objects(record, name, location):
        documents.append(Document(_field(context, "title", str, at), _field(context, "text", str, at)))
    return documents


def _parse_musique(record: dict[str, Any], location: str) -> Example | Reason:
    identity, question = _field(record, "id", str, location), _field(record, "question", str, location)
    aliases = _strings(record, "answer_aliases", location)
    answers = _nonempty_answers((_field(record, "answer", str, location), *aliases))
    if not _field(record, "answerable", bool, location):
        return "unanswerable"
    if not answers:
        return "no_answer"
    paragraphs: dict[int, Document] = {}
    supporting = set[int]()
    for at, paragraph in _objects(record, "paragraphs", location):
        number = _field(paragraph, "idx", int, at)
        if number in paragraphs:
            raise UserError(f"{at}, idx: {number} for the second time; expected a number for each paragraph")
        paragraphs[number] = Document(_field(paragraph, "title", str, at), _field(paragraph, "paragraph_text", str, at))
        if _field(paragraph, "is_supporting", bool, at):
            supporting.add(number)
    hops: list[int] = []  # the number of each hop's paragraph
    for at, step in _objects(record, "question_decomposition", location):
        # null means a hop without support, so the record is skipped. A missing field is rejected by `_field`.
        if "paragraph_support_idx" in step and step["paragraph_support_idx"] is None:
            return "hop_without_paragraph"
        number = _field(step, "paragraph_support_idx", int, at)
        if number not in paragraphs:
            raise UserError(f"{at}, paragraph_support_idx: {number} is the idx of no paragraph")
        hops.append(number)
    if len(set(hops)) < len(hops):
        return "shared_paragraph"
    if set(hops) != supporting:
        return "unclear_support"
    for hop, number in enumerate(hops):
        paragraphs[number] = replace(paragraphs[number], hop=hop)
    return Example(identity, question, answers, tuple(paragraphs.values()))


def _parse_hotpotqa(record: dict[str, Any], location: str) -> Example | Reason:
    # Some copies of HotpotQA name this field `id`; the original is `_id`.
    identity = _field(record, "id" if "id" in record and "_id" not in record else "_id", str, location)
    question = _field(record, "question", str, location)
    answers = _nonempty_answers((_field(record, "answer", str, location),))
    # On the hub, each of these two is an object of lists.
    record = _with_pairs(record, "supporting_facts", ("title", "sent_id"), location)
    record = _with_pairs(record, "context", ("title", "sentences"), location)
    facts = [fact for _, fact in _pairs(record, "supporting_facts", ("title", str), ("sentence", int), location)]
    hops = list(dict.fromkeys(title for title, _ in facts))  # the titles in the order of their first mention
    documents = []
    for at, (title, sentences) in _pairs(record, "context", ("title", str), ("sentences", list), location):
        for index, sentence in enumerate(sentences):
            _check(sentence, str, f"{at}[1][{index}]")
        stripped = [sentence.strip() for sentence in sentences]
        text = " ".join(sentence for sentence in stripped if sentence)
        documents.append(Document(title, text, hops.index(title) if title in hops else None))
    # Reasons come after all fields were read, so that a record that breaks the format is never just skipped.
    found = Counter(document.title for document in documents)
    if not answers:
        return "no_answer"
    if any(not found[title] for title in hops):
        return "missing_title"
    if any(found[title] > 1 for title in hops):
        return "ambiguous_title"
    return Example(identity, question, answers, tuple(documents))


def _parse_2wiki(record: dict[str, Any], location: str) -> Example | Reason:
    _field(record, "evidences", list, location)  # files of HotpotQA do not have this field
    return _parse_hotpotqa(record, location)


PARSERS: dict[str, Callable[[dict[str, Any], str], Example | Reason]] = {
    "lost_in_the_middle": _parse_lost_in_the_middle,
    "key_value": _parse_key_value,
    "generic": _parse_generic,
    "dpr": _parse_dpr,
    "musique": _parse_musique,
    "hotpotqa": _parse_hotpotqa,
    "2wiki": _parse_2wiki,
}
"""The parsers by the name that `Format.parser` has in the table of formats."""


def _nonempty_answers(answers: tuple[str, ...]) -> tuple[str, ...]:
    """The answers that are not empty once normalized; published files have empty ones (the band The The)."""
    return tuple(answer for answer in answers if normalize(answer))


# Fields of the published formats that have similar names. None of them is a misspelling of another one.
_SIMILAR_FIELDS = frozenset({"positive_ctxs", "negative_ctxs", "hard_negative_ctxs", "answerable", "answer_aliases"})


def _field(record: dict[str, Any], name: str, kind: type, location: str, *, hint: str = "") -> Any:
    """The value of a field, if it is there and of this type. hint: to append if it is missing."""
    if name not in record:
        defined = _SIMILAR_FIELDS | ({"answer", "answers"} if name in _SIMILAR_FIELDS else set())
        others = [found for found in record if found not in defined]
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
        if near:
            raise UserError(f"{location}: field '{name}' is missing, but there is '{near[0]}'; rename it")
        found = ", ".join(record) or "none"
        hint = hint or f"if one of them holds it, rename it to '{name}', or set another data.format"
        raise UserError(f"{location}: field '{name}' is missing; found fields: {found} ({_format_hint(record, hint)})")
    _check(record[name], kind, f"{location}, {name}")
    return record[name]


def _reject_misspelled(record: dict[str, Any], known: set[str], location: str) -> None:
    """Reject a field that looks like a misspelled optional one, since it would be ignored silently."""
    absent = known - record.keys()
    for name in record:
        if name in known:
            continue
        # A higher cutoff than in `_field`, since a user's own file may have further fields of any name.
        near = difflib.get_close_matches(name.lower(), absent, n=1, cutoff=0.8)
        if near:
            raise UserError(f"{location}: unknown field '{name}'; did you mean '{near[0]}'? If not, rename it")


def _check(value: Any, kind: type, location: str) -> None:
    # In Python, True is an int.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        shown = "null" if value is None else f"{value!r:.80}"
        raise UserError(f"{location}: expected {_TYPE_NAMES[kind]}, got {shown}")


def _strings(record: dict[str, Any], name: str, location: str) -> tuple[str, ...]:
    single = record.get(name)
    if isinstance(single, str):
        hint = "put it in a list"
        # As pandas and spreadsheets write lists. In a list, the brackets would be a part of an answer.
        text = single.strip()
        if text.startswith("[") and text.endswith("]"):
            hint = "it is a list that became text; write a JSON list"
        raise UserError(f"{location}, {name}: expected a list, got {single!r:.80}; {hint}")
    values = _field(record, name, list, location)
    for index, value in enumerate(values):
        _check(value, str, f"{location}, {name}[{index}]")
    return tuple(values)


def _objects(record: dict[str, Any], name: str, location: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(location, object) for each element of a list of objects."""
    for index, value in enumerate(_field(record, name, list, location)):
        at = f"{location}, {name}[{index}]"
        _check(value, dict, at)
        yield at, value


def _with_pairs(record: dict[str, Any], name: str, columns: tuple[str, str], location: str) -> dict[str, Any]:
    """The record with a list of pairs in this field, where it has an object of two lists."""
    value = record.get(name)
    if not isinstance(value, dict) or not value.keys() >= set(columns):
        return record
    first, second = (_field(value, column, list, f"{location}, {name}") for column in columns)
    if len(first) != len(second):
        raise UserError(
            f"{location}, {name}: {columns[0]} has {len(first)} elements and {columns[1]} {len(second)}; expected "
            f"equally many"
        )
    return {**record, name: [list(pair) for pair in zip(first, second, strict=True)]}


def _pairs(
    record: dict[str, Any], name: str, first: tuple[str, type], second: tuple[str, type], location: str
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(location, pair) for each element of a list of pairs. `first`, `second`: name and type of the pair's parts."""
    for index, value in enumerate(_field(record, name, list, location)):
        at = f"{location}, {name}[{index}]"
        if not isinstance(value, list) or len(value) != 2:
            raise UserError(f"{at}: expected [{first[0]}, {second[0]}], got {value!r:.80}")
        _check(value[0], first[1], f"{at}[0]")
        _check(value[1], second[1], f"{at}[1]")
        yield at, (value[0], value[1])
