"""Where documents stand: gold documents at slots, distractors around them; which slots are trained on and evaluated."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pos2distill.randomness import derive_generator
from pos2distill.records import Document, Example, Slots

# The pairs that the paper evaluates two hops at, 0-based, of 20 documents (arXiv:2508.15709).
_PUBLISHED_DOCUMENTS = 20
_PUBLISHED_PAIRS = {
    "connected": ((0, 1), (5, 6), (12, 13), (17, 18)),
    "disconnected": ((0, 8), (5, 13), (6, 14), (8, 16)),
    "reversed": ((8, 0), (13, 5), (14, 6), (16, 8)),
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the gold documents of an evaluated prompt stand. `group`: of the published pairs, else empty."""

    slots: Slots
    group: str = ""


def arrange(
    example: Example,
    documents: int,
    slots: Slots,
    *,
    order: Literal["fixed", "reshuffled"] = "fixed",
    seed: int = 0,
) -> tuple[Document, ...]:
    """The example's documents with its gold ones at `slots` and the first distractors around them.

    Args:
        slots: of the gold documents, in hop order; distinct.
        order: `fixed` keeps the data set's order of distractors (paper); `reshuffled` draws one for each
            (seed, example, slots) (authors' code).
    """
    golds = example.golds
    others = list(example.distractors[: documents - len(golds)])
    fits = len(slots) == len(set(slots)) == len(golds) and all(0 <= slot < documents for slot in slots)
    if len(others) + len(golds) < documents or not fits:
        raise ValueError(
            f"{example.example_id}: {len(golds)} gold documents and {len(others)} others cannot make "
            f"{documents} documents with the gold ones at slots {list(slots)}"
        )
    if order == "reshuffled":
        shuffle = derive_generator(seed, "reshuffle", example.example_id, *slots).permutation(len(others))
        others = [others[index] for index in shuffle]
    placed = dict(zip(slots, golds, strict=True))
    rest = iter(others)
    return tuple(placed[slot] if slot in placed else next(rest) for slot in range(documents))


def draw_trivial_slots(example_id: str, *, documents: int, advantageous: Slots, k: int, seed: int) -> tuple[Slots, ...]:
    """K distinct ordered slot tuples other than the advantageous one, a pure function of (seed, example id)."""
    hops = len(advantageous)
    avoided = slots_to_index(advantageous, documents)
    drawn = derive_generator(seed, "trivial slots", example_id).choice(
        math.perm(documents, hops) - 1, size=k, replace=False
    )
    return tuple(index_to_slots(int(index + (index >= avoided)), documents, hops) for index in drawn)


def slots_to_index(slots: Slots, documents: int) -> int:
    """The tuple's place among all ordered tuples, in lexicographic order; of a single slot, the slot itself."""
    free, index = list(range(documents)), 0
    for slot in slots:
        index = index * len(free) + free.index(slot)
        free.remove(slot)
    return index


def index_to_slots(index: int, documents: int, hops: int) -> Slots:
    """The inverse of `slots_to_index`."""
    digits = []
    for base in range(documents - hops + 1, documents + 1):
        index, digit = divmod(index, base)
        digits.append(digit)
    free = list(range(documents))
    return tuple(free.pop(digit) for digit in reversed(digits))


def evaluated_placements(
    documents: int, hops: Sequence[int], slots: Literal["all", "pairs"] | int | tuple[int | Slots, ...]
) -> dict[int, tuple[Placement, ...]]:
    """The placements to evaluate, by the number of hops; equally many for each of them.

    Args:
        slots: `all`; a number m of slots spread evenly from first to last, with several hops every ordered tuple of
            them; a list as it is; `pairs`: the paper's 12 pairs in their three groups (see `_published`).
    """
    if slots == "pairs":
        return _published(documents, hops)
    if isinstance(slots, tuple):
        listed = tuple(Placement((each,) if isinstance(each, int) else each) for each in slots)
        return dict.fromkeys(hops, listed)
    spread = _spread(0, documents - 1, documents if slots == "all" else min(slots, documents))
    return {count: tuple(Placement(each) for each in itertools.permutations(spread, count)) for count in hops}


def candidate_placements(documents: int, hops: int, slots: Literal["all"] | int) -> tuple[Placement, ...]:
    """Where the advantageous slots are looked for: gold documents side by side in hop order, as the paper has them.

    Args:
        slots: of the first gold document: `all`, or a number spread evenly from first to last.
    """
    last = documents - hops
    starts = _spread(0, last, last + 1 if slots == "all" else min(slots, last + 1))
    return tuple(Placement(tuple(range(start, start + hops))) for start in starts)


def _spread(first: int, last: int, count: int) -> tuple[int, ...]:
    return tuple(np.unique(np.linspace(first, last, count).round().astype(int)).tolist())


def _published(documents: int, hops: Sequence[int]) -> dict[int, tuple[Placement, ...]]:
    """The published pairs; for other numbers of documents and hops, what is nearest to them.

    Few documents make some pairs equal, or leave no room for a gap in a disconnected one; those are left out.
    """
    kept: dict[int, list[Placement]] = {count: [] for count in hops}
    for group, pairs in _PUBLISHED_PAIRS.items():
        for pair in pairs:
            placed = {count: Placement(_stretch(pair, group, documents, count), group) for count in hops}
            near = any(abs(a - b) < 2 for each in placed.values() for a, b in itertools.pairwise(each.slots))
            known = any(placed[count].slots in [each.slots for each in kept[count]] for count in hops)
            if not known and not (near and group != "connected"):
                for count, placement in placed.items():
                    kept[count].append(placement)
    return {count: tuple(placements) for count, placements in kept.items()}


def _stretch(pair: Slots, group: str, documents: int, hops: int) -> Slots:
    """A published pair scaled from 20 documents to the number asked for, and to the number of hops.

    Of three or four hops a connected tuple stands without gaps from the pair's first slot on (earlier where it would
    not fit); the others are spread evenly over the span.
    """
    first, second = pair
    if group == "connected":
        room = (documents - 2) / (_PUBLISHED_DOCUMENTS - 2)
        start = min(round(first * room), documents - hops)
        return tuple(range(start, start + hops))
    scale = (documents - 1) / (_PUBLISHED_DOCUMENTS - 1)
    # Wide enough for every hop, where few documents leave less.
    low = min(round(min(pair) * scale), documents - hops)
    high = max(round(max(pair) * scale), low + hops - 1)
    spread = tuple(np.linspace(low, high, hops).round().astype(int).tolist())
    return spread if first < second else spread[::-1]
