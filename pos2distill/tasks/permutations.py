"""The order of documents in a prompt, with gold documents at slots; which slots to train on and to evaluate."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pos2distill.config import Study
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
    """The slots of the gold documents of an evaluated prompt.

    Attributes:
        group: that of a published pair, else empty.
    """

    slots: Slots
    group: str = ""


def arrange(
    example: Example,
    documents: int,
    slots: Slots,
    *,
    order: int | Literal["reshuffled"] = 0,
    seed: int = 0,
    slot_of_rank: Slots = (),
) -> tuple[Document, ...]:
    """The example's documents with its gold ones at `slots` and the first distractors at the other slots.

    Args:
        documents: how many to show; 0: none, not even the gold ones.
        slots: slots of the gold documents, in hop order; distinct.
        order: 0: the data set's order (paper); another number: that order of an evaluation, the same at all slots
            (`numbered_order`); `reshuffled`: an order drawn for each (seed, example, slots) (authors' code).
        slot_of_rank: if given, a reordering of what the other arguments arrange: the document of rank r (from 0) is
            shown at slot_of_rank[r].
    """
    if not documents:
        return ()
    golds = example.golds
    # Cut before they are shuffled, so that both orders show the same documents.
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
    elif order:
        numbered = numbered_order(order, len(others), example.example_id)
        others = [others[index] for index in numbered]
    gold_at = dict(zip(slots, golds, strict=True))
    remaining = iter(others)
    arranged = []
    for slot in range(documents):
        arranged.append(gold_at[slot] if slot in gold_at else next(remaining))
    if not slot_of_rank:
        return tuple(arranged)
    # The inverse permutation: the rank of the document that each slot shows.
    return tuple(arranged[rank] for rank in np.argsort(slot_of_rank).tolist())


def rank_slots_by_accuracy(slots: Sequence[int], accuracy: Sequence[float], measured: int, documents: int) -> Slots:
    """Where to show documents that are ranked by relevance: the best-ranked one where the model does best, and so on.

    Args:
        slots, accuracy: the model's accuracy at some slots, in the order of slots. Those between are interpolated.
        measured: number of documents of the prompts that it was measured with.
        documents: number of documents of the prompts to arrange. Slots of other lengths correspond by their relative
            position, the first to the first and the last to the last.
    Returns: the slot of each rank. The first of equally good slots comes first.
    """
    relative = np.asarray(slots) / (measured - 1)
    accuracy_D = np.interp(np.arange(documents) / (documents - 1), relative, accuracy)
    return tuple(np.argsort(-accuracy_D, kind="stable").tolist())


def advantageous_slots(study: Study, example: Example) -> Slots:
    """The advantageous slots of an example; if they are `random`, one of all placements, drawn by its id."""
    if study.method.advantageous_slot == "random":
        return _draw_slots(study, example, "advantageous slot")
    return study.fixed_advantageous_slots(len(example.golds))


def teacher_slots(study: Study, example: Example) -> Slots:
    """Where the gold documents are in the prompt that the teacher gets: the advantageous slots, or random ones."""
    if study.method.teacher_slot == "random":
        return _draw_slots(study, example, "teacher slot")
    return advantageous_slots(study, example)


def _draw_slots(study: Study, example: Example, purpose: str) -> Slots:
    """One of all placements of adjacent slots, drawn by the example's id."""
    candidates = candidate_placements(study.data.documents, len(example.golds), "all")
    generator = derive_generator(study.seed, purpose, example.example_id)
    return candidates[generator.integers(len(candidates))].slots


def trivial_slots(study: Study, example: Example) -> tuple[Slots, ...]:
    """The K trivial slot tuples that an example is trained at."""
    return draw_trivial_slots(
        example.example_id,
        documents=study.data.documents,
        advantageous=advantageous_slots(study, example),
        k=study.method.k,
        seed=study.seed,
    )


def sampled_slots(study: Study, example: Example) -> tuple[Slots, ...]:
    """Where the gold documents are in the prompts that responses are sampled for: one prompt for each response.

    The advantageous slots; on-policy these, if there are anchor rows, and each of the K trivial tuples.
    """
    advantageous = (advantageous_slots(study, example),)
    if not study.method.spec.on_policy:
        return advantageous
    trivial = trivial_slots(study, example)
    return (*advantageous, *trivial) if study.method.anchor_weight else trivial


def draw_trivial_slots(example_id: str, *, documents: int, advantageous: Slots, k: int, seed: int) -> tuple[Slots, ...]:
    """K distinct ordered slot tuples other than the advantageous one, a pure function of (seed, example id)."""
    hops = len(advantageous)
    excluded = slots_to_index(advantageous, documents)
    generator = derive_generator(seed, "trivial slots", example_id)
    trivial = []
    # Numbers are drawn instead of tuples: 4 hops in 50 documents have 5.5 million ordered tuples.
    for number in generator.choice(math.perm(documents, hops) - 1, size=k, replace=False).tolist():
        # The numbers count all tuples but the advantageous one.
        index = number if number < excluded else number + 1
        trivial.append(index_to_slots(index, documents, hops))
    return tuple(trivial)


def slots_to_index(slots: Slots, documents: int) -> int:
    """The tuple's index among all ordered tuples, in lexicographic order; of a single slot, the slot itself."""
    free = list(range(documents))
    index = 0
    for slot in slots:
        index = index * len(free) + free.index(slot)
        free.remove(slot)
    return index


def index_to_slots(index: int, documents: int, hops: int) -> Slots:
    """The inverse of `slots_to_index`."""
    # Each digit is an index among the slots that are still free; the last digit has the smallest base.
    digits = []
    for base in range(documents - hops + 1, documents + 1):
        index, digit = divmod(index, base)
        digits.append(digit)
    free = list(range(documents))
    return tuple(free.pop(digit) for digit in reversed(digits))


def numbered_order(number: int, distractors: int, example_id: str) -> list[int]:
    """The order of the distractors with this number: 0 is the data set's, and each is unlike those before it.

    A pure function of its arguments. The study's seed is none of them, so that all models are asked in the same orders;
    nor are the slots, so that positions are compared with the distractors in the same order.

    Raises:
        ValueError: if there are not so many orders.
    """
    if number >= math.factorial(distractors):
        raise ValueError(f"{example_id}: {distractors} distractors have no order {number}, counted from 0")
    orders = [list(range(distractors))]
    for earlier in range(1, number + 1):
        generator = derive_generator(earlier, "distractor order", example_id)
        order = generator.permutation(distractors).tolist()
        while order in orders:
            order = generator.permutation(distractors).tolist()
        orders.append(order)
    return orders[number]


def evaluated_placements(
    documents: int, hops: Sequence[int], slots: Literal["all", "pairs"] | int | tuple[int | Slots, ...]
) -> dict[int, tuple[Placement, ...]]:
    """The placements to evaluate, by the number of hops; the same number for each.

    Args:
        slots: `all`; a number m of slots spread evenly from first to last, with several hops every ordered tuple of
            them; a list as it is; `pairs`: the paper's 12 pairs in their three groups (see `_published`).
    """
    if slots == "pairs":
        return _published(documents, hops)
    if isinstance(slots, tuple):
        listed = tuple(Placement((each,) if isinstance(each, int) else each) for each in slots)
        return dict.fromkeys(hops, listed)
    number = documents if slots == "all" else min(slots, documents)
    spread = _spread(0, documents - 1, number)
    placements = {}
    for count in hops:
        placements[count] = tuple(Placement(each) for each in itertools.permutations(spread, count))
    return placements


def candidate_placements(documents: int, hops: int, slots: Literal["all"] | int) -> tuple[Placement, ...]:
    """The placements to try for the advantageous slots: gold documents in adjacent slots in hop order, as in the paper.

    Args:
        slots: slots of the first gold document: `all`, or a number spread evenly from first to last.
    """
    last = documents - hops
    starts = _spread(0, last, last + 1 if slots == "all" else min(slots, last + 1))
    return tuple(Placement(tuple(range(start, start + hops))) for start in starts)


def _spread(first: int, last: int, count: int) -> tuple[int, ...]:
    return tuple(np.unique(np.linspace(first, last, count).round().astype(int)).tolist())


def _published(documents: int, hops: Sequence[int]) -> dict[int, tuple[Placement, ...]]:
    """The published pairs; for other numbers of documents and hops, the nearest placements to them.

    With few documents some pairs become equal, or a disconnected one has no gap left. Those are left out, for every
    number of hops.
    """
    kept: dict[int, list[Slots]] = {count: [] for count in hops}
    placements: dict[int, tuple[Placement, ...]] = dict.fromkeys(hops, ())
    for group, pairs in _PUBLISHED_PAIRS.items():
        for pair in pairs:
            scaled = {count: _stretch(pair, group, documents, count) for count in hops}
            without_gap = group != "connected" and any(_has_neighbors(slots) for slots in scaled.values())
            repeated = any(slots in kept[count] for count, slots in scaled.items())
            if without_gap or repeated:
                continue
            for count, slots in scaled.items():
                kept[count].append(slots)
                placements[count] += (Placement(slots, group),)
    return placements


def _has_neighbors(slots: Slots) -> bool:
    """Whether documents of consecutive hops are in adjacent slots."""
    return any(abs(first - second) < 2 for first, second in itertools.pairwise(slots))


def _stretch(pair: Slots, group: str, documents: int, hops: int) -> Slots:
    """A published pair scaled from 20 documents to another number of documents, and to the number of hops.

    For three or four hops, a connected tuple has no gaps and starts at the pair's first slot (earlier if it would not
    fit); the others are spread evenly over the pair's span.
    """
    first, second = pair
    if group == "connected":
        # The first slot of a connected pair is at most documents - 2, since the second follows it.
        room = (documents - 2) / (_PUBLISHED_DOCUMENTS - 2)
        start = min(round(first * room), documents - hops)
        return tuple(range(start, start + hops))
    scale = (documents - 1) / (_PUBLISHED_DOCUMENTS - 1)
    # Wide enough for every hop, also with few documents.
    low = min(round(min(pair) * scale), documents - hops)
    high = max(round(max(pair) * scale), low + hops - 1)
    spread = tuple(np.linspace(low, high, hops).round().astype(int).tolist())
    return spread if first < second else spread[::-1]
