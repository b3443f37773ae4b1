"""Where documents stand: the gold document at a slot, distractors around it, and which slots are trained on."""

from typing import Literal

import numpy as np

from pos2distill.randomness import derive_generator
from pos2distill.records import Document, Example


def arrange(
    example: Example,
    documents: int,
    slot: int,
    *,
    order: Literal["fixed", "reshuffled"] = "fixed",
    seed: int = 0,
) -> tuple[Document, ...]:
    """The example's documents with the gold one at `slot` and the first `documents - 1` distractors around it.

    Args:
        order: `fixed` keeps the data set's order of distractors (paper); `reshuffled` draws one for each
            (seed, example, slot) (authors' code).
    """
    others = list(example.distractors[: documents - 1])
    if len(others) < documents - 1 or not 0 <= slot < documents:
        raise ValueError(f"slot {slot} of {documents} documents, but {example.example_id} has {len(others) + 1}")
    if order == "reshuffled":
        shuffle = derive_generator(seed, "reshuffle", example.example_id, slot).permutation(len(others))
        others = [others[index] for index in shuffle]
    return (*others[:slot], example.gold, *others[slot:])


def draw_trivial_slots(example_id: str, *, documents: int, advantageous: int, k: int, seed: int) -> tuple[int, ...]:
    """K distinct slots other than the advantageous one, a pure function of (seed, example id)."""
    trivial = np.delete(np.arange(documents), advantageous)
    drawn = derive_generator(seed, "trivial slots", example_id).choice(trivial, size=k, replace=False)
    return tuple(int(slot) for slot in drawn)


def spread_slots(documents: int, slots: Literal["all"] | int | tuple[int, ...]) -> tuple[int, ...]:
    """The slots to evaluate: all, a list as it is, or a number spread evenly from the first slot to the last."""
    if slots == "all":
        return tuple(range(documents))
    if isinstance(slots, tuple):
        return slots
    return tuple(np.unique(np.linspace(0, documents - 1, min(slots, documents)).round().astype(int)).tolist())
