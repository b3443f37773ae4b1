from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from pos2distill.evaluation.scores import (
    Grid,
    GridMismatch,
    expected_accuracy,
    format_slots,
    paired_difference,
    questions_to_see_positions,
    share_examples,
    to_curve,
    to_grid,
)
from pos2distill.evaluation.statistics import accuracy_interval

# Correctness of two examples at three slots.
ROWS = [
    ("b", 4, 1),
    ("a", 0, 1),
    ("a", 2, 0),
    ("b", 0, 1),
    ("a", 4, 0),
    ("b", 2, 0),
]


def predictions(rows: list[tuple[str, int, int]], documents: int = 5) -> pa.Table:
    return pa.table(
        {
            "example_id": [row[0] for row in rows],
            "placement": pa.array([row[1] for row in rows], pa.int32()),
            "order": pa.array([0] * len(rows), pa.int32()),
            "slots": pa.array([[row[1]] for row in rows], pa.list_(pa.int32())),
            "group": [""] * len(rows),
            "correct": [bool(row[2]) for row in rows],
            "f1": pa.array([row[2] / 2 for row in rows], pa.float32()),
            "documents": pa.array([documents] * len(rows), pa.int32()),
        }
    )


def grid_of(correct: npt.ArrayLike) -> Grid:
    values = np.asarray(correct, float)
    slots = tuple((slot,) for slot in range(values.shape[1]))
    ids = tuple(f"e{index:04d}" for index in range(len(values)))
    return Grid(9, slots, ("",) * len(slots), ids, values, values)


def test_to_grid_by_hand() -> None:
    grid = to_grid(pa.concat_tables([predictions(ROWS), predictions(ROWS[:1], documents=9)]), 5)
    assert (grid.documents, grid.slots, grid.example_ids) == (5, ((0,), (2,), (4,)), ("a", "b"))
    assert grid.correct_ES.tolist() == [[1, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize("rows", [ROWS[1:], [*ROWS, ROWS[0]], []])
def test_to_grid_rejects_missing_and_duplicate_predictions(rows: list[tuple[str, int, int]]) -> None:
    with pytest.raises(ValueError, match="5 documents: expected each example once at each slot"):
        to_grid(predictions(rows), 5)


def test_to_curve_by_hand() -> None:
    curve = to_curve(to_grid(predictions(ROWS), 5), bootstrap_samples=100, seed=0)
    assert curve.accuracy_by_slot == (1.0, 0.0, 0.5)
    assert (curve.mean, curve.gap, curve.examples, curve.slots) == (0.5, 1.0, 2, (0, 2, 4))
    assert (curve.f1, curve.by_group) == (0.25, {})
    # Wilson's interval of 2 of 2, by hand: 1 / (1 + 1.96^2 / 2).
    assert curve.accuracy_ci95[0] == pytest.approx((0.342, 1.0), abs=1e-3)
    assert curve.accuracy_ci95[1] == pytest.approx((0.0, 0.658), abs=1e-3)


def test_to_curve_intervals_depend_on_the_seed_only() -> None:
    grid = grid_of(np.random.default_rng(1).integers(0, 2, (30, 3)).tolist())
    first, again, other = (to_curve(grid, bootstrap_samples=200, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.gap_corrected != other.gap_corrected


def test_paired_difference_by_hand() -> None:
    before, after = grid_of([[1, 0], [0, 0]]), grid_of([[1, 1], [1, 1]])
    paired = paired_difference(before, after, bootstrap_samples=1000, seed=0)
    assert paired["mean_difference"] == 0.75
    assert paired["ci95"] == (-1.0, 1.0)  # two examples tell next to nothing
    # The deviation of 1/2 and 1 is 1/4, but one of two examples could be 0.71 from the others.
    assert paired["questions_to_see"] == {"1": 39245, "2": 9812, "5": 1570, "10": 393}


def test_questions_to_see_positions_by_hand() -> None:
    """Variances of the pairs 1/2, 3/16 and 3/16, on average 7/24: ((1.95996 + .84162) / .05)^2 * 7/24 = 915.7."""
    grid = grid_of([[1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 1]])
    assert questions_to_see_positions(grid) == {"1": 22893, "2": 5724, "5": 916, "10": 229}


def test_questions_to_see_positions_of_slots_that_agree_or_of_one() -> None:
    """Where no answer differs, one of the 4 examples could: a deviation of 1/2."""
    assert questions_to_see_positions(grid_of([[1, 1]] * 4))["5"] == 785
    assert questions_to_see_positions(grid_of([[1], [0]])) == {}


def test_paired_difference_of_equal_models_is_zero() -> None:
    grid = grid_of([[1, 0], [0, 1], [1, 1]])
    paired = paired_difference(grid, grid, bootstrap_samples=100, seed=0)
    assert (paired["mean_difference"], paired["gap_change"]) == (0.0, 0.0)
    # 0 of 3 examples changed, which leaves as much open as 0 of 3 correct answers do.
    for name in ("ci95", "gap_change_ci95"):
        assert paired[name] == pytest.approx((-0.561, 0.561), abs=1e-3)


def test_paired_difference_rejects_different_prompts() -> None:
    one = grid_of([[1, 0], [0, 1]])
    for other in (
        grid_of([[1, 0], [0, 1], [1, 1]]),
        grid_of([[1], [0]]),
        replace(one, documents=8),
        replace(one, example_ids=("x", "y")),
    ):
        with pytest.raises(ValueError, match="requires the same examples at the same slots"):
            paired_difference(one, other, bootstrap_samples=100, seed=0)


def test_paired_difference_leaves_out_refused_examples() -> None:
    """e1 is refused in one, e0 in the other: what is left is e2."""
    both = grid_of([[1, 0], [0, 0], [0, 1]])
    before = replace(
        both,
        example_ids=("e0000", "e0002"),
        correct_ES=both.correct_ES[[0, 2]],
        f1_ES=both.f1_ES[[0, 2]],
        refused=frozenset({"e0001"}),
    )
    after = replace(
        both,
        example_ids=("e0001", "e0002"),
        correct_ES=np.array([[1.0, 1.0], [1.0, 1.0]]),
        f1_ES=both.f1_ES[1:],
        refused=frozenset({"e0000"}),
    )
    shared = share_examples(before, after)
    assert [grid.example_ids for grid in shared] == [("e0002",)] * 2
    assert [grid.correct_ES.tolist() for grid in shared] == [[[0, 1]], [[1, 1]]]
    assert [grid.f1_ES.tolist() for grid in shared] == [[[0, 1]]] * 2
    assert paired_difference(before, after, bootstrap_samples=100, seed=0)["mean_difference"] == 0.5
    with pytest.raises(ValueError, match="requires the same examples"):
        share_examples(before, replace(after, refused=frozenset()))
    with pytest.raises(ValueError, match="requires the same examples"):
        share_examples(before, replace(after, refused=frozenset({"e0000", "e0002"})))


def test_share_examples_tells_other_questions_with_the_same_ids_apart() -> None:
    grid = grid_of([[1, 0], [0, 1]])
    one, other = replace(grid, questions="one"), replace(grid, questions="other")
    with pytest.raises(GridMismatch, match="the same ids are of other questions"):
        share_examples(one, other)
    share_examples(one, one)
    share_examples(one, grid)  # of an earlier version, which kept no digest


def test_to_curve_groups_of_pairs_by_hand() -> None:
    """Two examples, the second of three hops: one column for each placement, with the slots of the fewest hops."""
    placed = [("connected", [0, 1], [0, 1, 2]), ("connected", [3, 4], [2, 3, 4]), ("reversed", [4, 0], [4, 2, 0])]
    rows = [
        {
            "example_id": example,
            "documents": 5,
            "placement": number,
            "order": 0,
            "group": group,
            "slots": pair if example == "two" else triple,
            "correct": right,
            "f1": float(right),
        }
        for example, rights in (("two", (True, False, True)), ("three", (True, True, False)))
        for number, ((group, pair, triple), right) in enumerate(zip(placed, rights, strict=True))
    ]
    curve = to_curve(to_grid(pa.Table.from_pylist(rows), 5), bootstrap_samples=100, seed=0)
    assert curve.slots == ((0, 1), (3, 4), (4, 0))
    assert curve.accuracy_by_slot == (1.0, 0.5, 0.5)
    assert curve.by_group == {"connected": 0.75, "reversed": 0.5}
    # Two examples with 1 and 1/2: n = .75 * .25 / (.125 / 2) * (1.96 / 12.706)^2 = .0714, z^2 / n = 53.8;
    # (.75 + 26.9 -+ sqrt(.75 * .25 * 53.8 + 26.9^2)) / 54.8.
    assert curve.by_group_ci95["connected"] == pytest.approx((0.0103, 0.9988), abs=2e-4)
    # One slot, 1 of 2: the ends of Poisson's distribution for one right and one wrong answer, .0513 / 2.
    assert curve.by_group_ci95["reversed"] == pytest.approx((0.0257, 0.9743), abs=1e-4)


@pytest.mark.parametrize(("slots", "shown"), [(6, "7"), ((6,), "7"), ((6, 18), "7>19")])
def test_format_slots(slots: int | tuple[int, ...], shown: str) -> None:
    assert format_slots(slots) == shown


# --- orders of the distractors, and the ranks of a retriever


def test_to_grid_averages_over_orders() -> None:
    """Two slots, each in two orders."""
    first = predictions([("a", 0, 1), ("a", 4, 1), ("b", 0, 0), ("b", 4, 1)])
    second = predictions([("b", 4, 0), ("b", 0, 0), ("a", 4, 1), ("a", 0, 0)])
    orders = pa.array([1] * 4, pa.int32())
    second = second.set_column(second.column_names.index("order"), "order", orders)
    grid = to_grid(pa.concat_tables([first, second]), 5)
    assert (grid.slots, grid.orders) == (((0,), (4,)), 2)
    assert grid.correct_ES.tolist() == [[0.5, 1.0], [0.0, 0.5]]
    curve = to_curve(grid, bootstrap_samples=100, seed=0)
    # At the first slot `a` depends on the order, at the second `b`.
    assert curve.broken_by_order == (0.5, 0.5)
    assert curve.accuracy_by_slot == (0.25, 0.75)


def test_to_grid_rejects_an_order_without_a_prediction() -> None:
    table = predictions([*ROWS, ROWS[0]])
    orders = pa.array([0] * len(ROWS) + [1], pa.int32())
    with pytest.raises(ValueError, match="5 documents: expected each example once at each slot"):
        to_grid(table.set_column(table.column_names.index("order"), "order", orders), 5)


def test_broken_by_order_needs_several_orders() -> None:
    assert to_curve(to_grid(predictions(ROWS), 5), bootstrap_samples=100, seed=0).broken_by_order == ()


def test_expected_accuracy_by_hand() -> None:
    """Accuracies 1, .5, 0 at slots 0, 2, 4: .75 at rank 1 by interpolation."""
    grid = to_grid(predictions([("a", 0, 1), ("a", 2, 0), ("a", 4, 0), ("b", 0, 1), ("b", 2, 1), ("b", 4, 0)]), 5)
    assert expected_accuracy(grid, (1,))[0] == 1.0
    assert expected_accuracy(grid, (0, 2))[0] == 0.75
    assert expected_accuracy(grid, (1, 1, 0, 0, 2))[0] == pytest.approx((1 + 0.75 + 0 + 0) / 4)
    accuracy, (low, high) = expected_accuracy(grid, (3, 2, 1, 1, 1))
    assert low < accuracy < high


def test_expected_accuracy_of_one_rank_is_as_certain_as_that_slot() -> None:
    """Other slots, which have no weight, do not count as further answers."""
    rows = [(name, slot, int(slot > 0 or name < "d")) for name in "abcdefgh" for slot in (0, 2, 4)]
    grid = to_grid(predictions(rows), 5)
    curve = to_curve(grid, bootstrap_samples=100, seed=0)
    accuracy, interval = expected_accuracy(grid, (1,))
    assert (accuracy, *interval) == pytest.approx((3 / 8, *curve.accuracy_ci95[0]))


def test_expected_accuracy_counts_as_many_answers_as_its_weights_allow() -> None:
    """Weights of .9 and .1 are as certain as 1 / (.81 + .01) answers; the one wrong answer varies less than these."""
    correct_ES = np.ones((60, 2))
    correct_ES[0, 1] = 0
    accuracy, interval = expected_accuracy(grid_of(correct_ES), (0.9, 0.1))
    assert accuracy == pytest.approx(1 - 0.1 / 60)
    assert interval == pytest.approx(accuracy_interval(correct_ES @ np.array([0.9, 0.1]), answers=1 / 0.82))


def test_expected_accuracy_beyond_the_measured_slots_is_theirs() -> None:
    """Slots 1 and 2 of five are measured."""
    grid = to_grid(predictions([("a", 2, 0), ("a", 1, 1), ("b", 2, 0), ("b", 1, 1)]), 5)
    assert expected_accuracy(grid, (1,))[0] == 1.0
    assert expected_accuracy(grid, (0, 0, 0, 0, 1))[0] == 0.0
