import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.sampling.consensus import most_consistent
from pos2distill.tasks.metrics import f1


def test_most_consistent_by_hand() -> None:
    """F1 of red fox and red fox runs: 2 * 2 / 5; of red fox runs and fox: 2 * 1 / 4; of red fox and fox: 2 * 1 / 3.

    Sums: red fox .8 + .667, red fox runs .8 + .5, fox .667 + .5, owl 0.
    """
    assert most_consistent(["An owl.", "Fox", "The red fox", "red fox runs"]) == 2


@pytest.mark.parametrize(
    ("texts", "index"),
    [
        (["7", "8", "7", "9"], 0),  # the most frequent of short answers
        (["9", "8", "8"], 1),
        (["one", "two", "three"], 0),  # all equally bad
        (["", "", "fox", "a fox"], 2),  # an empty text agrees with none, not even with another
        (["alone"], 0),
    ],
)
def test_most_consistent_takes_the_first_of_equal_texts(texts: list[str], index: int) -> None:
    assert most_consistent(texts) == index


@given(st.lists(st.lists(st.sampled_from("abcdxyz"), max_size=5).map(" ".join), min_size=2, max_size=6))
def test_most_consistent_equals_the_definition(texts: list[str]) -> None:
    agreement = []
    for index, text in enumerate(texts):
        others = texts[:index] + texts[index + 1 :]
        agreement.append(np.mean([f1(text, [other]) for other in others]))
    assert agreement[most_consistent(texts)] == pytest.approx(max(agreement))
