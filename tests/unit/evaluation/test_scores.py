from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from pos2distill.evaluation.scores import (
    Grid,
    corrected_gap,
    format_slots,
    paired_difference,
    to_curve,
    to_grid,
    truncation_warning,
)

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
def test_to_grid_refuses_missing_and_duplicate_predictions(rows: list[tuple[str, int, int]]) -> None:
    with pytest.raises(ValueError, match="5 documents: expected each example once at each slot"):
        to_grid(predictions(rows), 5)


def test_to_curve_by_hand() -> None:
    curve = to_curve(to_grid(predictions(ROWS), 5), bootstrap_samples=100, seed=0)
    assert curve.accuracy_by_slot == (1.0, 0.0, 0.5)
    assert (curve.mean, curve.gap, curve.examples, curve.slots) == (0.5, 1.0, 2, (0, 2, 4))
    assert (curve.f1, curve.by_group) == (0.25, {})
    assert curve.accuracy_ci95[:2] == ((1.0, 1.0), (0.0, 0.0))  # the same in every resample


def test_to_curve_resamples_whole_examples() -> None:
    """Where all slots of an example agree, resampling examples keeps GAP at 0; resampling cells would not."""
    curve = to_curve(grid_of([[1, 1], [0, 0], [1, 1], [0, 0]]), bootstrap_samples=500, seed=0)
    assert curve.gap_ci95 == (0.0, 0.0)
    assert curve.ci95[0] < 0.5 < curve.ci95[1]


def test_to_curve_interval_equals_the_binomial_one() -> None:
    """400 examples, 30 % right: the standard error is sqrt(.3 * .7 / 400) = .0229."""
    curve = to_curve(grid_of([[1.0]] * 120 + [[0.0]] * 280), bootstrap_samples=4000, seed=0)
    assert curve.ci95 == pytest.approx((0.3 - 1.96 * 0.0229, 0.3 + 1.96 * 0.0229), abs=0.004)


def test_to_curve_interval_covers_the_true_mean_in_95_percent() -> None:
    random = np.random.default_rng(0)
    ability = np.asarray([0.9, 0.5, 0.3, 0.6])
    covered = 0
    for seed in range(200):
        curve = to_curve(grid_of((random.random((80, 4)) < ability).tolist()), bootstrap_samples=400, seed=seed)
        covered += curve.ci95[0] <= ability.mean() <= curve.ci95[1]
    # 190 expected; the standard deviation of a binomial of 200 at .95 is 3.1.
    assert 178 <= covered <= 199


def test_to_curve_intervals_depend_on_the_seed_only() -> None:
    grid = grid_of(np.random.default_rng(1).integers(0, 2, (30, 3)).tolist())
    first, again, other = (to_curve(grid, bootstrap_samples=200, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.ci95 != other.ci95 or first.gap_ci95 != other.gap_ci95


def test_paired_difference_by_hand() -> None:
    before, after = grid_of([[1, 0], [0, 0]]), grid_of([[1, 1], [1, 1]])
    paired = paired_difference(before, after, bootstrap_samples=1000, seed=0)
    assert paired["mean_difference"] == 0.75
    # Examples gain 1/2 and 1, so a resample of the two has a mean of 1/2, 3/4 or 1.
    assert paired["ci95"] == (0.5, 1.0)


def test_paired_difference_of_equal_models_is_zero() -> None:
    grid = grid_of([[1, 0], [0, 1], [1, 1]])
    assert paired_difference(grid, grid, bootstrap_samples=100, seed=0) == {"mean_difference": 0.0, "ci95": (0.0, 0.0)}


def test_paired_difference_refuses_different_prompts() -> None:
    one = grid_of([[1, 0], [0, 1]])
    for other in (
        grid_of([[1, 0], [0, 1], [1, 1]]),
        grid_of([[1], [0]]),
        replace(one, documents=8),
        replace(one, example_ids=("x", "y")),
    ):
        with pytest.raises(ValueError, match="requires the same examples at the same slots"):
            paired_difference(one, other, bootstrap_samples=100, seed=0)


def test_to_curve_groups_of_pairs_by_hand() -> None:
    """Two examples, the second of three hops: one column for each placement, with the slots of the fewest hops."""
    placed = [("connected", [0, 1], [0, 1, 2]), ("connected", [3, 4], [2, 3, 4]), ("reversed", [4, 0], [4, 2, 0])]
    rows = [
        {
            "example_id": example,
            "documents": 5,
            "placement": number,
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


@pytest.mark.parametrize(("slots", "shown"), [(6, "7"), ((6,), "7"), ((6, 18), "7>19")])
def test_format_slots(slots: int | tuple[int, ...], shown: str) -> None:
    assert format_slots(slots) == shown


@pytest.mark.parametrize(
    ("counts", "warning"),
    [
        (
            {"prompts": 20, "hit_max_tokens": 3},
            "3 of 20 answers were cut at evaluation.max_new_tokens; raise it if they ",
        ),
        (
            {"sampled": 10, "kept": 9, "hit_max_tokens": 2},
            "2 of 10 answers were cut at sampling.max_new_tokens; raise ",
        ),
        ({"prompts": 20, "hit_max_tokens": 2}, None),  # exactly a tenth
        ({"rows": 5}, None),
    ],
)
def test_truncation_warning_above_a_tenth_of_the_answers(counts: dict[str, int], warning: str | None) -> None:
    actual = truncation_warning(counts)
    if warning is None:
        assert actual is None
    else:
        assert actual is not None
        assert actual.startswith(warning)


# --- the GAP without the bias of a maximum


def test_corrected_gap_of_a_flat_model_is_zero_where_the_gap_is_not() -> None:
    """300 models that answer each question with probability 0.7 at every slot: 100 questions, 15 slots."""
    generator = np.random.default_rng(0)
    gaps, corrected = [], []
    for seed in range(300):
        grid = grid_of(generator.random((100, 15)) < 0.7)
        gaps.append(to_curve(grid, bootstrap_samples=100, seed=0).gap)
        corrected.append(corrected_gap(grid, splits=20, seed=seed))
    assert np.mean(gaps) > 0.1
    assert abs(np.mean(corrected)) < 3 * np.std(corrected) / np.sqrt(len(corrected))


def test_corrected_gap_finds_a_gap_that_is_there() -> None:
    """One slot of five is 0.4 worse: the choice of the worst is never wrong, that of the best does not matter."""
    generator = np.random.default_rng(1)
    probability_S = np.array([0.8, 0.8, 0.4, 0.8, 0.8])
    corrected = [
        corrected_gap(grid_of(generator.random((200, 5)) < probability_S), splits=20, seed=0) for _ in range(100)
    ]
    assert np.mean(corrected) == pytest.approx(0.4, abs=0.01)


def test_corrected_gap_by_hand() -> None:
    """Two slots, one always right and one never: 1 whatever the halves."""
    assert corrected_gap(grid_of(np.tile([1, 0], (6, 1))), splits=3, seed=0) == 1.0
