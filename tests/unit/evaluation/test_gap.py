import numpy as np
import pytest

from pos2distill.evaluation.gap import (
    difference_variances,
    gap_interval,
    position_p_value,
    questions_above,
    score_excess,
)
from pos2distill.records import Floats
from tests.support.simulated import answers

# --- intervals


def test_gap_interval_by_hand() -> None:
    """Two slots that differ in 40 of 400 examples, always in one direction: d = .1, se = .3 / 20.

    One pair contends, and noise does not change which slot is best: the lower end is the normal distribution's, the
    upper one Wilson's for 40 of 400 with z = 2.17, .1373.
    """
    correct_ES = np.ones((400, 2))
    correct_ES[:40, 1] = 0
    low, high = gap_interval(correct_ES, position_p=0.001, draws=4000, seed=0)
    assert low == pytest.approx(0.1 - 1.96 * 0.015, abs=0.002)
    assert high == pytest.approx(0.1373, abs=0.002)


def test_gap_interval_allows_for_noise_in_the_largest_of_equal_slots() -> None:
    """`high` of 15 slots is below that of the best and the worst alone, as max - min of many is too large."""
    correct_ES = answers([0.6] * 15, 200, 0)
    accuracy_S = correct_ES.mean(0)
    extremes_E2 = correct_ES[:, [accuracy_S.argmax(), accuracy_S.argmin()]]
    highest = [gap_interval(each, position_p=1.0, draws=2000, seed=0)[1] for each in (correct_ES, extremes_E2)]
    assert np.ptp(accuracy_S) <= highest[0] < highest[1] - 0.02


def test_gap_interval_contains_0_unless_position_has_an_effect() -> None:
    correct_ES = answers([0.7] * 6, 80, 1)
    assert gap_interval(correct_ES, position_p=0.051, draws=300, seed=0)[0] == 0
    assert 0 < gap_interval(correct_ES, position_p=0.05, draws=300, seed=0)[0] < 0.01
    assert gap_interval(answers([0.9, 0.2], 80, 1), position_p=0.051, draws=300, seed=0)[0] == 0


def test_gap_interval_where_all_slots_agree_is_that_of_a_proportion_of_0() -> None:
    """Wilson's upper bound, z^2 / (n + z^2), with the z of 1.5 %."""
    low, high = gap_interval(np.tile([[1.0], [0.0]], (5, 3)), position_p=1.0, draws=100, seed=0)
    assert low == 0.0
    assert high == pytest.approx(2.17009**2 / (10 + 2.17009**2), abs=1e-4)


@pytest.mark.parametrize("examples", [20, 1000])
def test_gap_interval_where_equal_slots_differ_in_examples(examples: int) -> None:
    """Right at one slot alone, half of the examples at each: q = k = 1, d = 0, so v(g) = sqrt(1 + g^2) - g^2."""
    correct_ES = np.tile([[1.0, 0.0], [0.0, 1.0]], (examples // 2, 1))
    low, high = gap_interval(correct_ES, position_p=1.0, draws=100, seed=0)
    assert low == 0
    assert high**2 == pytest.approx(2.17009**2 * ((1 + high**2) ** 0.5 - high**2) / examples)


def wrong_at_one_of_five(wrong: int, examples: int) -> Floats:
    correct_ES = np.ones((examples, 5))
    correct_ES[:wrong, 2] = 0
    return correct_ES


@pytest.mark.parametrize("examples", [60, 500])
def test_gap_interval_of_few_wrong_answers_leaves_as_much_open_as_a_proportion(examples: int) -> None:
    """Wrong at one slot alone, k times: `high` is at least Wilson's 95 % end for k, and rises with k."""
    highest = []
    for wrong in range(13):
        _, high = gap_interval(wrong_at_one_of_five(wrong, examples), position_p=1.0, draws=2000, seed=0)
        correction = 1.959964**2 / examples
        mean = wrong / examples
        wilson = (mean + correction / 2 + (mean * (1 - mean) * correction + correction**2 / 4) ** 0.5) / (
            1 + correction
        )
        assert wilson <= high <= wilson + 0.06 * (60 / examples) ** 0.8
        highest.append(high)
    assert highest == sorted(highest)


def test_gap_interval_does_not_depend_on_the_order_of_slots() -> None:
    """Of equally bad slots one shares the errors of the best slot, and one does not."""
    correct_ES = np.ones((60, 3))
    correct_ES[:3, 0] = 0
    correct_ES[:6, 1] = 0
    correct_ES[10:16, 2] = 0
    for order in ([0, 1, 2], [0, 2, 1], [2, 0, 1]):
        interval = gap_interval(correct_ES[:, order], position_p=1.0, draws=2000, seed=0)
        expected = gap_interval(correct_ES, position_p=1.0, draws=2000, seed=0)
        assert interval == pytest.approx(expected, abs=1e-9)


def test_score_excess_by_hand() -> None:
    """2 of 60 are wrong at one slot: Wilson's end .1136 and the standard error of d = 1 / 30."""
    expected = (0.113638 - 1 / 30) ** 2 - 1.959964**2 * (1 / 30) * (29 / 30) / 60
    assert score_excess(wrong_at_one_of_five(2, 60)) == pytest.approx(expected, abs=1e-6)
    assert score_excess(np.ones((60, 5))) == pytest.approx((1.959964**2 / (60 + 1.959964**2)) ** 2)


def test_score_excess_of_many_wrong_answers_is_small() -> None:
    """Of slots that differ in both directions, new errors need no new variance."""
    correct_ES = answers([0.6] * 5, 200, 0)
    variance = float((correct_ES[:, 0] - correct_ES[:, 1]).var()) / 200
    assert score_excess(correct_ES) < 0.05 * variance


def test_score_excess_of_answers_in_several_orders_has_their_size() -> None:
    """Wrong in one of three orders: the end is that of thirds, d + z sqrt((g / 3 - g^2) / n) at g = the end."""
    correct_ES = np.ones((60, 2))
    correct_ES[:6, 1] = 2 / 3
    difference = 6 / 180
    end = difference + (score_excess(correct_ES) + 1.959964**2 * correct_ES[:, 1].var() / 60) ** 0.5
    assert (end - difference) ** 2 == pytest.approx(1.959964**2 * (end / 3 - end**2) / 60)


def test_gap_interval_of_a_slot_that_is_always_wrong_is_that_of_a_proportion_of_1() -> None:
    low, high = gap_interval(np.tile([1.0, 0.0], (10, 1)), position_p=0.001, draws=100, seed=0)
    assert low == pytest.approx(10 / (10 + 1.96**2), abs=1e-4)
    assert high == 1.0


def test_gap_interval_contains_the_truth() -> None:
    """Where the worst slots are tied. 57 of 60 are expected."""
    covered = 0
    for seed in range(60):
        correct_ES = answers([0.9, 0.4, 0.4, 0.4, 0.8], 150, seed)
        p = position_p_value(correct_ES, draws=99, seed=seed)
        low, high = gap_interval(correct_ES, position_p=p, draws=200, seed=seed)
        covered += low <= 0.5 <= high
    assert covered >= 52


def test_gap_interval_of_few_examples_is_wider() -> None:
    """d = .1 of 20, se = .143: 2.17 se as Student's t for 20 examples is wider than the normal one, 2.093 / 1.96."""
    correct_ES = np.array([[1.0, 0.0]] * 5 + [[0.0, 1.0]] * 3 + [[1.0, 1.0]] * 12)
    _, high = gap_interval(correct_ES, position_p=1.0, draws=20000, seed=0)
    error = (correct_ES[:, 0] - correct_ES[:, 1]).std(ddof=1) / 20**0.5
    assert high == pytest.approx(0.1 + 2.17 * 2.093 / 1.96 * error, abs=0.01)
    assert high > 0.1 + 2.17 * error + 0.01


def test_gap_interval_of_one_slot_is_0() -> None:
    assert gap_interval(answers([0.5], 50, 0), position_p=1.0, draws=100, seed=0) == (0.0, 0.0)


def test_questions_above_by_hand() -> None:
    """Better in 60 of 400 and worse in 20: d = .1, se = .436 / 20; 400 ((1.96 + .84) .0218 / (.1 - .04))^2 = 414."""
    correct_ES = np.ones((400, 2))
    correct_ES[:60, 1] = 0
    correct_ES[60:80, 0] = 0
    needed = questions_above(correct_ES, 0.04, draws=8000, seed=0)
    assert needed == pytest.approx(414, rel=0.1)
    assert questions_above(correct_ES, 0.105, draws=1000, seed=0) is None
    assert questions_above(np.ones((9, 3)), 0.0, draws=100, seed=0) is None


@pytest.mark.parametrize(("examples", "limit", "needed"), [(2, 0.5, 4), (30, 0.9, 35), (30, 0.5, 4), (5, 1.0, None)])
def test_questions_above_of_a_slot_that_is_always_wrong(examples: int, limit: float, needed: int | None) -> None:
    """n of n are above the limit where Wilson's n / (n + 3.84) is: 3.84 limit / (1 - limit) questions."""
    correct_ES = np.tile([1.0, 0.0], (examples, 1))
    assert questions_above(correct_ES, limit, draws=100, seed=0) == needed


# --- the test of position


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


def test_position_p_value_allows_neighboring_slots_to_answer_alike() -> None:
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
