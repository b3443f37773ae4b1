"""Data sets to examples: read, validate, split, draw distractors. The formats are in `formats`."""

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pos2distill.config import DataSection
from pos2distill.config.formats import data_name
from pos2distill.errors import UserError
from pos2distill.literal_paths import last_part
from pos2distill.randomness import derive_generator, derive_seed
from pos2distill.records import Document, Example
from pos2distill.tasks.formats import REASONS, Reason, holds_answer, parse_record, question_id
from pos2distill.tasks.metrics import normalize, sub_exact_match
from pos2distill.tasks.readers import read_records
from pos2distill.tasks.spill import ExampleFile, StoredExamples

Side = Literal["train", "eval"]
_SIDES: tuple[Side, ...] = ("train", "eval")
# Characters that a keyboard writes in another way than a printed text.
_TYPEWRITER = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")
_ENDS_OF_QUESTIONS = " ?.!\uff1f\u3002\uff01\u061f"


@dataclass(frozen=True, slots=True)
class Split:
    """Training and evaluation examples without a common question, and how many records were used or skipped.

    The examples are in a temporary file: memory holds those that are accessed.

    Attributes:
        counts: records = train + eval + train_unused + eval_unused + duplicate + each of `formats.REASONS`; and for one
            hop answer_in_distractor, of the evaluation examples those with an answer in a document that is not gold.
        locations: where the file has each example, by its id, such as `data.jsonl, line 3`.
    """

    train: Sequence[Example]
    evaluation: Sequence[Example]
    counts: dict[str, int]
    locations: dict[str, str]


def dataset_name(data: DataSection) -> str:
    """The name that results carry: that of the published format, or of one's own file."""
    if data.format == "nq_oracle":
        return "nq-oracle-random-distractors"
    name = data_name(data.path) if data.format == "jsonl" else data.format
    return f"{name}-random-distractors" if _draws_distractors(data) else name


def load_split(data: DataSection, *, documents: int, seed: int, eval_seed: int | None = None) -> Split:
    """Read a data set and choose its training and evaluation examples.

    The side of the split is a hash of the normalized question alone, so the same question is never on both sides,
    whatever the file, its format, its order or the seed. Within a side, a seeded hash chooses and orders examples.

    Memory holds one record at a time, besides a hash of each question; where distractors are drawn, also the gold
    documents of all records.

    Args:
        data: format, path and how many examples are needed.
        documents: number of documents in the longest prompt; every example has or gets as many.
        seed: seed for the choice of the training examples and for their drawn distractors.
        eval_seed: seed for the evaluation examples and their distractors. Default: the same.
    Raises:
        UserError: naming file, record and field, or the side that has too few examples.
    """
    seeds: dict[Side, int] = {"train": seed, "eval": seed if eval_seed is None else eval_seed}
    selection = _ExampleSelection(data, seeds)
    for location, example in _located_examples(data, documents):
        selection.add(example, location)
    selection.check_any_usable()
    sides = {side: selection.chosen(side) for side in _SIDES}
    if _draws_distractors(data):
        sides = {side: _fill_up(sides[side], selection.pools[side], data, documents, seeds[side]) for side in _SIDES}
    counts = dict(selection.counts)
    # With several hops, an answer in another document may be an intermediate step.
    if data.hops == (1,):
        counts["answer_in_distractor"] = sum(_has_answer_in_distractor(each, documents) for each in sides["eval"])
    return Split(sides["train"], sides["eval"], counts, selection.locations())


@dataclass(slots=True)
class _ExampleSelection:
    """The examples chosen so far, by side, and the counts of records.

    Attributes:
        ranked: for each side, a heap with at most as many entries as examples are needed; each is (-rank, id, offset in
            the temporary file, location in the data set's). The rank is a seeded hash, and the smallest ones are
            chosen. It is negated because heapq drops the smallest.
    """

    data: DataSection
    seeds: Mapping[Side, int]
    counts: Counter[str] = field(default_factory=lambda: Counter(records=0, duplicate=0))
    pools: dict[Side, list[Document]] = field(default_factory=lambda: {side: [] for side in _SIDES})
    ranked: dict[Side, list[tuple[int, str, int, str]]] = field(default_factory=lambda: {side: [] for side in _SIDES})
    question_of: dict[str, str] = field(default_factory=dict)
    questions: set[str] = field(default_factory=set)
    file: ExampleFile = field(default_factory=ExampleFile)

    def add(self, example: Example | Reason, location: str) -> None:
        self.counts["records"] += 1
        if isinstance(example, str):
            self.counts[example] += 1
            return
        if self._is_duplicate(example, location):
            self.counts["duplicate"] += 1
            return
        side: Side = "eval" if _unit_hash(example.question) < self.data.eval_fraction else "train"
        if _draws_distractors(self.data):
            # One pool for each side, so that evaluation prompts draw no training example's gold document.
            self.pools[side] += example.golds
        self._rank(side, example, location)

    def _is_duplicate(self, example: Example, location: str) -> bool:
        key = _question_key(example)
        known = self.question_of.setdefault(example.example_id, key)
        if known != key:
            where = f"{self.data.path}, {location}"
            raise UserError(f"{where}: id {example.example_id!r} is that of another question too; ids must be unique")
        is_duplicate = key in self.questions
        self.questions.add(key)
        return is_duplicate

    def _rank(self, side: Side, example: Example, location: str) -> None:
        heap = self.ranked[side]
        # From the id alone, so that the choice does not depend on the order of the file.
        rank = -derive_seed(self.seeds[side], "choose", example.example_id)
        if len(heap) < self._limit(side):
            heapq.heappush(heap, (rank, example.example_id, self.file.append(example), location))
            return
        self.counts[f"{side}_unused"] += 1
        if not heap:  # no example of this side is needed
            return
        # Only an example that is chosen goes to the file.
        if (rank, example.example_id) > heap[0][:2]:
            heapq.heapreplace(heap, (rank, example.example_id, self.file.append(example), location))

    def _limit(self, side: Side) -> int:
        """The most examples of a side that are chosen."""
        return self.data.train_candidates if side == "train" else self.data.eval_examples

    def check_any_usable(self) -> None:
        if self.questions:
            return
        reasons = []
        for reason, meaning in REASONS.items():
            if self.counts[reason]:
                reasons.append(f"{self.counts[reason]} {reason} ({meaning})")
        raise UserError(f"{self.data.path}: none of {self.counts['records']} records can be used: {'; '.join(reasons)}")

    def chosen(self, side: Side) -> StoredExamples:
        """The examples of a side in the order of their ranks."""
        heap = self.ranked[side]
        needed = self.data.train_examples if side == "train" else self.data.eval_examples
        if len(heap) < needed:
            # Duplicates too: a file that repeats its questions has fewer examples than records.
            reasons = [reason for reason in ("duplicate", *REASONS) if self.counts[reason]]
            skipped = ", ".join(f"{self.counts[reason]} {reason}" for reason in reasons)
            asking = "data.train_examples" if side == "train" else "data.eval_examples (or --examples with --model)"
            fraction = self.data.eval_fraction
            # With this fraction, the side has every example already.
            largest_fraction = 1 if side == "eval" else 0
            other_remedy = ""
            if fraction != largest_fraction:
                other_remedy = f" or change data.eval_fraction ({fraction})"
            raise UserError(
                f"{self.data.path}: {len(heap)} {side} examples, but {asking} asks for {needed}; "
                f"lower it{other_remedy}" + (f"; records skipped: {skipped}" if skipped else "")
            )
        self.counts[side] = len(heap)
        # Ranks are negated, so the reverse order begins with the smallest hash.
        return StoredExamples(self.file, [offset for _, _, offset, _ in sorted(heap, reverse=True)])

    def locations(self) -> dict[str, str]:
        """Where the chosen examples of both sides are, by id."""
        file = last_part(self.data.path)
        return {
            example_id: f"{file}, {location}" for side in _SIDES for _, example_id, _, location in self.ranked[side]
        }


def read_examples(data: DataSection, documents: int) -> Iterator[Example | Reason]:
    """Yield every record of the file in its order: a valid example, or why the record is skipped."""
    for _, example in _located_examples(data, documents):
        yield example


def count_questions(data: DataSection, documents: int, most: int) -> int:
    """How many different questions of a file can be evaluated, up to `most`. No more records are read than it takes."""
    questions: set[str] = set()
    for example in read_examples(data, documents):
        if isinstance(example, Example) and _unit_hash(example.question) < data.eval_fraction:
            questions.add(_question_key(example))
        if len(questions) == most:
            break
    return len(questions)


def _located_examples(data: DataSection, documents: int) -> Iterator[tuple[str, Example | Reason]]:
    """`read_examples` with each record's location in the file."""
    empty = True
    for record_location, record in read_records(data.path):
        location = f"{data.path}, {record_location}"
        empty = False
        parsed = parse_record(data.format, record, location)
        fitted = _fit(parsed, data, documents, location) if isinstance(parsed, Example) else parsed
        yield record_location, fitted
    if empty:
        raise UserError(f"{data.path}: holds no examples; expected a record for each question (docs/data.md)")


def _has_answer_in_distractor(example: Example, documents: int) -> bool:
    """Whether a prompt of this many documents has an answer in another one than the gold one."""
    return any(holds_answer(document, example.answers) for document in example.distractors[: documents - 1])


def draw_distractors(example: Example, pool: Sequence[Document], count: int, seed: int, path: str) -> Example:
    """The example with `count` further distractors, gold documents of other examples, after its own.

    None of them holds an answer or is in the example already.
    """
    if count <= 0:
        return example
    taken = {(document.title, document.text) for document in example.documents}
    drawn: list[Document] = []
    with_answer = 0
    for index in derive_generator(seed, "distractors", example.example_id).permutation(len(pool)):
        document = pool[index]
        if (document.title, document.text) in taken:
            continue
        if holds_answer(document, example.answers):
            with_answer += 1
            continue
        taken.add((document.title, document.text))
        # It was a gold document of its own question; here it is a distractor.
        drawn.append(replace(document, hop=None))
        if len(drawn) == count:
            return replace(example, documents=(*example.documents, *drawn))
    raise UserError(
        f"{path}: only {len(drawn)} of {count} distractors can be drawn for {example.question!r} "
        f"from the gold documents on its side of the split (data.eval_fraction; it has {len(pool)}, {with_answer} of "
        f"them with an answer to this question); add records, or "
        f"lower the documents of a prompt to {len(example.documents) + len(drawn)} (data.documents, or --documents "
        f"with --model; evaluation.other_documents)"
    )


def _fill_up(
    examples: Sequence[Example], pool: Sequence[Document], data: DataSection, documents: int, seed: int
) -> StoredExamples:
    """The examples with drawn distractors, as many as the longest prompt needs."""
    # Sorted, so that the draw does not depend on the order of the file.
    ordered = sorted(pool, key=lambda document: (document.title, document.text))
    file = ExampleFile()
    offsets = []
    for example in examples:
        filled = draw_distractors(example, ordered, documents - len(example.documents), seed, data.path)
        offsets.append(file.append(filled))
    return StoredExamples(file, offsets)


def _draws_distractors(data: DataSection) -> bool:
    return data.distractors == "random" or data.spec.keeps_gold_only


def _fit(example: Example, data: DataSection, documents: int, location: str) -> Example | Reason:
    """The example if it meets the settings; else the reason to skip it, or an error if the file is the user's own."""
    _check_words(example, location)
    golds = len(example.golds)
    if golds not in data.hops:
        if data.spec.skips_unusable:
            return "other_hops"
        raise UserError(_wrong_hops(golds, data, location))
    if not data.spec.skips_unusable and any(not gold.text.strip() for gold in example.golds):
        raise UserError(f"{location}: the text of a gold document is empty")
    if data.answer_in_gold and golds == 1 and not sub_exact_match(example.golds[0].text, example.answers):
        raise UserError(
            f"{location}: the gold document contains none of the answers {list(example.answers)!r:.80}; "
            f"correct the record or set data.answer_in_gold=false"
        )
    if data.spec.keeps_gold_only:
        return replace(example, documents=example.golds)
    if not data.spec.skips_unusable:
        _check_distractors(example, documents, location, may_be_alike=_draws_distractors(data))
    if len(example.documents) < documents and not _draws_distractors(data):
        if data.spec.skips_unusable:
            return "too_few_documents"
        raise UserError(
            f"{location}: documents: found {len(example.documents)}, but prompts of {documents} slots are asked for "
            f"(data.documents, or --documents with --model; evaluation.other_documents); set data.distractors=random, "
            f"or ask for fewer"
        )
    return example


def _check_distractors(example: Example, documents: int, location: str, *, may_be_alike: bool) -> None:
    """Reject distractors among which the position of a gold document means nothing.

    Args:
        documents: how many a prompt shows; only the distractors among them are checked.
        may_be_alike: whether all may be empty or the same, since further ones will be drawn.
    """
    golds = [(gold.title, gold.text) for gold in example.golds]
    shown = example.distractors[: max(0, documents - len(golds))]
    texts = [(document.title, document.text) for document in shown]
    for title, text in texts:
        if (title, text) in golds:
            raise UserError(f"{location}: a distractor is the same as a gold document ({text!r:.80}); remove it")
    if may_be_alike:
        return
    if texts and not any(text.strip() for _, text in texts):
        raise UserError(f"{location}: the texts of all distractors are empty; expected text")
    if len(texts) > 1 and len(set(texts)) == 1:
        raise UserError(f"{location}: all {len(texts)} distractors are the same; expected different ones")


def _wrong_hops(golds: int, data: DataSection, location: str) -> str:
    """The message for a record with another number of gold documents than `data.hops` has."""
    expected = "exactly one" if data.hops == (1,) else " or ".join(map(str, sorted(data.hops)))
    message = f"{location}: {golds or 'no'} gold document{'s' if golds > 1 else ''}; expected {expected}"
    if data.spec.hops == "any" and golds:
        message += f" (data.hops); if that is right, set data.hops=[{golds}]"
    return message


def _check_words(example: Example, location: str) -> None:
    if not example.question.strip():
        raise UserError(f"{location}, question: empty")
    if not example.answers:
        raise UserError(f"{location}, answers: empty; expected at least one answer")
    if any(not answer.strip() for answer in example.answers):
        raise UserError(f"{location}, answers: one is blank; expected text")
    # Metrics compare normalized texts, so no response could match such answers.
    if not any(normalize(answer) for answer in example.answers):
        raise UserError(
            f"{location}, answers: {list(example.answers)!r:.80} are all empty once normalized; expected words"
        )


def _question_key(example: Example) -> str:
    """Equal for examples that ask the same question; short, since those of all questions of a file stay in memory.

    Of examples with an id of their own only capitals, blanks, the shape of quotes and dashes and what ends a question
    are ignored: "C", "C++" and "C#" are three questions, which normalized text does not tell apart.
    """
    normalized = question_id(example.question)
    if example.example_id == normalized:
        return normalized
    plain = " ".join(example.question.casefold().translate(_TYPEWRITER).split()).rstrip(_ENDS_OF_QUESTIONS)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _unit_hash(question: str) -> float:
    # Always seed 0: with another seed of the study, a question must not move to the other side.
    return derive_seed(0, "split", normalize(question)) / 2**63
