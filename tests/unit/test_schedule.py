import pytest

from pos2distill.config import TrainingSection
from pos2distill.training.schedule import learning_rate

# 40 steps, of which ceil(.05 * 40) = 2 warm up and 38 decay.
SETTINGS = TrainingSection(learning_rate=2e-4, warmup_share=0.05, final_rate_share=0.1)


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (0, 0.5),
        (1, 1.0),
        (2, 1.0),  # progress 0
        (39, 0.1),  # progress 1: the floor
    ],
)
def test_values_by_hand(step: int, share: float) -> None:
    assert learning_rate(step, 40, SETTINGS) == pytest.approx(2e-4 * share)


def test_the_middle_of_the_decay_is_half_way_to_the_floor() -> None:
    # 41 steps: 3 warm up, and step 3 + 37/2 is no step, so take 42: 3 warm up, the middle is (3 + 41) / 2 = 22.
    assert learning_rate(22, 42, SETTINGS) == pytest.approx(2e-4 * 0.55)


def test_it_rises_then_falls_and_never_leaves_its_bounds() -> None:
    rates = [learning_rate(step, 100, SETTINGS) for step in range(100)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) == pytest.approx(2e-4)
    assert min(rates[top:]) == pytest.approx(2e-5)


def test_short_runs_and_no_warm_up() -> None:
    assert learning_rate(0, 1, SETTINGS) == pytest.approx(2e-4)
    assert learning_rate(0, 10, TrainingSection(learning_rate=1.0, warmup_share=0.0)) == pytest.approx(1.0)
