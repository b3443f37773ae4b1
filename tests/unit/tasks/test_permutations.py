import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.config import Recipe, Study
from pos2distill.records import Document, Example, Slots
from pos2distill.tasks.permutations import (
    advantageous_slots,
    arrange,
    candidate_placements,
    draw_trivial_slots,
    evaluated_placements,
    index_to_slots,
    numbered_order,
    rank_slots_by_accuracy,
    sampled_slots,
    slots_to_index,
    teacher_slots,
    trivial_slots,
)


def make_example(documents: int, golds: Slots = (0,)) -> Example:
    """An example whose documents at `golds` are its hops, in this order."""
    shown = tuple(
        Document(f"d{index}", f"text {index}", golds.index(index) if index in golds else None)
        for index in range(documents)
    )
    return Example(f"example-{documents}", "question", ("answer",), shown)


def tuples(documents: int, hops: int) -> st.SearchStrategy[Slots]:
    return st.permutations(range(documents)).map(lambda indices: tuple(indices[:hops]))


# Documents and hops; then documents, the slots of golds after and before arranging, and a seed.
sizes = st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(4, n - 1))))
arrangements = sizes.flatmap(lambda size: st.tuples(st.just(size[0]), tuples(*size), tuples(*size), st.integers(0, 3)))


@given(arrangements)
def test_arrange_places_golds_and_keeps_distractor_order(arrangement: tuple[int, Slots, Slots, int]) -> None:
    documents, slots, golds, _ = arrangement
    example = make_example(documents, golds)
    shown = arrange(example, documents, slots)
    assert tuple(shown[slot] for slot in slots) == example.golds
    assert tuple(shown[slot] for slot in range(documents) if slot not in slots) == example.distractors


@given(arrangements)
def test_arrange_reshuffles_as_a_pure_function(arrangement: tuple[int, Slots, Slots, int]) -> None:
    documents, slots, golds, seed = arrangement
    example = make_example(documents, golds)
    shown = arrange(example, documents, slots, order="reshuffled", seed=seed)
    assert tuple(shown[slot] for slot in slots) == example.golds
    assert Counter(shown) == Counter(example.documents)
    assert shown == arrange(example, documents, slots, order="reshuffled", seed=seed)


@pytest.mark.parametrize("hops", [1, 2])
def test_arrange_reshuffles_by_seed_and_slots(hops: int) -> None:
    example = make_example(12, tuple(range(hops)))
    orders = [
        tuple(d.title for d in arrange(example, 12, slots, order="reshuffled", seed=seed) if not d.gold)
        for seed in range(3)
        for slots in itertools.permutations(range(3), hops)
    ]
    assert len(set(orders)) == 3 * math.perm(3, hops)


@pytest.mark.parametrize(("documents", "golds"), [(2, (0,)), (4, (1,)), (5, (3,)), (5, (0, 1))])
def test_arrange_shows_each_numbered_order_once(documents: int, golds: Slots) -> None:
    example, slots = make_example(documents, golds), tuple(range(len(golds)))
    count = math.factorial(documents - len(golds))
    orders = [arrange(example, documents, slots, order=number) for number in range(count)]
    assert orders[0] == arrange(example, documents, slots)
    assert len(set(orders)) == count
    for shown in orders:
        assert shown[: len(golds)] == example.golds
        assert Counter(shown) == Counter(example.documents)
    with pytest.raises(
        ValueError, match=rf"^example-{documents}: \d distractors have no order {count}, counted from 0"
    ):
        arrange(example, documents, slots, order=count)


def test_numbered_order_is_the_first_that_is_drawn_unless_it_repeats_one() -> None:
    """Changing this changes which prompts an evaluation in several orders has."""
    example = make_example(8)
    pinned = {1: ["d5", "d6", "d1", "d0", "d3", "d7", "d2", "d4"], 2: ["d3", "d7", "d6", "d0", "d2", "d4", "d5", "d1"]}
    for number, titles in pinned.items():
        shown = arrange(example, 8, (3,), order=number)
        assert [document.title for document in shown] == titles
        # The same at every slot.
        elsewhere = [document for document in arrange(example, 8, (0,), order=number) if not document.gold]
        assert elsewhere == [document for document in shown if not document.gold]
    # The first draw is [1, 0] for fox-0000, and for fox-0002 it repeats the data set's order.
    assert numbered_order(1, 2, "fox-0000") == [1, 0]
    assert numbered_order(1, 2, "fox-0002") == [1, 0]
    orders = [numbered_order(number, 3, "fox-0001") for number in range(6)]
    assert orders == [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1], [1, 0, 2], [2, 0, 1]]


def test_arrange_takes_the_first_distractors() -> None:
    assert [document.title for document in arrange(make_example(6), 3, (1,))] == ["d1", "d0", "d2"]
    assert [document.title for document in arrange(make_example(6, (4, 0)), 3, (2, 0))] == ["d0", "d1", "d4"]


@pytest.mark.parametrize("order", ["reshuffled", 1, 2])
def test_arrange_shows_the_same_documents_in_every_order(order: Literal["reshuffled"] | int) -> None:
    """Distractors are cut before they are shuffled."""
    shown = arrange(make_example(12), 5, (2,), order=order, seed=3)
    assert {document.title for document in shown} == {"d0", "d1", "d2", "d3", "d4"}


@pytest.mark.parametrize(
    ("documents", "slots", "golds"),
    [
        (4, (0,), (0,)),  # too few documents
        (3, (3,), (0,)),
        (3, (-1,), (0,)),
        (3, (0, 1), (0,)),  # a slot too many
        (3, (0,), (0, 1)),  # one too few
        (3, (1, 1), (0, 1)),
        (3, (), (0,)),
    ],
)
def test_arrange_rejects_impossible_slots(documents: int, slots: Slots, golds: Slots) -> None:
    with pytest.raises(ValueError, match=r"^example-3: \d gold documents and \d others cannot make \d documents") as e:
        arrange(make_example(3, golds), documents, slots)
    assert str(e.value).endswith(f"{documents} documents with the gold ones at slots {list(slots)}")


# --- slots as numbers


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(4, n)))), st.data())
def test_index_to_slots_inverts_slots_to_index(size: tuple[int, int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, math.perm(*size) - 1))
    slots = index_to_slots(index, *size)
    assert len(slots) == len(set(slots)) == size[1]
    assert set(slots) <= set(range(size[0]))
    assert slots_to_index(slots, size[0]) == index


@pytest.mark.parametrize(("documents", "hops"), [(4, 1), (5, 2), (5, 3), (4, 4), (3, 3)])
def test_slots_to_index_is_lexicographic(documents: int, hops: int) -> None:
    every = [index_to_slots(index, documents, hops) for index in range(math.perm(documents, hops))]
    assert every == list(itertools.permutations(range(documents), hops))


@given(st.integers(0, 19))
def test_slots_to_index_of_one_slot_is_the_slot(slot: int) -> None:
    assert slots_to_index((slot,), 20) == slot
    assert index_to_slots(slot, 20, 1) == (slot,)


# --- trivial slots


@given(sizes, st.data())
def test_draw_trivial_slots_are_distinct_and_trivial(size: tuple[int, int], data: st.DataObject) -> None:
    documents, hops = size
    advantageous = data.draw(tuples(documents, hops))
    k = data.draw(st.integers(0, min(12, math.perm(documents, hops) - 1)))
    drawn = draw_trivial_slots("e", documents=documents, advantageous=advantageous, k=k, seed=1)
    assert len(drawn) == len(set(drawn)) == k
    assert advantageous not in drawn
    for slots in drawn:
        assert len(slots) == len(set(slots)) == hops
        assert set(slots) <= set(range(documents))
    assert drawn == draw_trivial_slots("e", documents=documents, advantageous=advantageous, k=k, seed=1)


@pytest.mark.parametrize(("documents", "advantageous"), [(3, (1,)), (3, (2, 0)), (4, (1, 2, 3))])
def test_draw_trivial_slots_can_draw_all(documents: int, advantageous: Slots) -> None:
    every = set(itertools.permutations(range(documents), len(advantageous))) - {advantageous}
    drawn = draw_trivial_slots("e", documents=documents, advantageous=advantageous, k=len(every), seed=0)
    assert set(drawn) == every


@pytest.mark.parametrize(("documents", "advantageous"), [(9, (4,)), (4, (2, 3))])
def test_draw_trivial_slots_is_uniform(documents: int, advantageous: Slots) -> None:
    every = set(itertools.permutations(range(documents), len(advantageous))) - {advantageous}
    k = len(every) // 2
    drawn = Counter(
        slots
        for index in range(2000)
        for slots in draw_trivial_slots(f"e{index}", documents=documents, advantageous=advantageous, k=k, seed=0)
    )
    # 2000 draws with probability p: 4 sigma are 4 * sqrt(2000 p (1 - p)) <= 4 * sqrt(500) = 89.
    assert set(drawn) == every
    assert all(abs(count - 2000 * k / len(every)) < 90 for count in drawn.values())


def test_draw_trivial_slots_is_pinned() -> None:
    """Changing this value changes which rows every study trains on."""
    example = make_example(8)
    drawn = draw_trivial_slots("fox-0001", documents=20, advantageous=(0,), k=4, seed=0)
    assert drawn == ((1,), (11,), (6,), (13,))
    shown = arrange(example, 8, (3,), order="reshuffled", seed=0)
    assert [document.title for document in shown] == ["d2", "d5", "d6", "d0", "d4", "d3", "d7", "d1"]


def test_draw_trivial_slots_of_pairs_is_pinned() -> None:
    drawn = draw_trivial_slots("fox-0001", documents=20, advantageous=(18, 19), k=4, seed=0)
    assert drawn == ((0, 7), (12, 2), (6, 8), (15, 14))


# --- slots by the study's method


@pytest.mark.parametrize("anchor_weight", [0, 1])
def test_sampled_slots_on_policy_are_those_of_the_rows(
    make_recipe: Callable[..., Recipe], anchor_weight: float
) -> None:
    method = {"name": "r1-on-policy", "k": 2, "anchor_weight": anchor_weight}
    study, example = make_recipe(method=method).study, make_example(4)
    slots = sampled_slots(study, example)
    anchor = ((0,),) if anchor_weight else ()
    assert slots == anchor + trivial_slots(study, example)
    assert len(slots) == study.method.responses_per_example


def test_sampled_slots_off_policy_are_the_advantageous_ones(make_recipe: Callable[..., Recipe]) -> None:
    study = make_recipe(method={"advantageous_slot": "last"}).study
    assert sampled_slots(study, make_example(4)) == ((3,),)
    assert study.method.responses_per_example == 1


@pytest.mark.parametrize(
    ("setting", "slots_of_example"), [("advantageous_slot", advantageous_slots), ("teacher_slot", teacher_slots)]
)
def test_random_slots_depend_on_the_seed(
    make_recipe: Callable[..., Recipe], setting: str, slots_of_example: Callable[[Study, Example], Slots]
) -> None:
    drawn = set()
    for seed in range(3):
        study = make_recipe(method={setting: "random"}, seed=seed).study
        drawn.add(tuple(slots_of_example(study, make_example(documents)) for documents in range(4, 16)))
    assert len(drawn) == 3


# --- reordering by rank


def test_arrange_shows_the_document_of_each_rank_at_its_slot() -> None:
    """An order that is not its own inverse: ranks 0 to 3 go to slots 2, 0, 3 and 1."""
    example = make_example(4)
    plain = arrange(example, 4, (1,))
    assert [document.title for document in plain] == ["d1", "d0", "d2", "d3"]
    reordered = arrange(example, 4, (1,), slot_of_rank=(2, 0, 3, 1))
    assert [document.title for document in reordered] == ["d0", "d3", "d1", "d2"]


def test_rank_slots_by_accuracy_by_hand() -> None:
    """Accuracies .4, .9, .2 and .7 at slots 0 to 3; then measured at the ends alone; then at another length."""
    assert rank_slots_by_accuracy((0, 1, 2, 3), (0.4, 0.9, 0.2, 0.7), 4, 4) == (1, 3, 0, 2)
    assert rank_slots_by_accuracy((0, 3), (0.1, 0.4), 4, 4) == (3, 2, 1, 0)
    assert rank_slots_by_accuracy((0, 2, 4), (0.5, 0.1, 0.9), 5, 3) == (2, 0, 1)
    # Of equally good slots the first comes first.
    assert rank_slots_by_accuracy((0, 1, 2), (0.5, 0.5, 0.5), 3, 3) == (0, 1, 2)


# --- eval_specs placements


def slots_of(documents: int, hops: int, setting: Any) -> list[Slots]:
    return [placement.slots for placement in evaluated_placements(documents, [hops], setting)[hops]]


@pytest.mark.parametrize(
    ("documents", "setting", "expected"),
    [
        (4, "all", [0, 1, 2, 3]),
        (20, (7, 3), [7, 3]),
        (20, 5, [0, 5, 10, 14, 19]),
        (20, 1, [0]),
        (20, 2, [0, 19]),
        (3, 10, [0, 1, 2]),
    ],
)
def test_evaluated_placements_of_one_hop(documents: int, setting: Any, expected: list[int]) -> None:
    assert slots_of(documents, 1, setting) == [(slot,) for slot in expected]


def test_evaluated_placements_of_several_hops_are_ordered_tuples() -> None:
    assert slots_of(20, 2, 3) == [(0, 10), (0, 19), (10, 0), (10, 19), (19, 0), (19, 10)]
    assert slots_of(4, 3, "all") == list(itertools.permutations(range(4), 3))
    assert slots_of(9, 2, ((8, 0), (3, 4))) == [(8, 0), (3, 4)]


def test_evaluated_placements_have_groups_for_pairs_only() -> None:
    assert {placement.group for placement in evaluated_placements(9, [2], 3)[2]} == {""}


def test_evaluated_placements_pairs_are_the_published_ones() -> None:
    found: dict[str, list[Slots]] = {}
    for placement in evaluated_placements(20, [2], "pairs")[2]:
        found.setdefault(placement.group, []).append(placement.slots)
    assert found == {
        "connected": [(0, 1), (5, 6), (12, 13), (17, 18)],
        "disconnected": [(0, 8), (5, 13), (6, 14), (8, 16)],
        "reversed": [(8, 0), (13, 5), (14, 6), (16, 8)],
    }


@given(st.integers(2, 4).flatmap(lambda hops: st.tuples(st.integers(hops + 1, 60), st.just(hops))))
def test_evaluated_placements_pairs_scale(size: tuple[int, int]) -> None:
    documents, hops = size
    placements = evaluated_placements(documents, [hops], "pairs")[hops]
    assert len({placement.slots for placement in placements}) == len(placements) <= 12
    assert placements[0].group == "connected"
    if documents >= 20:
        assert len(placements) == 12
    for placement in placements:
        slots = placement.slots
        assert len(slots) == len(set(slots)) == hops
        assert set(slots) <= set(range(documents))
        steps = {later - earlier for earlier, later in itertools.pairwise(slots)}
        if placement.group == "connected":
            assert steps == {1}
        elif placement.group == "disconnected":
            assert min(steps) > 1
        else:
            assert max(steps) < -1


@given(st.integers(5, 40))
def test_evaluated_placements_are_equally_many_for_all_hops(documents: int) -> None:
    placed = evaluated_placements(documents, [2, 3, 4], "pairs")
    groups = [[placement.group for placement in placements] for placements in placed.values()]
    assert groups[0] == groups[1] == groups[2]


@pytest.mark.parametrize(
    ("documents", "hops", "slots", "expected"),
    [
        (20, 1, 3, [(0,), (10,), (19,)]),
        (20, 2, 3, [(0, 1), (9, 10), (18, 19)]),
        (6, 4, "all", [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5)]),
        (4, 3, 9, [(0, 1, 2), (1, 2, 3)]),
    ],
)
def test_candidate_placements_are_adjacent(documents: int, hops: int, slots: Any, expected: list[Slots]) -> None:
    assert [placement.slots for placement in candidate_placements(documents, hops, slots)] == expected
