"""Thought shift: at which step chains of thought over several documents fail, from the texts alone.

A chain must name the documents that it uses: by their numbers, as the wording `coc` asks for (`[3]`), or by their
titles, if all documents of its prompt have different ones. Source: arXiv:2508.15709, "thought-shifting", whose table
gives the ratio of failed steps by group of placements; how a failure is recognized is ours.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pos2distill.evaluation.statistics import fraction_interval
from pos2distill.evaluation.token_shift import RESAMPLES
from pos2distill.records import Document
from pos2distill.tasks.metrics import contains_words, find_conclusion, normalize

Step = Literal["retrieval", "reasoning", "answer", "none"]
STEPS: tuple[Step, ...] = ("retrieval", "reasoning", "answer", "none")

_CITATION = re.compile(r"\[(\d{1,9}(?:\s*,\s*\d{1,9})*)\]")
_UNKNOWN = -1  # a number that no document has


@dataclass(frozen=True, slots=True)
class Chain:
    """Where one chain fails.

    Attributes:
        failed: its first failed step.
            retrieval: it names a document that is not gold before it has named all gold ones, or never names all of
            them;
            reasoning: no answer occurs before the conclusion, or the chain has no conclusion;
            answer: the conclusion is not correct, though the chain contains the answer;
            none: correct, with the right documents.
        correct: whether the answer is correct, which it may be in spite of a failed step.
        wrong_slot: 0-based slot of the document at which retrieval failed; None if the chain named no wrong document,
            or a number that no document has.
        golds_before: how many gold documents it named before, which is the index of the hop that failed.
    """

    failed: Step
    correct: bool
    wrong_slot: int | None
    golds_before: int


def judge_chain(
    text: str, *, correct: bool, answers: Sequence[str], shown: Sequence[Document], by: Literal["number", "title"]
) -> Chain | None:
    """Where a chain fails; None if its documents cannot be distinguished by their titles.

    Args:
        shown: the documents of its prompt, in order.
    """
    found = find_conclusion(text)
    reasoning = text[: found.start()] if found else text
    named = _cited(reasoning, len(shown)) if by == "number" else _titles_in(reasoning, shown)
    if named is None:
        return None
    golds = {slot for slot, document in enumerate(shown) if document.gold}
    seen: set[int] = set()
    for slot in named:
        if seen == golds:
            break
        if slot not in golds:
            wrong_slot = None if slot == _UNKNOWN else slot
            return Chain("retrieval", correct, wrong_slot, len(seen))
        seen.add(slot)
    if seen != golds:
        return Chain("retrieval", correct, None, len(seen))
    failed: Step = "none"
    # The answers yes and no are judgments, which the reasoning need not contain.
    facts = [answer for answer in answers if normalize(answer) not in ("yes", "no")]
    if not found or (facts and not contains_words(reasoning, facts)):
        failed = "reasoning"
    elif not correct:
        failed = "answer"
    return Chain(failed, correct, None, len(seen))


def summarize_chains(chains: Sequence[tuple[str, str, Chain]], *, documents: int, seed: int) -> dict[str, Any]:
    """The figures of `thought_shift` in analysis.json.

    Args:
        chains: (example id, group of its placement, chain); at least one.
    """
    groups: dict[str, list[tuple[str, Chain]]] = {}
    for example_id, group, chain in chains:
        groups.setdefault(group, []).append((example_id, chain))
    by_group = {}
    if set(groups) != {""}:
        by_group = {name: _ratios(members, seed) for name, members in groups.items()}
    wrong_slots: Counter[int] = Counter()
    hops: Counter[int] = Counter()
    for _, _, chain in chains:
        if chain.failed == "retrieval":
            hops[chain.golds_before] += 1
            if chain.wrong_slot is not None:
                wrong_slots[chain.wrong_slot] += 1
    return {
        "chains": len(chains),
        "overall": _ratios([(example_id, chain) for example_id, _, chain in chains], seed),
        "by_group": by_group,
        "retrieval_failed_after_golds": {str(count): hops[count] for count in sorted(hops)},
        "first_wrong_document_by_slot": [wrong_slots[slot] for slot in range(documents)],
    }


def _ratios(chains: Sequence[tuple[str, Chain]], seed: int) -> dict[str, Any]:
    """The ratio of chains by their first failed step, with intervals over examples."""
    ids = sorted({example_id for example_id, _ in chains})
    row_of = {example_id: row for row, example_id in enumerate(ids)}
    count_E = np.zeros(len(ids))
    for example_id, _ in chains:
        count_E[row_of[example_id]] += 1
    ratios: dict[str, Any] = {}
    for step in STEPS:
        failed_E = np.zeros(len(ids))
        for example_id, chain in chains:
            failed_E[row_of[example_id]] += chain.failed == step
        interval = fraction_interval(
            failed_E, count_E, answers=int(count_E.max()), bootstrap_samples=RESAMPLES, seed=seed
        )
        ratios[step] = {"value": float(failed_E.sum() / count_E.sum()), "ci95": list(interval)}
    correct_anyway = [chain for _, chain in chains if chain.correct and chain.failed != "none"]
    ratios["correct_in_spite_of_a_failed_step"] = len(correct_anyway) / len(chains)
    return ratios


def _cited(text: str, documents: int) -> list[int]:
    """Slots of the cited documents, in order."""
    slots = []
    for citation in _CITATION.finditer(text):
        for number in citation[1].split(","):
            slot = int(number) - 1
            slots.append(slot if 0 <= slot < documents else _UNKNOWN)
    return slots


def _titles_in(text: str, shown: Sequence[Document]) -> list[int] | None:
    """Slots of the documents whose titles are in the text, in order; None unless all titles differ.

    Titles are compared as whole words after SQuAD's normalization. Where several begin at one word, the longest counts.
    """
    slot_of = {tuple(normalize(document.title).split()): slot for slot, document in enumerate(shown)}
    if len(slot_of) < len(shown) or () in slot_of:
        return None
    lengths = sorted({len(title) for title in slot_of}, reverse=True)
    words = normalize(text).split()
    slots = []
    start = 0
    while start < len(words):
        step = 1
        for length in lengths:
            slot = slot_of.get(tuple(words[start : start + length]))
            if slot is not None:
                slots.append(slot)
                step = length
                break
        start += step
    return slots
