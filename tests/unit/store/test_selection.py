import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.store.selection import Selection
from tests.support.tables import nothing_known


def test_selection_by_hand() -> None:
    selection = nothing_known(6, wanted=2)
    assert (selection.end, selection.certain_end, selection.missing.tolist()) == (6, 2, [0, 1, 2, 3, 4, 5])
    selection.add([4, 0], [True, False])
    # One of 1 to 3 may be enough together with 4, so 5 may be needed only if none of them is kept.
    assert (selection.end, selection.certain_end, selection.missing.tolist()) == (6, 3, [1, 2, 3, 5])
    selection.add([2], [True])
    assert (selection.end, selection.certain_end, selection.missing.tolist()) == (5, 3, [1, 3])
    selection.add([1, 3], [False, False])
    assert (selection.end, selection.certain_end, selection.missing.tolist(), selection.kept) == (5, 5, [], 2)


@pytest.mark.parametrize("wanted", [4, 9])
def test_selection_of_too_few_needs_all(wanted: int) -> None:
    selection = Selection(np.ones(5, bool), np.array([1, 0, 1, 0, 1], bool), wanted)
    assert (selection.end, selection.certain_end, selection.kept) == (5, 5, 3)


def test_selection_expects_unknown_answers_to_be_kept_as_often_as_known_ones() -> None:
    selection = nothing_known(6, wanted=2)
    assert selection.likely_end == 2
    selection.add([4, 0], [True, False])  # a rate of (1 + 1) / (2 + 1): of 1, 2 and 3, two
    assert selection.likely_end == 4
    selection.add([2], [True])
    assert selection.likely_end == 4
    selection.add([1, 3], [False, False])
    assert selection.likely_end == selection.end == 5
    assert nothing_known(3, wanted=4).likely_end == 3


def test_selection_expects_whole_answers_although_rates_are_rounded() -> None:
    """None of 9 is kept, a rate of .1: ten unknown ones are enough, though in floating point they add up to .9999."""
    known_N = np.arange(25) < 9
    assert Selection(known_N, np.zeros(25, bool), wanted=1).likely_end == 19


def test_selection_copies_what_it_is_given() -> None:
    sampled_N = np.zeros(3, bool)
    Selection(sampled_N, sampled_N, 1).add([0], [True])
    assert not sampled_N.any()


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 12), st.randoms(use_true_random=False))
def test_selection_is_the_same_in_any_order(kept: list[bool], wanted: int, random: "st.Random") -> None:  # type: ignore[name-defined]
    """The first wanted kept ones; what is called certain stays needed, and what is not needed never becomes so."""
    expected = [index for index, is_kept in enumerate(kept) if is_kept][:wanted]
    selection = nothing_known(len(kept), wanted)
    order = list(range(len(kept)))
    random.shuffle(order)
    certain, needed = 0, len(kept)
    for index in order:
        selection.add([index], [kept[index]])
        assert certain <= selection.certain_end <= selection.end <= needed
        certain, needed = selection.certain_end, selection.end
        # Who samples one after the other never waits: the first unknown one is likely to be needed if it may be.
        first = int(np.argmin(np.append(selection.sampled_N, False)))
        assert not selection.likely_end <= first < selection.end
    assert selection.certain_end == selection.end
    assert np.flatnonzero(selection.kept_N[: selection.end]).tolist() == expected
