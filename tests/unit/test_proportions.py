import pytest

from pos2distill.proportions import wilson_interval


@pytest.mark.parametrize(
    ("right", "of", "standard_errors", "expected"),
    [
        (30, 100, 1.96, (0.2189, 0.3958)),  # a textbook's
        (100, 100, 1.96, (0.9630, 1.0)),  # 1 / (1 + 1.96^2 / 100)
        (0, 100, 1.96, (0.0, 0.0370)),
        (3, 20, 3.0, (0.0320, 0.4853)),  # center (.15 + 9 / 40) / 1.45 = .2586, margin .2266
    ],
)
def test_wilson_interval_of_known_cases(
    right: int, of: int, standard_errors: float, expected: tuple[float, float]
) -> None:
    assert wilson_interval(right / of, of, standard_errors) == pytest.approx(expected, abs=1e-4)


def test_wilson_interval_stays_within_0_and_1() -> None:
    low, high = wilson_interval(0.0, 3, 3.0)
    assert low == 0
    low, high = wilson_interval(1.0, 3, 3.0)
    assert high == 1
