"""Examples, and predictions on them, without a model."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pos2distill.records import PREDICTION_SCHEMA, Document, Example

_WORDS = [f"w{number}" for number in range(5000)]


def make_examples(count: int, documents: int, *, hops: int = 1, words: int = 8) -> list[Example]:
    """Examples `e0`, `e1`, ... whose answers are in their gold documents.

    Args:
        words: the number of words in each document.
    """
    examples = []
    for number in range(count):
        held = []
        # Random, so that compression is as hard as of real text.
        drawn = np.random.default_rng(number).integers(len(_WORDS), size=(documents, words)).tolist()
        for index in range(documents):
            text = f"The code of fox {number}.{index} is {1000 * number + index}."
            filler = " ".join(_WORDS[word] for word in drawn[index])
            held.append(Document(f"Fox {number}.{index}", f"{text} {filler}", index if index < hops else None))
        answer = str(1000 * number + hops - 1)
        examples.append(Example(f"e{number}", f"Which code has fox {number}?", (answer,), tuple(held)))
    return examples


def predictions(
    documents: int, correct_ES: Iterable[Iterable[Any]], *, slots: Sequence[Sequence[int]] = (), wrong: str = "no"
) -> pa.Table:
    """A table of `PREDICTION_SCHEMA` of the examples `e0`, `e1`, ...

    Args:
        correct_ES: whether each example is right at each placement. slots: of the placements; default: one each.
        wrong: the text of wrong answers, with `{}` for the number of the example.
    """
    rows = []
    for number, row in enumerate(correct_ES):
        for placement, right in enumerate(row):
            rows.append(
                {
                    "example_id": f"e{number}",
                    "documents": documents,
                    "placement": placement,
                    "order": 0,
                    "group": "",
                    "slots": list(slots[placement]) if slots else [placement],
                    "sampled_ids": [1, 2],
                    "text": str(1000 * number) if right else wrong.format(number),
                    "correct": bool(right),
                    "f1": float(right),
                    "finish_reason": "stop",
                    "prompt_tokens": 80,
                }
            )
    return pa.Table.from_pylist(rows, schema=PREDICTION_SCHEMA)
