import numpy as np
import pytest

from pos2distill.evaluation.statistics import (
    accuracy_interval,
    difference_interval,
    difference_variances,
    few_tell,
    gap_interval,
    pair_interval,
    position_p_value,
    questions_above,
    questions_needed,
    ratio_interval,
    share_interval,
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


@pytest.mark.parametrize(("wrong", "expected"), [(1, 1 - 0.0513 / 60), (2, 1 - 0.3554 / 60), (3, 1 - 0.8177 / 60)])
def test_accuracy_interval_of_few_wrong_answers_ends_where_poissons_does(wrong: int, expected: float) -> None:
    """P(X >= x) = .05 of Poisson's distribution: 1 - e^-.0513 for x = 1, and Wilson's other end."""
    value_E = np.array([1.0] * (60 - wrong) + [0.0] * wrong)
    low, high = accuracy_interval(value_E)
    assert high == pytest.approx(expected, abs=1e-6)
    assert accuracy_interval(1 - value_E) == pytest.approx((1 - high, 1 - low))


def test_accuracy_interval_contains_the_truth_of_slots_that_are_nearly_always_right() -> None:
    """Accuracy .9977, 60 answers: all are right in 87 % of the studies. Wilson's interval of 59 does not contain it."""
    low, high = accuracy_interval(np.array([1.0] * 59 + [0.0]))
    assert low < 0.9977 < high
    low, high = accuracy_interval(np.array([1.0] * 56 + [0.0] * 4))  # four are Wilson's again
    assert high == pytest.approx(0.9738, abs=1e-4)
    low, high = accuracy_interval(np.array([1.0] * 8 + [0.0]))  # Poisson's distribution is no approximation here
    assert high == pytest.approx(0.9801, abs=1e-4)


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
    """Mean .5 and deviation .527 of ten; t for 9 degrees of freedom is 2.262."""
    low, high = difference_interval(np.array([0.0] * 5 + [1.0] * 5))
    assert (low, high) == pytest.approx((0.5 - 2.262 * 0.16667, 0.5 + 2.262 * 0.16667), abs=1e-3)


def test_difference_interval_stays_between_the_extremes() -> None:
    assert difference_interval(np.array([1.0, 1.0, -1.0])) == (-1.0, 1.0)
    assert difference_interval(np.array([0.5])) == (-1.0, 1.0)  # one example tells nothing


def test_difference_interval_without_any_change_is_not_empty() -> None:
    """As 0 right answers of 100."""
    assert difference_interval(np.zeros(100)) == pytest.approx((-0.0370, 0.0370), abs=1e-4)
    assert difference_interval(np.full(100, 0.5)) == pytest.approx((0.4630, 0.5370), abs=1e-4)


# --- ratios


def test_ratio_interval_of_even_values_is_students() -> None:
    """400 values around 5 with a deviation of 1: the logarithm and the bootstrap change little."""
    value_E = 5 + np.random.default_rng(0).normal(size=400)
    interval = ratio_interval(value_E, np.ones(400), resamples=4000, seed=0)
    margin = 1.96 * value_E.std(ddof=1) / 20
    assert interval == pytest.approx((value_E.mean() - margin, value_E.mean() + margin), abs=0.01)


def test_ratio_interval_of_skewed_values_reaches_further_up() -> None:
    value_E = np.exp(np.random.default_rng(0).normal(size=40))
    low, high = ratio_interval(value_E, np.ones(40), resamples=2000, seed=0)
    assert high - value_E.mean() > 1.2 * (value_E.mean() - low) > 0


def test_ratio_interval_contains_the_truth_of_skewed_values() -> None:
    """Log-normal nats of 40 questions. Percentiles contain it in about 89 % of such studies."""
    covered = 0
    for seed in range(200):
        value_E = np.exp(np.random.default_rng(seed).normal(size=40))
        low, high = ratio_interval(value_E, np.ones(40), resamples=200, seed=seed)
        covered += low <= np.exp(0.5) <= high
    assert covered >= 182  # 188 are usual


def test_ratio_interval_stays_within_the_ratios_of_the_examples() -> None:
    """Of two examples most resamples are one of them twice."""
    low, high = ratio_interval(np.array([1.1, 0.05]), np.array([2.0, 0.2]), resamples=100, seed=0)
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
    low, high = ratio_interval(np.array(part), np.array(total), resamples=50, seed=0)
    assert (low, high) == pytest.approx((expected, expected))
    assert low <= np.sum(part) / np.sum(total) <= high


def test_share_interval_near_1_is_that_of_what_is_missing() -> None:
    """It reaches further down than up, as that of the small missing part reaches further up."""
    missing_E = np.array([0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.3] * 5)
    low, high = share_interval(1 - missing_E, np.ones(40), answers=240, resamples=2000, seed=0)
    mirrored = ratio_interval(missing_E, np.ones(40), resamples=2000, seed=0)
    assert (1 - high, 1 - low) == pytest.approx(mirrored)
    share = 1 - missing_E.mean()
    assert share - low > 1.3 * (high - share)
    assert share_interval(missing_E, np.ones(40), answers=240, resamples=2000, seed=0) == mirrored


def test_share_interval_is_at_most_that_of_examples_that_are_right_or_wrong() -> None:
    """Two of 20 examples fail: the skewed interval alone would end at .58, the share of the one that fails most.

    Wilson with m = .0415, n = 20: (m + .096) / 1.192 + 1.96 (m (1 - m) / 20 + .0024)^.5 / 1.192 = .2243.
    """
    failed_E = np.array([0.0] * 18 + [0.58, 0.25])
    _, high = share_interval(failed_E, np.ones(20), answers=12, resamples=2000, seed=0)
    assert high == pytest.approx(0.2243, abs=1e-4)


def test_share_interval_of_few_examples_is_wilsons_for_right_or_wrong_ones() -> None:
    """Wilson with m = .8, n = 3: (.8 + .6403) / 2.2805 +- 1.96 (.16 / 3 + .1067)^.5 / 2.2805."""
    low, high = share_interval(np.array([0.7, 0.8, 0.9]), np.ones(3), answers=22, resamples=100, seed=0)
    assert (low, high) == pytest.approx((0.2878, 0.9753), abs=1e-3)


@pytest.mark.parametrize("part", [[1.0] * 20, [0.0] * 20, [4 / 7] * 20, [1.0] * 15 + [0.0] * 5])
def test_share_interval_without_a_skewed_error_is_wilsons(part: list[float]) -> None:
    """All, none or the same of each example; and examples with one answer each."""
    part_E = np.array(part)
    answers = 1 if len({*part}) > 1 else 4
    interval = share_interval(part_E, np.ones(20), answers=answers, resamples=100, seed=0)
    assert interval == accuracy_interval(part_E, answers)


def test_ratio_interval_leaves_out_examples_without_a_total() -> None:
    part_E, total_E = np.array([0.5, 0.2, 0.0, 0.4]), np.array([1.0, 1.0, 0.0, 1.0])
    low, high = ratio_interval(part_E, total_E, resamples=100, seed=0)
    assert 0.2 <= low < 1.1 / 3 < high <= 0.5


# --- GAP


def test_gap_interval_by_hand() -> None:
    """Two slots that differ in 40 of 400 examples, always in one direction: d = .1, se = .3 / 20.

    Both ends are the normal distribution's: one pair contends, and noise does not change which slot is best.
    """
    correct_ES = np.ones((400, 2))
    correct_ES[:40, 1] = 0
    low, high = gap_interval(correct_ES, position_p=0.001, resamples=4000, seed=0)
    assert low == pytest.approx(0.1 - 1.96 * 0.015, abs=0.002)
    assert high == pytest.approx(0.1 + 2.17 * 0.015, abs=0.003)


def test_gap_interval_allows_for_noise_in_the_largest_of_equal_slots() -> None:
    """`high` of 15 slots is below that of the best and the worst alone, as max - min of many is too large."""
    correct_ES = answers([0.6] * 15, 200, 0)
    accuracy_S = correct_ES.mean(0)
    extremes_E2 = correct_ES[:, [accuracy_S.argmax(), accuracy_S.argmin()]]
    highest = [gap_interval(each, position_p=1.0, resamples=2000, seed=0)[1] for each in (correct_ES, extremes_E2)]
    assert np.ptp(accuracy_S) <= highest[0] < highest[1] - 0.02


def test_gap_interval_contains_0_unless_position_has_an_effect() -> None:
    correct_ES = answers([0.7] * 6, 80, 1)
    assert gap_interval(correct_ES, position_p=0.051, resamples=300, seed=0)[0] == 0
    assert 0 < gap_interval(correct_ES, position_p=0.05, resamples=300, seed=0)[0] < 0.01
    assert gap_interval(answers([0.9, 0.2], 80, 1), position_p=0.051, resamples=300, seed=0)[0] == 0


def test_gap_interval_where_all_slots_agree_is_that_of_a_proportion_of_0() -> None:
    """Wilson's upper bound: z^2 / (n + z^2)."""
    low, high = gap_interval(np.tile([[1.0], [0.0]], (5, 3)), position_p=1.0, resamples=100, seed=0)
    assert low == 0.0
    assert high == pytest.approx(1.96**2 / (10 + 1.96**2), abs=1e-4)


@pytest.mark.parametrize(("examples", "t"), [(1000, 1.962), (20, 2.093)])
def test_gap_interval_where_equal_slots_differ_in_examples(examples: int, t: float) -> None:
    """Right at one slot alone, half of the examples at each: d = 0, se = 1 / sqrt(E - 1)."""
    correct_ES = np.tile([[1.0, 0.0], [0.0, 1.0]], (examples // 2, 1))
    low, high = gap_interval(correct_ES, position_p=1.0, resamples=100, seed=0)
    assert (low, high) == pytest.approx((0, 2.170 * t / 1.960 / (examples - 1) ** 0.5), abs=0.0005)


def test_gap_interval_of_a_slot_that_is_always_wrong_is_that_of_a_proportion_of_1() -> None:
    low, high = gap_interval(np.tile([1.0, 0.0], (10, 1)), position_p=0.001, resamples=100, seed=0)
    assert low == pytest.approx(10 / (10 + 1.96**2), abs=1e-4)
    assert high == 1.0


def test_gap_interval_contains_the_truth() -> None:
    """Where the worst slots are tied. 57 of 60 are expected."""
    covered = 0
    for seed in range(60):
        correct_ES = answers([0.9, 0.4, 0.4, 0.4, 0.8], 150, seed)
        p = position_p_value(correct_ES, draws=99, seed=seed)
        low, high = gap_interval(correct_ES, position_p=p, resamples=200, seed=seed)
        covered += low <= 0.5 <= high
    assert covered >= 52


def test_gap_interval_of_few_examples_is_wider() -> None:
    """d = .1 of 20, se = .143: 2.17 se as Student's t for 20 examples is wider than the normal one, 2.093 / 1.96."""
    correct_ES = np.array([[1.0, 0.0]] * 5 + [[0.0, 1.0]] * 3 + [[1.0, 1.0]] * 12)
    _, high = gap_interval(correct_ES, position_p=1.0, resamples=20000, seed=0)
    error = (correct_ES[:, 0] - correct_ES[:, 1]).std(ddof=1) / 20**0.5
    assert high == pytest.approx(0.1 + 2.17 * 2.093 / 1.96 * error, abs=0.01)
    assert high > 0.1 + 2.17 * error + 0.01


def test_pair_interval_is_wilsons_where_one_slot_is_never_right_alone() -> None:
    """Wrong at the third slot alone, in 2 of 60 examples."""
    correct_ES = np.ones((60, 4))
    correct_ES[:2, 2] = 0
    assert pair_interval(correct_ES) == pytest.approx((0.0092, 0.1136), abs=1e-4)  # the textbook's 2 of 60


def test_pair_interval_by_hand() -> None:
    """Of 100 examples 3 are right at the first slot alone and 1 at the second: d = .02, v = .0396, so v(g) as below."""
    correct_ES = np.ones((100, 2))
    correct_ES[:3, 1] = 0
    correct_ES[3, 0] = 0
    for end in pair_interval(correct_ES):
        variance = 0.0396 + end * (1 - end) - 0.02 * 0.98
        assert (end - 0.02) ** 2 == pytest.approx(1.959964**2 * variance / 100)


@pytest.mark.parametrize(("examples", "few"), [(0, False), (1, True), (4, True), (5, False)])
def test_few_tell_counts_the_examples_that_differ(examples: int, few: bool) -> None:
    correct_ES = np.ones((60, 3))
    correct_ES[:examples, 1] = 0
    assert few_tell(correct_ES) == few


def test_gap_interval_of_few_wrong_answers_is_that_of_a_proportion() -> None:
    """2 of 60: resamples have 0 to 6 wrong answers, so that a true GAP of .07 would be the largest by the bootstrap."""
    correct_ES = np.ones((60, 5))
    correct_ES[:2, 4] = 0
    low, high = gap_interval(correct_ES, position_p=0.2, resamples=400, seed=0)
    assert (low, high) == pytest.approx((0, 0.1136), abs=1e-4)


def test_gap_interval_of_one_slot_is_0() -> None:
    assert gap_interval(answers([0.5], 50, 0), position_p=1.0, resamples=100, seed=0) == (0.0, 0.0)


def test_questions_above_by_hand() -> None:
    """Better in 60 of 400 and worse in 20: d = .1, se = .436 / 20; 400 ((1.96 + .84) .0218 / (.1 - .04))^2 = 414."""
    correct_ES = np.ones((400, 2))
    correct_ES[:60, 1] = 0
    correct_ES[60:80, 0] = 0
    needed = questions_above(correct_ES, 0.04, resamples=8000, seed=0)
    assert needed == pytest.approx(414, rel=0.1)
    assert questions_above(correct_ES, 0.105, resamples=1000, seed=0) is None
    assert questions_above(np.ones((9, 3)), 0.0, resamples=100, seed=0) is None


@pytest.mark.parametrize(("examples", "limit", "needed"), [(2, 0.5, 4), (30, 0.9, 35), (30, 0.5, 4), (5, 1.0, None)])
def test_questions_above_of_a_slot_that_is_always_wrong(examples: int, limit: float, needed: int | None) -> None:
    """n of n are above the limit where Wilson's n / (n + 3.84) is: 3.84 limit / (1 - limit) questions."""
    correct_ES = np.tile([1.0, 0.0], (examples, 1))
    assert questions_above(correct_ES, limit, resamples=100, seed=0) == needed


# --- tests and power


def test_position_p_value_by_hand() -> None:
    """Two slots, 3 examples that are right at the first alone: 2 of the 8 arrangements are as extreme."""
    p = position_p_value(np.tile([1.0, 0.0], (3, 1)), draws=4000, seed=0)
    assert p == pytest.approx(2 / 8, abs=0.02)


def test_position_p_value_sees_a_slot_that_few_questions_miss() -> None:
    """5 of 100 are wrong, all at one slot of 20: 20 of 20^5 arrangements are as extreme."""
    correct_ES = np.ones((100, 20))
    correct_ES[:5, 7] = 0
    assert position_p_value(correct_ES, draws=999, seed=0) == 1 / 1000


def test_position_p_value_sees_an_effect_and_no_effect() -> None:
    assert position_p_value(answers([0.8, 0.4, 0.8], 100, 0), draws=999, seed=0) == 1 / 1000
    flat = [position_p_value(answers([0.6] * 4, 50, seed), draws=199, seed=seed) for seed in range(100)]
    assert 1 <= sum(p <= 0.05 for p in flat) <= 12


def test_position_p_value_allows_neighbouring_slots_to_answer_alike() -> None:
    """A flat model. 20 alarms of 400 are expected; a permutation within each example raises about 45."""
    alarms = 0
    for seed in range(400):
        generator = np.random.default_rng(seed)
        noise_ES = generator.normal(size=(100, 15))
        for slot in range(1, 15):
            noise_ES[:, slot] = 0.95 * noise_ES[:, slot - 1] + (1 - 0.95**2) ** 0.5 * noise_ES[:, slot]
        correct_ES = (noise_ES < 0.5 + generator.normal(size=(100, 1))).astype(float)
        alarms += position_p_value(correct_ES, draws=199, seed=seed) <= 0.05
    assert 8 <= alarms <= 34


def test_difference_variances_by_hand() -> None:
    """Differences of slots 0 and 1: 1, 0, 0, -1; of 0 and 2: 0, 0, 0, -1; of 1 and 2: -1, 0, 0, 0."""
    correct_ES = np.array([[1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 1]], float)
    expected = [[0, 0.5, 3 / 16], [0.5, 0, 3 / 16], [3 / 16, 3 / 16, 0]]
    assert difference_variances(correct_ES) == pytest.approx(np.array(expected))
    assert difference_variances(correct_ES[:, :1]).tolist() == [[0.0]]


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
