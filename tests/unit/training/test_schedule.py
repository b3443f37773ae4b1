import pytest

from pos2distill.config import TrainingSection
from pos2distill.training.schedule import learning_rate

SETTINGS = TrainingSection(learning_rate=2e-4, warmup_ratio=0.05, min_lr_ratio=0.1)


@pytest.mark.parametrize(
    ("fraction", "rate"),
    [
        (0.0125, 0.25),  # a quarter of the warm-up
        (0.05, 1.0),
        (0.525, 0.55),  # the middle of the decay is half way to the floor
        (1.0, 0.1),
    ],
)
def test_learning_rate_values_by_hand(fraction: float, rate: float) -> None:
    assert learning_rate(fraction, SETTINGS) == pytest.approx(2e-4 * rate)


def test_learning_rate_rises_then_falls_within_its_bounds() -> None:
    rates = [learning_rate(step / 100, SETTINGS) for step in range(1, 101)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) == pytest.approx(2e-4)
    assert min(rates[top:]) == pytest.approx(2e-5)


def test_learning_rate_of_one_step_and_without_warm_up() -> None:
    assert learning_rate(1.0, SETTINGS) == pytest.approx(2e-5)  # a run of one step ends with it
    assert learning_rate(0.001, TrainingSection(learning_rate=1.0, warmup_ratio=0.0)) == pytest.approx(1.0, rel=1e-5)
