import numpy as np
import pytest

from pos2distill.evaluation.statistics import (
    accuracy_interval,
    difference_interval,
    fraction_interval,
    questions_needed,
    ratio_interval,
    student_t,
)
from tests.support.simulated import answers

# --- accuracies


@pytest.mark.parametrize(
    ("right", "of", "expected"),
    [
        # Wilson's interval: 1 / (1 + 1.96^2 / 100), and the textbook's 30 of 100.
        (100, 100, (0.9630, 1.0)),
        (0, 100, (0.0, 0.0370)),
        (30, 100, (0.2189, 0.3958)),
    ],
)
def test_accuracy_interval_of_one_slot_is_wilsons(right: int, of: int, expected: tuple[float, float]) -> None:
    value_E = np.array([1.0] * right + [0.0] * (of - right))
    assert accuracy_interval(value_E) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("wrong", "of", "end"), [(1, 60, 0.0513), (2, 60, 0.3554), (3, 60, 0.8177), (1, 2, 0.0513)])
def test_accuracy_interval_of_few_wrong_answers_ends_where_poissons_does(wrong: int, of: int, end: float) -> None:
    """P(X >= x) = .05 for x = 1, 2 and 3 of Poisson's distribution with this mean: 1 - e^-.0513 = .05 for 1."""
    value_E = np.array([1.0] * (of - wrong) + [0.0] * wrong)
    low, high = accuracy_interval(value_E)
    assert high == pytest.approx(1 - end / of)
    assert accuracy_interval(1 - value_E) == pytest.approx((1 - high, 1 - low))


def test_accuracy_interval_of_four_wrong_answers_is_wilsons_again() -> None:
    assert accuracy_interval(np.array([1.0] * 56 + [0.0] * 4)) == pytest.approx((0.8407, 0.9738), abs=1e-4)


@pytest.mark.parametrize("slots", [1, 3, 5])
def test_accuracy_interval_contains_accuracies_of_nearly_1(slots: int) -> None:
    """One wrong of 60 * S is expected in one of seven studies; the interval of it must contain the truth."""
    value_E = np.ones(60)
    value_E[0] = 1 - 1 / slots
    low, high = accuracy_interval(value_E, answers=slots)
    assert low < 1 - 0.14 / (60 * slots) < high < 1


def test_accuracy_interval_counts_independent_answers() -> None:
    """All slots of an example equal: its 4 answers tell as much as one. Independent: as much as four."""
    first_E1 = answers([0.5], 400, 0)
    low, high = accuracy_interval(first_E1[:, 0])
    repeated = accuracy_interval(np.tile(first_E1, (1, 4)).mean(1), answers=4)
    assert repeated == pytest.approx((low, high))
    low, high = accuracy_interval(answers([0.5] * 4, 400, 0).mean(1), answers=4)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 1600**0.5, rel=0.1)


def test_accuracy_interval_of_equal_examples_counts_examples() -> None:
    """Each example half right has no variance. As 5 of 10."""
    assert accuracy_interval(np.full(10, 0.5), answers=2) == pytest.approx((0.2366, 0.7634), abs=1e-4)


@pytest.mark.parametrize("rounded", [[1.0] * 19 + [1 + 2**-52], [1 + 2**-52] * 3 + [1 + 2**-51] * 3])
def test_accuracy_interval_of_right_answers_is_not_changed_by_rounding(rounded: list[float]) -> None:
    """Weighted sums of answers that are all right are not exactly 1."""
    assert accuracy_interval(np.array(rounded), answers=3) == accuracy_interval(np.ones(len(rounded)), answers=3)


def test_accuracy_interval_knows_at_most_all_answers() -> None:
    """The variance of two answers each, one example apart from the rest, is that of more than 40: as 21 of 40."""
    value_E = np.full(20, 0.5)
    value_E[0] = 1.0
    assert accuracy_interval(value_E, answers=2) == pytest.approx((0.3750, 0.6705), abs=1e-3)


# --- paired differences


def test_difference_interval_equals_the_normal_one() -> None:
    difference_E = np.random.default_rng(0).choice([-1.0, 0.0, 0.0, 1.0], 400)
    margin = 1.96 * difference_E.std() / 20
    interval = difference_interval(difference_E)
    assert interval == pytest.approx((difference_E.mean() - margin, difference_E.mean() + margin), abs=0.001)


def test_difference_interval_of_few_examples_is_students() -> None:
    """Squares of 2.5 around the mean and 1 for one more difference; t for 9 degrees of freedom is 2.262."""
    margin = 2.262 * (3.5 / 90) ** 0.5
    assert difference_interval(np.array([0.0] * 5 + [1.0] * 5)) == pytest.approx((0.5 - margin, 0.5 + margin), abs=1e-3)


def test_difference_interval_of_few_that_differ_leaves_open_more_of_their_size() -> None:
    """One of 40 is better at one of 8 slots: k = 1/8, and as much again as its own square is added to the variance."""
    difference_E = np.zeros(40)
    difference_E[0] = 1 / 8
    margin = 2.023 * ((1 / 64 - 1 / 64 / 40 + 1 / 64) / (40 * 39)) ** 0.5
    assert difference_interval(difference_E) == pytest.approx((1 / 320 - margin, 1 / 320 + margin), abs=1e-5)


def test_difference_interval_stays_between_the_extremes() -> None:
    assert difference_interval(np.array([1.0, 1.0, -1.0])) == (-1.0, 1.0)
    assert difference_interval(np.array([0.5])) == (-1.0, 1.0)  # one example tells nothing


def test_difference_interval_without_any_change_is_not_empty() -> None:
    """As 0 correct answers of 100."""
    assert difference_interval(np.zeros(100)) == pytest.approx((-0.0370, 0.0370), abs=1e-4)
    assert difference_interval(np.full(100, 0.5)) == pytest.approx((0.4630, 0.5370), abs=1e-4)


# --- ratios


def test_ratio_interval_of_even_values_is_students() -> None:
    """400 values around 5 with a deviation of 1: the logarithm and the bootstrap change little."""
    value_E = 5 + np.random.default_rng(0).normal(size=400)
    interval = ratio_interval(value_E, np.ones(400), bootstrap_samples=4000, seed=0)
    margin = 1.96 * value_E.std(ddof=1) / 20
    assert interval == pytest.approx((value_E.mean() - margin, value_E.mean() + margin), abs=0.01)


def test_ratio_interval_of_skewed_values_reaches_further_up() -> None:
    value_E = np.exp(np.random.default_rng(0).normal(size=40))
    low, high = ratio_interval(value_E, np.ones(40), bootstrap_samples=2000, seed=0)
    assert high - value_E.mean() > 1.2 * (value_E.mean() - low) > 0


def test_ratio_interval_contains_the_truth_of_skewed_values() -> None:
    """Log-normal nats of 40 questions. Percentiles contain it in about 89 % of such studies."""
    covered = 0
    for seed in range(200):
        value_E = np.exp(np.random.default_rng(seed).normal(size=40))
        low, high = ratio_interval(value_E, np.ones(40), bootstrap_samples=200, seed=seed)
        covered += low <= np.exp(0.5) <= high
    assert covered >= 182  # 188 are usual


def test_ratio_interval_stays_within_the_ratios_of_the_examples() -> None:
    """Of two examples most resamples are one of them twice."""
    low, high = ratio_interval(np.array([1.1, 0.05]), np.array([2.0, 0.2]), bootstrap_samples=100, seed=0)
    assert (low, high) == pytest.approx((0.25, 0.55))


@pytest.mark.parametrize(
    ("part", "total", "expected"),
    [
        ([0.0, 0.0], [1.0, 2.0], 0.0),
        ([0.5, 1.0], [1.0, 2.0], 0.5),  # equal ratios
        ([0.7], [1.0], 0.7),  # one example
        ([0.1] * 40, [1.0] * 40, 0.1),  # whose mean is rounded
    ],
)
def test_ratio_interval_without_an_error_is_the_ratio(part: list[float], total: list[float], expected: float) -> None:
    low, high = ratio_interval(np.array(part), np.array(total), bootstrap_samples=50, seed=0)
    assert (low, high) == pytest.approx((expected, expected))
    assert low <= np.sum(part) / np.sum(total) <= high


def test_fraction_interval_near_1_is_that_of_what_is_missing() -> None:
    """It reaches further down than up, as that of the small missing part reaches further up."""
    missing_E = np.array([0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.3] * 5)
    low, high = fraction_interval(1 - missing_E, np.ones(40), answers=240, bootstrap_samples=2000, seed=0)
    mirrored = ratio_interval(missing_E, np.ones(40), bootstrap_samples=2000, seed=0)
    assert (1 - high, 1 - low) == pytest.approx(mirrored)
    fraction = 1 - missing_E.mean()
    assert fraction - low > 1.3 * (high - fraction)
    assert fraction_interval(missing_E, np.ones(40), answers=240, bootstrap_samples=2000, seed=0) == mirrored


def test_fraction_interval_is_at_most_that_of_examples_that_are_right_or_wrong() -> None:
    """Two of 20 examples fail: the skewed interval alone would end at .58, the fraction of the one that fails most.

    Wilson with m = .0415, n = 20: (m + .096) / 1.192 + 1.96 (m (1 - m) / 20 + .0024)^.5 / 1.192 = .2243.
    """
    failed_E = np.array([0.0] * 18 + [0.58, 0.25])
    _, high = fraction_interval(failed_E, np.ones(20), answers=12, bootstrap_samples=2000, seed=0)
    assert high == pytest.approx(0.2243, abs=1e-4)


def test_fraction_interval_of_few_examples_is_wilsons_for_right_or_wrong_ones() -> None:
    """Wilson with m = .8, n = 3: (.8 + .6403) / 2.2805 +- 1.96 (.16 / 3 + .1067)^.5 / 2.2805."""
    low, high = fraction_interval(np.array([0.7, 0.8, 0.9]), np.ones(3), answers=22, bootstrap_samples=100, seed=0)
    assert (low, high) == pytest.approx((0.2878, 0.9753), abs=1e-3)


def test_fraction_interval_of_what_is_left_is_the_mirrored_one() -> None:
    """Whichever is small, so that both ends are limited by Wilson's."""
    part_E = np.array([0.0] * 18 + [0.03, 0.8])
    low, high = fraction_interval(part_E, np.ones(20), answers=22, bootstrap_samples=2000, seed=0)
    mirrored = fraction_interval(1 - part_E, np.ones(20), answers=22, bootstrap_samples=2000, seed=0)
    assert mirrored == pytest.approx((1 - high, 1 - low))


def test_fraction_interval_of_ten_examples_knows_how_much_they_differ() -> None:
    """Nine tell nothing of that: the interval is that of examples that are right or wrong as a whole."""
    widths = {}
    for examples in (9, 10):
        part_E = np.tile([0.7, 0.9], 5)[:examples]
        low, high = fraction_interval(part_E, np.ones(examples), answers=22, bootstrap_samples=2000, seed=0)
        widths[examples] = high - low
    assert widths[9] > 0.4
    assert widths[10] < 0.2


@pytest.mark.parametrize("part", [[1.0] * 20, [0.0] * 20, [4 / 7] * 20, [1.0] * 15 + [0.0] * 5])
def test_fraction_interval_without_a_skewed_error_is_wilsons(part: list[float]) -> None:
    """All, none or the same of each example; and examples with one answer each."""
    part_E = np.array(part)
    answers = 1 if len({*part}) > 1 else 4
    interval = fraction_interval(part_E, np.ones(20), answers=answers, bootstrap_samples=100, seed=0)
    assert interval == accuracy_interval(part_E, answers)


def test_ratio_interval_leaves_out_examples_without_a_total() -> None:
    part_E, total_E = np.array([0.5, 0.2, 0.0, 0.4]), np.array([1.0, 1.0, 0.0, 1.0])
    low, high = ratio_interval(part_E, total_E, bootstrap_samples=100, seed=0)
    assert 0.2 <= low < 1.1 / 3 < high <= 0.5


def test_ratio_interval_leaves_out_resamples_without_a_total() -> None:
    """About one resample of 13 draws only the three examples without a total: (3/5)^5."""
    part_E, total_E = np.array([0.0, 0.0, 0.0, 0.5, 0.9]), np.array([0.0, 0.0, 0.0, 1.0, 1.0])
    with np.errstate(all="raise"):
        interval = ratio_interval(part_E, total_E, bootstrap_samples=100, seed=0)
    assert interval == pytest.approx((0.5, 0.9))


def test_ratio_interval_is_pinned() -> None:
    """Quantiles of 40 resamples, the outer of the two nearest ones."""
    part_E, total_E = np.array([1.0, 2.5, 0.9, 2.1]), np.array([2.0, 5.0, 3.0, 3.0])
    interval = ratio_interval(part_E, total_E, bootstrap_samples=40, seed=0)
    assert interval == pytest.approx((0.3478920, 0.6639645), abs=1e-6)


# --- power and quantiles


def test_questions_needed_by_hand() -> None:
    # (1.960 + 0.842)^2 * 0.5^2 / 0.02^2, as in tables of power.
    assert questions_needed(0.02, 0.5) == 4906
    assert questions_needed(0.5, 0.01) == 2


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (11, 2.201), (30, 2.042), (120, 1.980)],
)
def test_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=1e-3)


def test_students_t_needs_a_degree_of_freedom() -> None:
    with pytest.raises(ValueError, match="at least one degree of freedom, got 0"):
        student_t(0)
