"""The toy tasks: read the code of one animal, or of its mentor, out of many short documents.

One hop: a document says `The code of Misty Wolf is 03 14 .` under the title `Misty Wolf`; the question is
`what is the code of Misty Wolf ?`; the model answers with the document's sentence. Within one prompt all adjectives,
all animals and all numbers differ, so exactly one document contains the answer and no other contains a part of it.

Two hops: half of the documents name mentors, `The mentor of Tiny Fox is Misty Wolf .`, the other half the codes of
these mentors. The question is `what is the code of the mentor of Tiny Fox ?`; the model answers with both sentences of
the chain and the code. Every chain of a prompt is complete, so only the question says which of them to follow.

This module produces text; `batches.py` fills the same templates as tensors.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import NotRequired, TypedDict


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

# A fact has these five fields; every template below consists of words and fields, separated by whitespace.
FIELDS = ("{relation}", "{adjective}", "{animal}", "{first}", "{second}")
CODE, MENTOR = "code", "mentor"  # relations; a mentor's `first` and `second` are adjective and animal
TITLE = "{adjective} {animal}"
TEXT = "The {relation} of {adjective} {animal} is {first} {second} ."
ANSWER = "{first} {second}"
QUESTION = "what is the {relation} of {adjective} {animal} ?"
RESPONSE = TEXT
# TWO_HOP_QUESTION is filled with the fact of the first hop. CONCLUSION follows the sentences of both hops and is filled
# with the fact of the second.
TWO_HOP_QUESTION = "what is the code of the mentor of {adjective} {animal} ?"
CONCLUSION = "The answer is: {first} {second}"
# The parts of a prompt.
DOCUMENT_BLOCK = f"Title: {TITLE}\n{TEXT}\n"
QUESTION_BLOCK = f"Question: {QUESTION}"

SPECIAL_TOKENS = _words("<pad> <s> <|system|> <|user|> <|assistant|> <|end|> <unk>")
PAD, BOS, SYSTEM, USER, ASSISTANT, END, UNKNOWN = SPECIAL_TOKENS
TEMPLATE_WORDS = _words("Title: The code of is . Question: what the ?")
# A token's id is its index in this tuple. The two-hop model has the same words and three more.
VOCABULARY = (*SPECIAL_TOKENS, *TEMPLATE_WORDS, *ADJECTIVES, *ANIMALS, *NUMBERS)
TWO_HOP_VOCABULARY = (*VOCABULARY, MENTOR, "answer", "is:")

MAX_DOCUMENTS = min(len(ADJECTIVES), len(ANIMALS), len(NUMBERS) // 2)
MAX_EXAMPLES = len(ADJECTIVES) * len(ANIMALS)
# The first 10, 20, ... documents of a two-hop example contain complete chains only, so that shorter prompts do too.
BLOCK_SIZE = 10

Fact = dict[str, str]


class Document(TypedDict):
    """One document of an example. gold: whether it leads to the answer; hop: number of a gold document, from 1."""

    title: str
    text: str
    gold: bool
    hop: NotRequired[int]


class Example(TypedDict):
    """One question with its documents, the gold documents first."""

    id: str
    question: str
    answers: list[str]
    documents: list[Document]


@functools.cache
def _subjects(seed: int) -> list[tuple[str, str]]:
    """All 1600 (adjective, animal) pairs, in an order that depends on the seed."""
    pairs = list(itertools.product(ADJECTIVES, ANIMALS))
    random.Random(f"toy subjects {seed}").shuffle(pairs)
    return pairs


def _facts(rng: random.Random, subject: tuple[str, str], documents: int) -> list[Fact]:
    """Draw the codes of `documents` animals, the first of them the subject. No word is in two facts."""
    adjective, animal = subject
    adjectives = rng.sample([word for word in ADJECTIVES if word != adjective], documents - 1)
    animals = rng.sample([word for word in ANIMALS if word != animal], documents - 1)
    numbers = rng.sample(NUMBERS, 2 * documents)
    facts = []
    for index, title in enumerate(zip([adjective, *adjectives], [animal, *animals], strict=True)):
        facts.append(
            {
                "relation": CODE,
                "adjective": title[0],
                "animal": title[1],
                "first": numbers[2 * index],
                "second": numbers[2 * index + 1],
            }
        )
    return facts


def _chains(facts: list[Fact]) -> list[tuple[Fact, Fact]]:
    """Make each animal of the second half of the facts the mentor of one of the first half.

    Returns: for each chain the facts of its two hops, (mentor of X, code of that mentor).
    """
    half = len(facts) // 2
    chains = []
    for pupil, mentor in zip(facts[:half], facts[half:], strict=True):
        first_hop = {**pupil, "relation": MENTOR, "first": mentor["adjective"], "second": mentor["animal"]}
        chains.append((first_hop, mentor))
    return chains


def _document(fact: Fact, *, gold: bool) -> Document:
    return {"title": TITLE.format(**fact), "text": TEXT.format(**fact), "gold": gold}


def _check_range(index: int, documents: int) -> None:
    if not 0 <= index < MAX_EXAMPLES:
        raise ValueError(f"index must be 0 to {MAX_EXAMPLES - 1} (one example for each subject), got {index}")
    if not 1 <= documents <= MAX_DOCUMENTS:
        raise ValueError(f"documents must be 1 to {MAX_DOCUMENTS} (all words of a prompt differ), got {documents}")


def make_example(seed: int, index: int, documents: int) -> Example:
    """Make the one-hop example number `index`. It depends on the arguments only.

    No two examples of a seed ask about the same subject: subjects are drawn without replacement, so there are at most
    1600 examples.

    Args:
        seed: the seed of the whole file.
        index: 0 to MAX_EXAMPLES - 1.
        documents: 1 to MAX_DOCUMENTS; the first is gold, the others are distractors without the answer.
    Raises: ValueError for a value out of range.
    """
    _check_range(index, documents)
    facts = _facts(random.Random(f"toy example {seed} {index}"), _subjects(seed)[index], documents)
    return {
        "id": f"toy-{seed}-{index:04d}",
        "question": QUESTION.format(**facts[0]),
        "answers": [ANSWER.format(**facts[0])],
        "documents": [_document(fact, gold=index == 0) for index, fact in enumerate(facts)],
    }


def make_two_hop_example(seed: int, index: int, documents: int) -> Example:
    """Make the two-hop example number `index`. It depends on the arguments only.

    Arguments, limits and errors are those of `make_example`; in addition, `documents` must be even. The first two
    documents are gold, first and second hop. The others are shuffled inside blocks of ten, so that the first 10, 20 or
    30 documents contain complete chains only.
    """
    _check_range(index, documents)
    if documents % 2:
        raise ValueError(f"documents of two-hop examples must be even (they are chains of two), got {documents}")
    rng = random.Random(f"toy two-hop example {seed} {index}")
    chains = _chains(_facts(rng, _subjects(seed)[index], documents))
    facts: list[Fact] = []
    for chain in chains:
        facts += chain
    others: list[Fact] = []
    for start in range(0, documents, BLOCK_SIZE):
        block = facts[max(2, start) : start + BLOCK_SIZE]  # the gold documents, the first two, are not shuffled
        others += rng.sample(block, len(block))
    first, second = chains[0]
    golds: list[Document] = [
        {**_document(first, gold=True), "hop": 1},
        {**_document(second, gold=True), "hop": 2},
    ]
    return {
        "id": f"toy-two-hop-{seed}-{index:04d}",
        "question": TWO_HOP_QUESTION.format(**first),
        "answers": [ANSWER.format(**second)],
        "documents": [*golds, *(_document(fact, gold=False) for fact in others)],
    }
