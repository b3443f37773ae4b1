import itertools

import numpy as np
import pytest

from pos2distill.evaluation import cross_fitting
from pos2distill.evaluation.cross_fitting import best_slot_change, corrected_gap, gap_change, mean_gap_change
from pos2distill.evaluation.gap import score_excess
from pos2distill.evaluation.statistics import Interval
from pos2distill.records import Floats
from tests.support.simulated import answers


def test_corrected_gap_of_a_flat_model_is_zero_where_the_gap_is_not() -> None:
    """300 models that answer each question with probability 0.7 at every slot: 100 questions, 15 slots."""
    models = [answers([0.7] * 15, 100, seed) for seed in range(300)]
    corrected = [corrected_gap(correct_ES, seed=seed) for seed, correct_ES in enumerate(models)]
    assert np.mean([np.ptp(correct_ES.mean(0)) for correct_ES in models]) > 0.1
    assert abs(np.mean(corrected)) < 3 * np.std(corrected) / np.sqrt(len(corrected))


def test_corrected_gap_finds_a_gap_that_is_there() -> None:
    """One slot of five is 0.4 worse: the choice of the worst is never wrong, that of the best does not matter."""
    corrected = [corrected_gap(answers([0.8, 0.8, 0.4, 0.8, 0.8], 200, seed), seed=0) for seed in range(100)]
    assert np.mean(corrected) == pytest.approx(0.4, abs=0.01)


def test_corrected_gap_by_hand() -> None:
    """Two slots, one always right and one never: 1 whatever the halves."""
    assert corrected_gap(np.tile([1.0, 0.0], (6, 1)), seed=0) == 1.0


def test_gap_change_by_hand() -> None:
    """From 1 to 0, or not at all, in every example: only as certain as 60 examples can be."""
    before, after = np.tile([1.0, 0.0], (60, 1)), np.ones((60, 2))
    open_end = 1.959964**2 / (60 + 1.959964**2)  # Wilson's bound for 0 of 60
    change, interval = gap_change(before, after, bootstrap_samples=100, seed=0)
    assert (change, *interval) == pytest.approx((-1, -1, -1 + open_end))
    change, interval = gap_change(before, before, bootstrap_samples=100, seed=0)
    assert (change, *interval) == pytest.approx((0, -open_end, open_end))


def test_mean_gap_change_is_the_mean_of_each_models() -> None:
    """Two models with a GAP of 1, one at each slot, whose average has none: from 1 to 1, and not to 0."""
    before, other, flat = (np.tile(row, (60, 1)) for row in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]))
    assert mean_gap_change(before, [before, other], bootstrap_samples=100, seed=0)[0] == pytest.approx(0)
    assert mean_gap_change(before, [other, flat], bootstrap_samples=100, seed=0)[0] == pytest.approx(-0.5)
    random = [answers([0.9, 0.4, 0.8], 150, seed) for seed in range(3)]
    changes = [gap_change(random[0], each, bootstrap_samples=100, seed=0) for each in random[1:]]
    change, (low, high) = mean_gap_change(random[0], random[1:], bootstrap_samples=100, seed=0)
    assert change == pytest.approx(np.mean([value for value, _ in changes]))
    # Two models have less noise than one, but they share that of the model before.
    widths = [upper - lower for _, (lower, upper) in changes]
    assert 0.5 * min(widths) < high - low < max(widths)


def test_gap_change_is_inside_its_interval() -> None:
    """Few examples give corrected GAPs below 0, and so changes of more than 1."""
    for seed in range(200):
        before, after = answers([0.5] * 3, 10, seed), answers([0.5] * 3, 10, 1000 + seed)
        change, (low, high) = gap_change(before, after, bootstrap_samples=50, seed=seed)
        assert -1 <= low <= change <= high <= 1


def test_gap_change_contains_the_truth() -> None:
    covered = 0
    for seed in range(60):
        before, after = answers([0.9, 0.4, 0.8], 150, seed), answers([0.9, 0.8, 0.9], 150, 1000 + seed)
        _, (low, high) = gap_change(before, after, bootstrap_samples=200, seed=seed)
        covered += low <= -0.4 <= high
    assert covered >= 52  # 57 expected


def test_gap_change_of_few_examples_is_students() -> None:
    """One slot falls from always right in 5 of 20 examples and never rises: t for 19 degrees of freedom is 2.093."""
    before, after = np.ones((20, 2)), np.ones((20, 2))
    before[:10, 1] = 0
    after[:15, 1] = 0
    change, (low, high) = gap_change(before, after, bootstrap_samples=20000, seed=0)
    error = (before - after)[:, 1].std(ddof=1) / 20**0.5
    assert change == pytest.approx(0.25)
    assert (high - low) / 2 == pytest.approx(2.093 * error, rel=0.03)


@pytest.mark.parametrize("accuracy_S", [[0.7] * 5, [0.95, 0.6, 0.2]], ids=["equal slots", "different slots"])
def test_gap_change_is_as_certain_as_its_formula(accuracy_S: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the bootstrap's error and half of the smaller of that and sqrt(2) s, s that of the mean of the parts."""
    seen: dict[str, Floats] = {}
    interval_of = cross_fitting.with_interval

    def record(
        part_E: Floats, change_R: Floats, *, fixed_factor: float, excess: tuple[float, float]
    ) -> tuple[float, Interval]:
        seen.update(part_E=part_E, change_R=change_R)
        assert max(excess) < 0.001  # many answers are wrong
        return interval_of(part_E, change_R, fixed_factor=fixed_factor)

    monkeypatch.setattr(cross_fitting, "with_interval", record)
    before, after = answers(accuracy_S, 100, 0), answers(accuracy_S, 100, 1000)
    _, (low, high) = gap_change(before, after, bootstrap_samples=400, seed=0)
    bootstrap = seen["change_R"].std(ddof=1) * (100 / 99) ** 0.5
    fixed = (2 / 100) ** 0.5 * seen["part_E"].std(ddof=1)
    assert (fixed < bootstrap) == (accuracy_S == [0.7] * 5)  # each of the two in one of the cases
    assert (high - low) / 2 == pytest.approx(1.984 * (bootstrap + min(bootstrap, fixed)) / 2, rel=1e-3)


def test_gap_change_of_few_wrong_answers_is_wider_where_the_gap_may_be_larger() -> None:
    """Sides as in `test_score_excess_by_hand`: 2 and 3 of 60 are wrong at one slot, before and after."""
    before, after = np.ones((60, 5)), np.ones((60, 5))
    before[:2, 4] = 0
    after[:3, 1] = 0
    seen: list[Interval] = []
    for first, second in ((before, after), (after, before)):
        change, (low, high) = gap_change(first, second, bootstrap_samples=400, seed=0)
        wider = (change - low) ** 2 - score_excess(first), (high - change) ** 2 - score_excess(second)
        assert wider[0] == pytest.approx(wider[1])  # both sides have the same standard error
        assert wider[0] > 0
        seen.append((low, high))
    assert seen[0] == pytest.approx((-seen[1][1], -seen[1][0]))


def test_gap_change_of_a_base_without_a_gap_does_not_jump_with_one_more_wrong_answer() -> None:
    """A flat model of which nearly all answers are right after training, but k at one slot."""
    before = answers([0.6] * 15, 100, 0)
    widths = []
    for wrong in range(9):
        after = np.ones((100, 15))
        after[:wrong, 3] = 0
        _, (low, high) = gap_change(before, after, bootstrap_samples=400, seed=0)
        widths.append(high - low)
    assert all(0.9 < later / earlier < 1.1 for earlier, later in itertools.pairwise(widths))


def test_gap_change_of_one_example_leaves_everything_open() -> None:
    before, after = np.array([[1.0, 0.0]]), np.array([[0.0, 0.0]])
    assert gap_change(before, after, bootstrap_samples=2, seed=0) == (0.0, (-1.0, 1.0))


def test_gap_change_of_one_slot_is_zero() -> None:
    """A GAP of one slot is 0 by definition, however few examples there are."""
    before, after = answers([0.5], 9, 0), answers([0.5], 9, 1)
    assert gap_change(before, after, bootstrap_samples=10, seed=0) == (0.0, (0.0, 0.0))


def test_best_slot_change_by_hand() -> None:
    """The first slot is best whatever half chooses, and falls from 1 to .75."""
    before, after = np.tile([1.0, 0.0], (80, 1)), np.tile([1.0, 0.0], (80, 1))
    after[:20, 0] = 0
    change, (low, high) = best_slot_change(before, after, bootstrap_samples=4000, seed=0)
    assert change == pytest.approx(-0.25)
    error = after[:, 0].std(ddof=1) / 80**0.5
    assert (high - low) / 2 == pytest.approx(1.99 * error, rel=0.05)


def test_best_slot_change_of_one_example_leaves_everything_open() -> None:
    before, after = np.array([[1.0, 0.0]]), np.array([[0.0, 0.0]])
    assert best_slot_change(before, after, bootstrap_samples=2, seed=0) == (-1.0, (-1.0, 1.0))


def test_best_slot_change_of_an_unchanged_model_is_0_where_the_same_answers_show_a_loss() -> None:
    """200 flat models that answer twice. The slot that is best by chance seems to lose."""
    changes, naive = [], []
    for seed in range(200):
        before, after = answers([0.7] * 10, 60, seed), answers([0.7] * 10, 60, 1000 + seed)
        changes.append(best_slot_change(before, after, bootstrap_samples=2, seed=seed)[0])
        best = before.mean(0).argmax()
        naive.append(after[:, best].mean() - before[:, best].mean())
    assert np.mean(naive) < -0.05
    assert abs(np.mean(changes)) < 3 * np.std(changes) / 200**0.5


def test_best_slot_change_seldom_sees_a_change_that_is_not_there() -> None:
    wrong = 0
    for seed in range(60):
        before, after = answers([0.9, 0.6, 0.8], 100, seed), answers([0.9, 0.6, 0.8], 100, 1000 + seed)
        _, (low, high) = best_slot_change(before, after, bootstrap_samples=200, seed=seed)
        wrong += not low <= 0 <= high
    assert wrong <= 8  # 3 expected


def test_intervals_of_changes_are_as_wide_as_the_changes_vary() -> None:
    """Slots that are equal, where the bootstrap alone is 1.2 to 1.4 times too wide, and slots that differ clearly."""
    for accuracy_S in ([0.7] * 5, [0.95, 0.6, 0.2]):
        gaps, bests = [], []
        for seed in range(150):
            before, after = answers(accuracy_S, 100, seed), answers(accuracy_S, 100, 1000 + seed)
            gaps.append(gap_change(before, after, bootstrap_samples=100, seed=seed))
            bests.append(best_slot_change(before, after, bootstrap_samples=100, seed=seed))
        for results in (gaps, bests):
            error = np.mean([(high - low) / 2 / 1.984 for _, (low, high) in results])
            assert 0.9 < error / np.std([change for change, _ in results]) < 1.25
