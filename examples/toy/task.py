"""The toy task: read the code of one animal out of many short documents.

A document says `The code of Misty Wolf is 03 14 .` under the title `Misty Wolf`; the question is
`what is the code of Misty Wolf ?`; the model answers with the document's sentence. Within one prompt all adjectives,
all animals and all numbers differ, so exactly one document holds the answer and no other shares half of it.

Everything here is text and plain Python; `batches.py` writes the same templates straight into tensors.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import TypedDict


def _words(text: str) -> tuple[str, ...]:
    """Split at whitespace, as the tokenizer does."""
    return tuple(text.split())


ADJECTIVES = _words(
    """Amber Blue Crimson Dusty Eager Fancy Gentle Happy Icy Jolly Keen Lucky Misty Noble Olive Proud Quiet Rapid
    Silver Tiny Urban Vivid Witty Young Zesty Brave Calm Dark Early Faint Grand Huge Ivory Jade Kind Lively Modest
    Neat Odd Pale"""
)
ANIMALS = _words(
    """Fox Owl Bear Wolf Hawk Deer Crab Swan Lynx Mole Frog Hare Toad Crow Seal Moth Wasp Goat Lamb Duck Pike Carp
    Newt Wren Dove Ibis Kiwi Lion Mink Orca Puma Quail Rhino Stork Tiger Viper Whale Yak Zebra Bison"""
)
NUMBERS = tuple(f"{number:02d}" for number in range(100))

# A fact fills these four fields; every template below is whitespace-separated words and fields.
FIELDS = ("{adjective}", "{animal}", "{first}", "{second}")
TITLE = "{adjective} {animal}"
TEXT = "The code of {adjective} {animal} is {first} {second} ."
ANSWER = "{first} {second}"
QUESTION = "what is the code of {adjective} {animal} ?"
RESPONSE = TEXT
# How a prompt puts them together (the last newline of a document separates it from what follows).
DOCUMENT_BLOCK = f"Title: {TITLE}\n{TEXT}\n"
QUESTION_BLOCK = f"Question: {QUESTION}"

SPECIAL_TOKENS = _words("<pad> <s> <|system|> <|user|> <|assistant|> <|end|> <unk>")
PAD, BOS, SYSTEM, USER, ASSISTANT, END, UNKNOWN = SPECIAL_TOKENS
TEMPLATE_WORDS = tuple(word for word in dict.fromkeys(_words(DOCUMENT_BLOCK + QUESTION_BLOCK)) if word not in FIELDS)
# A token's id is its place in this tuple.
VOCABULARY = (*SPECIAL_TOKENS, *TEMPLATE_WORDS, *ADJECTIVES, *ANIMALS, *NUMBERS)

MAX_DOCUMENTS = min(len(ADJECTIVES), len(ANIMALS), len(NUMBERS) // 2)
MAX_EXAMPLES = len(ADJECTIVES) * len(ANIMALS)


class Document(TypedDict):
    """One document of an example; `gold` marks the one that holds the answer."""

    title: str
    text: str
    gold: bool


class Example(TypedDict):
    """One question with its documents, the gold one first."""

    id: str
    question: str
    answers: list[str]
    documents: list[Document]


@functools.cache
def _subjects(seed: int) -> list[tuple[str, str]]:
    """All 1600 (adjective, animal) pairs in an order of their own for every seed."""
    pairs = [(adjective, animal) for adjective in ADJECTIVES for animal in ANIMALS]
    random.Random(f"toy subjects {seed}").shuffle(pairs)
    return pairs


def _facts(seed: int, index: int, documents: int) -> list[dict[str, str]]:
    """Draw what the documents of one example say; the first fact is the one asked about."""
    adjective, animal = _subjects(seed)[index]
    rng = random.Random(f"toy example {seed} {index}")
    adjectives = rng.sample([word for word in ADJECTIVES if word != adjective], documents - 1)
    animals = rng.sample([word for word in ANIMALS if word != animal], documents - 1)
    numbers = rng.sample(NUMBERS, 2 * documents)
    columns = ([adjective, *adjectives], [animal, *animals], numbers[::2], numbers[1::2])
    names = [field.strip("{}") for field in FIELDS]
    return [dict(zip(names, fact, strict=True)) for fact in zip(*columns, strict=True)]


def make_example(seed: int, index: int, documents: int) -> Example:
    """Make the example number `index`, a pure function of the arguments.

    Within one seed no two examples ask about the same subject: subjects are drawn without replacement, which is why
    there are at most 1600.

    Args:
        seed: of the whole file.
        index: 0 to MAX_EXAMPLES - 1.
        documents: 1 to MAX_DOCUMENTS; the first is gold, the rest are distractors that never hold the answer.
    Raises: ValueError naming the value out of range.
    """
    if not 0 <= index < MAX_EXAMPLES:
        raise ValueError(f"index must be 0 to {MAX_EXAMPLES - 1} (one example a subject), got {index}")
    if not 1 <= documents <= MAX_DOCUMENTS:
        raise ValueError(f"documents must be 1 to {MAX_DOCUMENTS} (all words of a prompt differ), got {documents}")
    facts = _facts(seed, index, documents)
    return {
        "id": f"toy-{seed}-{index:04d}",
        "question": QUESTION.format(**facts[0]),
        "answers": [ANSWER.format(**facts[0])],
        "documents": [
            {"title": TITLE.format(**fact), "text": TEXT.format(**fact), "gold": place == 0}
            for place, fact in enumerate(facts)
        ],
    }


def gold_at(documents: Sequence[Document], slot: int) -> list[Document]:
    """Move the gold document, which comes first, to a 0-based slot; the distractors keep their order."""
    gold, *others = documents
    return [*others[:slot], gold, *others[slot:]]


def user_message(documents: Sequence[Document], question: str) -> str:
    """The prompt as text, before the chat template."""
    shown = "".join(f"Title: {document['title']}\n{document['text']}\n" for document in documents)
    return f"{shown}Question: {question}"
