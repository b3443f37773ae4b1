"""Data sets to examples: read, validate, split, draw distractors. The formats are in `formats`."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pos2distill.config import DataSection
from pos2distill.errors import UserError
from pos2distill.randomness import derive_generator, derive_seed
from pos2distill.records import Document, Example
from pos2distill.tasks.formats import PUBLISHED, REASONS, Reason, holds_answer, parse_row, question_id
from pos2distill.tasks.metrics import normalize, sub_exact_match
from pos2distill.tasks.readers import read_rows

_SIDES = ("train", "eval")


@dataclass(frozen=True, slots=True)
class Split:
    """Training and evaluation examples that share no question, and how the rows of the file were used.

    `counts`: rows = train + eval + train_unused + eval_unused + duplicate + each of `formats.REASONS`.
    """

    train: list[Example]
    evaluation: list[Example]
    counts: dict[str, int]


def dataset_name(data: DataSection) -> str:
    """The name that results carry."""
    if data.format == "nq_oracle":
        return "nq-oracle-random-distractors"
    return f"{data.format}-random-distractors" if _draws(data) else data.format


def load_split(data: DataSection, *, documents: int, seed: int) -> Split:
    """Read a data set and choose its training and evaluation examples.

    The side of the split is a hash of the normalised question alone, so the same question never stands on both sides,
    whatever the file, its format, its order or the seed. Within a side, a seeded hash chooses and orders examples.

    Args:
        data: format, path and how many examples are wanted.
        documents: the longest prompt that will be asked for; every example gets or has as many.
        seed: of the choice and of drawn distractors.
    Raises:
        UserError: naming file, row and field, or the side that has too few examples.
    """
    sides, pools, counts = _choose(data, documents, seed)
    for side in _SIDES:
        wanted = getattr(data, f"{side}_examples")
        if len(sides[side]) < wanted:
            passed = ", ".join(f"{counts[reason]} {reason}" for reason in REASONS if counts[reason])
            raise UserError(
                f"{data.path}: {len(sides[side])} {side} examples, but data.{side}_examples asks for {wanted}; "
                f"lower it or move data.eval_fraction ({data.eval_fraction})"
                + (f"; rows passed over: {passed}" if passed else "")
            )
        counts[side] = wanted
    if _draws(data):
        for side in _SIDES:
            # In an order of their own, so that the file's does not matter.
            pool = sorted(pools[side], key=lambda document: (document.title, document.text))
            sides[side] = [
                draw_distractors(example, pool, documents - len(example.documents), seed, data.path)
                for example in sides[side]
            ]
    return Split(sides["train"], sides["eval"], dict(counts))


def _choose(
    data: DataSection, documents: int, seed: int
) -> tuple[dict[str, list[Example]], dict[str, list[Document]], Counter[str]]:
    """By side: the examples chosen, at most as many as wanted; and, if any are drawn, all documents to draw from."""
    chosen: dict[str, list[tuple[int, str, Example]]] = {side: [] for side in _SIDES}
    pools: dict[str, list[Document]] = {side: [] for side in _SIDES}
    counts, question_of, asked = Counter(rows=0, duplicate=0), dict[str, str](), set[str]()
    for example in read_examples(data, documents):
        counts["rows"] += 1
        if isinstance(example, str):
            counts[example] += 1
            continue
        question = question_id(example.question)
        if question_of.setdefault(example.example_id, question) != question:
            raise UserError(f"{data.path}: id {example.example_id!r} stands for two questions; ids must be unique")
        if question in asked:
            counts["duplicate"] += 1
            continue
        asked.add(question)
        side = "eval" if _unit_hash(example.question) < data.eval_fraction else "train"
        if _draws(data):
            pools[side] += example.golds
        # A heap of the smallest ranks: memory holds what is wanted, not the file. Negated, since heapq keeps minima.
        ranked = (-derive_seed(seed, "choose", example.example_id), example.example_id, example)
        if len(chosen[side]) < getattr(data, f"{side}_examples"):
            heapq.heappush(chosen[side], ranked)
        else:
            heapq.heappushpop(chosen[side], ranked)
            counts[f"{side}_unused"] += 1
    if not asked:
        why = "; ".join(f"{counts[reason]} {reason} ({told})" for reason, told in REASONS.items() if counts[reason])
        raise UserError(f"{data.path}: none of {counts['rows']} rows can be used: {why}")
    return {side: [each for *_, each in sorted(chosen[side], reverse=True)] for side in _SIDES}, pools, counts


def read_examples(data: DataSection, documents: int) -> Iterator[Example | Reason]:
    """Yield every row of the file in its order: a valid example, or why the row of a published file is passed over."""
    empty = True
    for place, row in read_rows(data.path):
        where = f"{data.path}, {place}"
        empty = False
        parsed = parse_row(data.format, row, where)
        yield _fit(parsed, data, documents, where) if isinstance(parsed, Example) else parsed
    if empty:
        raise UserError(f"{data.path}: holds no examples")


def draw_distractors(example: Example, pool: list[Document], count: int, seed: int, path: str) -> Example:
    """The example with `count` further distractors, gold documents of other examples, after its own.

    None of them holds an answer or is there already. Of several hops the answers yes and no do not count: they are
    judgements on the gold documents, and nearly every text holds the letters.
    """
    if count <= 0:
        return example
    answers = example.answers
    if len(example.golds) > 1:
        answers = tuple(answer for answer in answers if normalize(answer) not in ("yes", "no"))
    taken = {(document.title, document.text) for document in example.documents}
    drawn: list[Document] = []
    for index in derive_generator(seed, "distractors", example.example_id).permutation(len(pool)):
        document = pool[index]
        if (document.title, document.text) in taken or holds_answer(document, answers):
            continue
        taken.add((document.title, document.text))
        drawn.append(replace(document, hop=None))
        if len(drawn) == count:
            return replace(example, documents=(*example.documents, *drawn))
    raise UserError(f"{path}: only {len(drawn)} of {count} distractors can be drawn for {example.question!r}")


def _draws(data: DataSection) -> bool:
    return data.distractors == "random" or data.format == "nq_oracle"


def _fit(example: Example, data: DataSection, documents: int, where: str) -> Example | Reason:
    """The example if it is what the settings ask for; else the reason, or an error for a file of one's own."""
    _check_words(example, where)
    golds, published = len(example.golds), data.format in PUBLISHED
    if golds not in data.hops:
        if published:
            return "other_hops"
        wanted = "exactly one" if data.hops == (1,) else " or ".join(map(str, sorted(data.hops)))
        raise UserError(
            f"{where}: {golds or 'no'} gold document{'s' if golds > 1 else ''}; expected {wanted}"
            + (f" (data.hops); if that is right, set data.hops=[{golds}]" if data.format == "jsonl" and golds else "")
        )
    if data.answer_in_gold and golds == 1 and not sub_exact_match(example.golds[0].text, example.answers):
        raise UserError(
            f"{where}: the gold document holds none of the answers {list(example.answers)!r:.80}; "
            f"mend the row or set data.answer_in_gold=false"
        )
    if data.format == "nq_oracle":
        return replace(example, documents=example.golds)
    if len(example.documents) < documents and not _draws(data):
        if published:
            return "too_few_documents"
        raise UserError(
            f"{where}: {len(example.documents)} documents, but prompts of {documents} slots are asked for "
            f"(data.documents, evaluation.other_documents); lower them or set data.distractors=random"
        )
    return example


def _check_words(example: Example, where: str) -> None:
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


def _unit_hash(question: str) -> float:
    return derive_seed(0, "split", normalize(question)) / 2**63
