"""Published data sets to examples: parse, validate, split, draw distractors.

Formats: `nq` (Lost in the Middle, documents in the file), `nq_oracle` (gold document only; distractors are the gold
documents of other questions, easier than retrieved ones, so results are named `nq-oracle-random-distractors`), `kv`
(key-value retrieval), `jsonl` (ours: question, answers, documents[{title, text, gold}]).
"""

import difflib
import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pos2distill.config import DataSection
from pos2distill.errors import UserError
from pos2distill.randomness import derive_generator, derive_seed
from pos2distill.records import Document, Example
from pos2distill.tasks.judge import normalize, sub_exact_match
from pos2distill.tasks.readers import read_jsonl

_KINDS = {str: "text", list: "a list", bool: "true or false", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Split:
    """Training and evaluation examples that share no question, and how the rows of the file were used.

    `counts`: rows = duplicate + train_unused + evaluation_unused + train + evaluation.
    """

    train: list[Example]
    evaluation: list[Example]
    counts: dict[str, int]


def dataset_name(data: DataSection) -> str:
    """The name that results carry."""
    return "nq-oracle-random-distractors" if data.format == "nq_oracle" else data.format


def load_split(data: DataSection, *, documents: int, seed: int) -> Split:
    """Read a data set and choose its training and evaluation examples.

    The side of the split is a hash of the normalised question alone, so the same question never stands on both sides,
    whatever the file, its order or the seed. Within a side, examples are chosen and ordered by a seeded hash.

    Args:
        data: format, path and how many examples are wanted.
        documents: the longest prompt that will be asked for; every example must have as many.
        seed: of the choice and of drawn distractors.
    Raises:
        UserError: naming file, line and field, or the side that has too few examples.
    """
    wanted = {"train": data.train_examples, "evaluation": data.evaluation_examples}
    chosen: dict[str, list[tuple[int, str, Example]]] = {side: [] for side in wanted}
    golds: dict[str, list[Document]] = {side: [] for side in wanted}
    counts, question_of, asked = Counter(rows=0, duplicate=0), dict[str, str](), set[str]()
    for example in read_examples(data, documents):
        counts["rows"] += 1
        question = _question_id(example.question)
        if question_of.setdefault(example.example_id, question) != question:
            raise UserError(f"{data.path}: id {example.example_id!r} stands for two questions; ids must be unique")
        if question in asked:
            counts["duplicate"] += 1
            continue
        asked.add(question)
        side = "evaluation" if _unit_hash(example.question) < data.evaluation_share else "train"
        golds[side].append(example.gold)
        # A heap of the smallest ranks: memory holds what is wanted, not the file. Negated, since heapq keeps minima.
        ranked = (-derive_seed(seed, "choose", example.example_id), example.example_id, example)
        if len(chosen[side]) < wanted[side]:
            heapq.heappush(chosen[side], ranked)
        else:
            heapq.heappushpop(chosen[side], ranked)
            counts[f"{side}_unused"] += 1
    for side, count in wanted.items():
        if len(chosen[side]) < count:
            raise UserError(
                f"{data.path}: {len(chosen[side])} {side} examples, but data.{side}_examples asks for {count}; "
                f"lower it or move data.evaluation_share ({data.evaluation_share})"
            )
        counts[side] = count
    sides = {side: [example for *_, example in sorted(ranked, reverse=True)] for side, ranked in chosen.items()}
    if data.format == "nq_oracle":
        sides = {
            side: [draw_distractors(example, pool, documents - 1, seed, data.path) for example in examples]
            for side, examples in sides.items()
            # In an order of their own, so that the file's does not matter.
            for pool in [sorted(golds[side], key=lambda document: (document.title, document.text))]
        }
    return Split(sides["train"], sides["evaluation"], dict(counts))


def read_examples(data: DataSection, documents: int) -> Iterator[Example]:
    """Yield every row of the file as a valid example, in file order."""
    parse = _PARSERS[data.format]
    empty = True
    for number, row in read_jsonl(data.path):
        where = f"{data.path}, line {number}"
        example = parse(row, where)
        _validate(example, where, answer_in_gold=data.answer_in_gold)
        if data.format != "nq_oracle" and len(example.documents) < documents:
            raise UserError(
                f"{where}: {len(example.documents)} documents, but prompts of {documents} slots are asked for "
                f"(data.documents, evaluation.other_documents)"
            )
        empty = False
        yield example
    if empty:
        raise UserError(f"{data.path}: holds no examples")


def draw_distractors(example: Example, pool: list[Document], count: int, seed: int, path: str) -> Example:
    """The example with `count` distractors drawn from other examples' gold documents, none of which holds an answer."""
    order = derive_generator(seed, "distractors", example.example_id).permutation(len(pool))
    taken = {(example.gold.title, example.gold.text)}
    drawn: list[Document] = []
    for index in order:
        document = pool[index]
        if (document.title, document.text) in taken or sub_exact_match(document.text, example.answers):
            continue
        taken.add((document.title, document.text))
        drawn.append(replace(document, gold=False))
        if len(drawn) == count:
            return replace(example, documents=(example.gold, *drawn))
    raise UserError(f"{path}: only {len(drawn)} of {count} distractors can be drawn for {example.question!r}")


def _parse_lost_in_the_middle(row: dict[str, Any], where: str) -> Example:
    documents = []
    for index, context in enumerate(_field(row, "ctxs", list, where)):
        at = f"{where}, ctxs[{index}]"
        _check(context, dict, at)
        gold = _field(context, "isgold", bool, at)
        documents.append(Document(_field(context, "title", str, at), _field(context, "text", str, at), gold))
    question = _field(row, "question", str, where)
    return Example(_question_id(question), question, _strings(row, "answers", where), tuple(documents))


def _parse_key_value(row: dict[str, Any], where: str) -> Example:
    key, value = _field(row, "key", str, where), _field(row, "value", str, where)
    documents = []
    for index, record in enumerate(_field(row, "ordered_kv_records", list, where)):
        if not (isinstance(record, list) and len(record) == 2 and all(isinstance(part, str) for part in record)):
            raise UserError(f"{where}, ordered_kv_records[{index}]: expected [key, value], got {record!r:.80}")
        documents.append(Document(record[0], record[1], gold=record[0] == key))
    return Example(_question_id(key), key, (value,), tuple(documents))


def _parse_generic(row: dict[str, Any], where: str) -> Example:
    documents = []
    for index, document in enumerate(_field(row, "documents", list, where)):
        at = f"{where}, documents[{index}]"
        _check(document, dict, at)
        title = _field(document, "title", str, at) if "title" in document else ""
        documents.append(Document(title, _field(document, "text", str, at), _field(document, "gold", bool, at)))
    question = _field(row, "question", str, where)
    identity = _field(row, "id", str, where) if "id" in row else _question_id(question)
    return Example(identity, question, _strings(row, "answers", where), tuple(documents))


_PARSERS: dict[str, Callable[[dict[str, Any], str], Example]] = {
    "nq": _parse_lost_in_the_middle,
    "nq_oracle": _parse_lost_in_the_middle,
    "kv": _parse_key_value,
    "jsonl": _parse_generic,
}


def _validate(example: Example, where: str, *, answer_in_gold: bool) -> None:
    if not example.question.strip():
        raise UserError(f"{where}, question: empty")
    if not example.answers:
        raise UserError(f"{where}, answers: empty; expected at least one answer")
    if any(not answer.strip() for answer in example.answers):
        raise UserError(f"{where}, answers: one is blank; expected text")
    if not any(normalize(answer) for answer in example.answers):
        raise UserError(
            f"{where}, answers: {list(example.answers)!r:.80} are all empty once normalised; expected words"
        )
    golds = sum(document.gold for document in example.documents)
    if golds != 1:
        raise UserError(f"{where}: {golds or 'no'} gold document{'s' if golds > 1 else ''}; expected exactly one")
    if answer_in_gold and not sub_exact_match(example.gold.text, example.answers):
        raise UserError(
            f"{where}: the gold document holds none of the answers {list(example.answers)!r:.80}; "
            f"mend the row or set data.answer_in_gold=false"
        )


def _field(row: dict[str, Any], name: str, kind: type, where: str) -> Any:
    if name not in row:
        near = difflib.get_close_matches(name, row, n=1, cutoff=0.6)
        hint = f"is '{near[0]}' meant to be it?" if near else f"there is {', '.join(row) or 'nothing'}"
        raise UserError(f"{where}: field '{name}' is missing; {hint}{'' if near else ' (is data.format right?)'}")
    _check(row[name], kind, f"{where}, {name}")
    return row[name]


def _check(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise UserError(f"{where}: expected {_KINDS[kind]}, got {value!r:.80}")


def _strings(row: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    values = _field(row, name, list, where)
    for index, value in enumerate(values):
        _check(value, str, f"{where}, {name}[{index}]")
    return tuple(values)


def _question_id(question: str) -> str:
    return hashlib.sha256(normalize(question).encode()).hexdigest()[:16]


def _unit_hash(question: str) -> float:
    return derive_seed(0, "split", normalize(question)) / 2**63
