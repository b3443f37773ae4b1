from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.records import Document, Example
from pos2distill.tasks.permutations import arrange, draw_trivial_slots, spread_slots


def make_example(documents: int, gold: int = 0) -> Example:
    shown = tuple(Document(f"d{index}", f"text {index}", index == gold) for index in range(documents))
    return Example(f"example-{documents}", "question", ("answer",), shown)


places = st.integers(2, 12).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(0, n - 1), st.integers(0, 3))
)


@given(places)
def test_gold_stands_at_the_slot_and_distractors_keep_their_order(place: tuple[int, int, int, int]) -> None:
    documents, slot, gold, _ = place
    example = make_example(documents, gold)
    shown = arrange(example, documents, slot)
    assert shown[slot] == example.gold
    assert shown[:slot] + shown[slot + 1 :] == example.distractors


@given(places)
def test_reshuffling_permutes_distractors_as_a_pure_function(place: tuple[int, int, int, int]) -> None:
    documents, slot, gold, seed = place
    example = make_example(documents, gold)
    shown = arrange(example, documents, slot, order="reshuffled", seed=seed)
    assert shown[slot] == example.gold
    assert Counter(shown) == Counter(example.documents)
    assert shown == arrange(example, documents, slot, order="reshuffled", seed=seed)


def test_reshuffling_differs_by_seed_and_slot() -> None:
    example = make_example(12)
    orders = [
        tuple(d.title for d in arrange(example, 12, slot, order="reshuffled", seed=seed) if not d.gold)
        for seed in range(3)
        for slot in range(3)
    ]
    assert len(set(orders)) == 9


def test_a_shorter_prompt_takes_the_first_distractors() -> None:
    assert [document.title for document in arrange(make_example(6), 3, 1)] == ["d1", "d0", "d2"]


@pytest.mark.parametrize(("documents", "slot"), [(4, 0), (3, 3), (3, -1)])
def test_what_cannot_be_arranged_is_refused(documents: int, slot: int) -> None:
    with pytest.raises(ValueError, match=f"slot {slot} of {documents} documents, but example-3 has 3"):
        arrange(make_example(3), documents, slot)


@given(st.integers(2, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(1, n - 1))))
def test_trivial_slots_are_distinct_and_never_the_advantageous(place: tuple[int, int, int]) -> None:
    documents, advantageous, k = place
    drawn = draw_trivial_slots("e", documents=documents, advantageous=advantageous, k=k, seed=1)
    assert len(set(drawn)) == k
    assert set(drawn) <= set(range(documents)) - {advantageous}
    assert drawn == draw_trivial_slots("e", documents=documents, advantageous=advantageous, k=k, seed=1)


def test_every_trivial_slot_is_drawn_equally_often() -> None:
    drawn = Counter(
        slot
        for index in range(2000)
        for slot in draw_trivial_slots(f"e{index}", documents=9, advantageous=4, k=4, seed=0)
    )
    # 2000 draws with probability 1/2 each: 4 sigma are 4 * sqrt(500) = 89.
    assert sorted(drawn) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert all(abs(count - 1000) < 90 for count in drawn.values())


def test_one_draw_is_pinned() -> None:
    """Changing this value changes which rows every study trains on."""
    example = make_example(8)
    assert draw_trivial_slots("fox-0001", documents=20, advantageous=0, k=4, seed=0) == (1, 11, 6, 13)
    shown = arrange(example, 8, 3, order="reshuffled", seed=0)
    assert [document.title for document in shown] == ["d2", "d5", "d6", "d0", "d4", "d3", "d7", "d1"]


@pytest.mark.parametrize(
    ("documents", "slots", "expected"),
    [
        (4, "all", (0, 1, 2, 3)),
        (20, (7, 3), (7, 3)),
        (20, 5, (0, 5, 10, 14, 19)),
        (20, 1, (0,)),
        (20, 2, (0, 19)),
        (3, 10, (0, 1, 2)),
    ],
)
def test_spread_slots(documents: int, slots: object, expected: tuple[int, ...]) -> None:
    assert spread_slots(documents, slots) == expected  # type: ignore[arg-type]
