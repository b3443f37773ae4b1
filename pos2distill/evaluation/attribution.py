"""Wrong-answer attribution: which document of the prompt holds the wrong answer that was given.

An answer is reduced to its words that are not in the question, after SQuAD's normalization: "The code of Misty Wolf is
12 96 .", as an answer to "what is the code of Misty Wolf ?", becomes "12 96". A document holds the answer if its title
and text contain all of these words. The rule compares words, so no document holds a paraphrased answer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pos2distill.config.data import Metric
from pos2distill.records import Document
from pos2distill.tasks.metrics import compared_text, normalize


class Attribution:
    """Finds the documents that hold a wrong answer to one question: where the model may have taken it from.

    Args:
        metric: names the part of the text that is compared: the first line, all, or what follows "The answer is:".
        documents: documents to search for the answer.
    """

    def __init__(self, question: str, metric: Metric, documents: Sequence[Document]) -> None:
        self.metric: Metric = metric
        self.question_words = set(normalize(question).split())
        self.words = [set(normalize(f"{document.title} {document.text}").split()) for document in documents]

    def __call__(self, text: str) -> list[int]:
        """Indices of the documents that hold the answer of a text."""
        said = set(normalize(compared_text(self.metric, text)).split()) - self.question_words
        return [index for index, words in enumerate(self.words) if said and said <= words]


def summarize_attribution(wrong: Sequence[tuple[Sequence[int], Sequence[int]]], *, documents: int) -> dict[str, Any]:
    """The figures of `wrong_answers` in analysis.json.

    Args:
        wrong: for each wrong answer, the slots of the gold documents and of the documents that hold the answer.
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
