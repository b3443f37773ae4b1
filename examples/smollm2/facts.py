"""Write questions about fictional encyclopedia entries, in the project's own data format (docs/data.md).

Each record has a question, its answer, the one entry that holds the answer, and distractors: entries about other
subjects, half of them of the same kind (a person, a place, a work or an event). Every name is coined, so a model can
answer only from the prompt. No entry occurs in two records, and a record is a function of (seed, its index) alone.

The records are a test bed for position bias on a small real model. They represent no published benchmark and no real
text, and results on them must be reported under their own name.

Example:
  python -m examples.smollm2.facts runs/facts.jsonl.gz --records 600 --documents 20 --seed 0
"""

import argparse
import gzip
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TypedDict

from examples.smollm2.errors import EXPECTED, report
from examples.smollm2.phrases import FIRST_NAMES, KINDS, PLACE_ENDINGS, STEMS, SURNAME_ENDINGS, Fact, Kind, ValueType
from pos2distill.errors import UserError
from pos2distill.randomness import derive_seed

# Every record has its own subject. Places have the fewest names: 560, and every fourth record needs one.
MAX_RECORDS = 2000
MAX_DOCUMENTS = 40
# With three, a model of 135M parameters often copied the entry to the limit of tokens before it reached the answer.
FACTS_PER_ENTRY = 2
FIRST_YEAR, LAST_YEAR = 1500, 1949
SMALLEST_COUNT, LARGEST_COUNT = 101, 989


class Document(TypedDict):
    """One document of a record."""

    title: str
    text: str
    gold: bool


class Record(TypedDict):
    """One line of the file."""

    id: str
    question: str
    answers: list[str]
    documents: list[Document]


@dataclass(frozen=True)
class Subject:
    """What an entry is about."""

    kind: Kind
    name: str
    role: str

    def fill(self, template: str, value: str = "") -> str:
        """The template with the subject's name and role and the value in its fields; its first letter is a capital."""
        text = template.format(name=self.name, role=self.role, value=value)
        return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Entry:
    """An encyclopedia entry: its subject, its text, and the facts that the text states with their values."""

    subject: Subject
    text: str
    values: dict[Fact, str]


@lru_cache
def subject_names(kind_name: str, seed: int) -> tuple[str, ...]:
    """All names of subjects of one kind, in the order in which the records of this seed ask about them."""
    kind = next(kind for kind in KINDS if kind.name == kind_name)
    places = [stem + ending for stem, ending in itertools.product(STEMS, PLACE_ENDINGS)]
    surnames = [stem + ending for stem, ending in itertools.product(STEMS, SURNAME_ENDINGS)]
    if kind.name == "place":
        names = places
    elif kind.name == "person":
        names = [f"{first} {last}" for first, last in itertools.product(FIRST_NAMES, surnames)]
    else:
        names = []
        for title in kind.titles:
            owners = places if "{place}" in title else surnames
            names += [title.format(place=owner, person=owner) for owner in owners]
    Random(derive_seed(seed, "names", kind.name)).shuffle(names)
    return tuple(names)


class ValuePool:
    """Draws the names and values of one record, so that no text of another entry holds the answer.

    No drawn value contains another one: "412" excludes the year "1412".
    """

    def __init__(self, random: Random, taken: str) -> None:
        self.random = random
        self.taken = [taken]

    def draw(self, value_type: ValueType) -> str:
        """A value that the record does not hold yet."""
        if value_type == "year":
            return self._draw(lambda: str(self.random.randint(FIRST_YEAR, LAST_YEAR)))
        if value_type == "count":
            return self._draw(lambda: str(self.random.randint(SMALLEST_COUNT, LARGEST_COUNT)))
        return self.draw_name(value_type)

    def draw_name(self, kind_name: str) -> str:
        """A name of a subject of this kind that the record does not hold yet."""
        # Any fixed order of the names will do, since they are drawn at random.
        names = subject_names(kind_name, 0)
        return self._draw(lambda: self.random.choice(names))

    def _draw(self, draw: Callable[[], str]) -> str:
        while True:
            value = draw()
            # In both directions: an answer must not be part of a longer value, nor contain a shorter one.
            if not any(value in other or other in value for other in self.taken):
                self.taken.append(value)
                return value


def make_entry(subject: Subject, facts: list[Fact], pool: ValuePool, random: Random) -> Entry:
    """An entry that states these facts, in random order and wording, between an opening and often a filler."""
    values: dict[Fact, str] = {}
    sentences: list[str] = []
    for fact in facts:
        values[fact] = pool.draw(fact.value_type)
        sentences.append(subject.fill(random.choice(fact.statements), values[fact]))
    random.shuffle(sentences)
    if random.random() < 0.5:
        sentences.append(subject.fill(random.choice(subject.kind.fillers)))
    opening = subject.fill(random.choice(subject.kind.openings))
    return Entry(subject, " ".join([opening, *sentences]), values)


def choose_facts(kind: Kind, random: Random, *, including: Fact | None = None) -> list[Fact]:
    """Facts for an entry of this kind, at most one for each type of value, so that no question has two answers."""
    chosen = [including] if including else []
    for fact in random.sample(kind.facts, len(kind.facts)):
        types = {other.value_type for other in chosen}
        if fact.value_type not in types and len(chosen) < FACTS_PER_ENTRY:
            chosen.append(fact)
    return chosen


def make_record(seed: int, index: int, documents: int) -> Record:
    """Record `index` of this seed: the entry with the answer first, then `documents - 1` distractors.

    The distractors at odd positions are of the same kind as the gold entry and state the same fact about another
    subject; the others are of any kind.
    """
    random = Random(derive_seed(seed, "facts", index))
    kind = KINDS[index % len(KINDS)]
    name = subject_names(kind.name, seed)[index // len(KINDS)]
    pool = ValuePool(random, taken=name)
    fact = random.choice(kind.asked_facts)
    subject = Subject(kind, name, random.choice(kind.roles))
    gold = make_entry(subject, choose_facts(kind, random, including=fact), pool, random)
    question = subject.fill(random.choice(fact.questions))

    entries = [gold]
    for position in range(1, documents):
        if position % 2:
            other_kind = kind
            facts = choose_facts(kind, random, including=fact)
        else:
            other_kind = random.choice(KINDS)
            facts = choose_facts(other_kind, random)
        other = Subject(other_kind, pool.draw_name(other_kind.name), random.choice(other_kind.roles))
        entries.append(make_entry(other, facts, pool, random))
    return {
        "id": f"facts-{seed}-{index:04d}",
        "question": question,
        "answers": [gold.values[fact]],
        "documents": [{"title": entry.subject.name, "text": entry.text, "gold": entry is gold} for entry in entries],
    }


def write_records(records: Iterable[Mapping[str, object]], path: Path) -> None:
    """Write one compact JSON object a line, gzipped without a time stamp: the same records give the same bytes.

    The file appears whole or not at all.

    Raises:
        UserError: the path is a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; expected the name of a file to write")
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as archive:
        for record in records:
            archive.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
    partial.rename(path)


def write_counted(records: Iterable[Mapping[str, object]], count: int, path: Path) -> int:
    """Write the records and print how many, or print the error. Returns the exit code."""
    try:
        write_records(records, path)
    except EXPECTED as error:
        return report(error)
    print(f"{count} records, {path.stat().st_size:,} bytes: {path}")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2.facts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="file to write, *.jsonl.gz")
    parser.add_argument("--records", type=int, default=600, help=f"1 to {MAX_RECORDS} (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=20, help=f"1 to {MAX_DOCUMENTS} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    if not 1 <= arguments.records <= MAX_RECORDS:
        parser.error(f"--records must be 1 to {MAX_RECORDS}, got {arguments.records}")
    if not 1 <= arguments.documents <= MAX_DOCUMENTS:
        parser.error(f"--documents must be 1 to {MAX_DOCUMENTS}, got {arguments.documents}")
    return arguments


def main() -> int:
    """Write the file that the command line describes. Returns the exit code."""
    arguments = parse_arguments()
    records = (make_record(arguments.seed, index, arguments.documents) for index in range(arguments.records))
    return write_counted(records, arguments.records, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
