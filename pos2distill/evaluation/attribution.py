"""Wrong-answer attribution: which document of the prompt holds the wrong answer that was given.

What an answer says is its words without those of the question, after SQuAD's normalisation: of "The code of Misty Wolf
is 12 96 ." to "what is the code of Misty Wolf ?" the words "12 96". A document holds the answer if its title and text
contain all of these words. A rule of words: paraphrased answers are held by no document.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pos2distill.config.data import Metric
from pos2distill.records import Document
from pos2distill.tasks.metrics import first_line, normalize, parse_answer


def holding_slots(text: str, *, metric: Metric, question: str, shown: Sequence[Document]) -> list[int]:
    """Slots (0-based) of the documents that hold the answer of a text.

    Args:
        metric: names the part of the text that is compared: the first line, all, or what follows "The answer is:".
        shown: the documents of its prompt, in order.
    """
    parts = {"sub_em": first_line(text), "substring": text, "em": parse_answer(text) or ""}
    said = set(normalize(parts[metric]).split()) - set(normalize(question).split())
    if not said:
        return []
    slots = []
    for slot, document in enumerate(shown):
        if said <= set(normalize(f"{document.title} {document.text}").split()):
            slots.append(slot)
    return slots


def summarise_attribution(wrong: Sequence[tuple[Sequence[int], Sequence[int]]], *, documents: int) -> dict[str, Any]:
    """The figures of `wrong_answers` in analysis.json.

    Args:
        wrong: of each wrong answer the slots of the gold documents, and those that hold the answer.
    """
    slots_D = np.zeros(documents, int)
    counts = {"wrong": len(wrong), "one_document": 0, "gold_document": 0, "several_documents": 0, "no_document": 0}
    distances: list[int] = []
    for golds, holding in wrong:
        if not holding:
            counts["no_document"] += 1
        elif len(holding) > 1:
            counts["several_documents"] += 1
        elif holding[0] in golds:
            counts["gold_document"] += 1
        else:
            counts["one_document"] += 1
            slots_D[holding[0]] += 1
            distances.append(min(abs(holding[0] - gold) for gold in golds))
    median = float(np.median(distances)) if distances else None
    return {**counts, "by_slot": slots_D.tolist(), "median_distance_to_gold": median}
