"""Does the interval of a mean over seeds contain the truth? Simulated studies whose seeds share questions.

A model's answer to a question at a position is right if the sum of the question's ease, the noise of that answer and a
shift of the training run is above 0; all three are normal. Nine tenths of the noise are the same for all seeds, because
the seeds start from one model. Seeds share all questions, or each draws its own from a pool, of which the fraction that
two seeds share follows. The truth is the mean over all questions and seeds that could be drawn. It is compared with the
interval of `estimate` and with Student's t over seeds alone. Writes seeds.json to this folder.

  python -m benchmarks.statistics.seeds
"""

import json
from pathlib import Path

import numpy as np

from benchmarks.circumstances import circumstances
from pos2distill.evaluation.statistics import Interval, accuracy_interval
from pos2distill.evaluation.sweep import estimate

STUDIES = 2000
QUESTIONS = 150
SLOTS = 5
SEEDS = (2, 3, 10)
SHIFTS = (0.0, 0.05, 0.1, 0.2, 0.4)  # standard deviations between training runs, of a noise of 1
SPREAD = 1.2  # standard deviation of the questions' ease
OWN_NOISE = 0.1  # fraction of the noise's variance that is a seed's own
SHARED = (1.0, 0.75, 0.5, 0.25)  # fraction of its questions that a seed shares with another


def study(rng: np.random.Generator, seeds: int, shift: float, shared: float) -> tuple[list[float], list[Interval]]:
    """The means of the seeds of one study and their intervals over questions."""
    # Two seeds that each draw n questions of a pool of n / shared have this fraction in common on average.
    pool = round(QUESTIONS / shared)
    ease_P1 = rng.normal(0, SPREAD, (pool, 1))
    common_PS = (1 - OWN_NOISE) ** 0.5 * rng.normal(size=(pool, SLOTS))
    means, intervals = [], []
    for _ in range(seeds):
        drawn = rng.permutation(pool)[:QUESTIONS]
        own_ES = OWN_NOISE**0.5 * rng.normal(size=(QUESTIONS, SLOTS))
        answers_ES = ease_P1[drawn] + common_PS[drawn] + own_ES + rng.normal(0, shift) > 0
        score_E = answers_ES.mean(1)
        means.append(float(score_E.mean()))
        intervals.append(accuracy_interval(score_E, answers=SLOTS))
    return means, intervals


def coverage(rng: np.random.Generator, seeds: int, shift: float, shared: float) -> dict[str, float]:
    """How often the intervals contain the truth, and how wide that of `estimate` is on average."""
    truth = 0.5  # all noise is symmetric
    both, seeds_alone, width = [], [], []
    for _ in range(STUDIES):
        means, intervals = study(rng, seeds, shift, shared)
        estimated = estimate(means, intervals, shared=shared)
        student = estimate(means, intervals, shared=0)
        both.append(estimated.low <= truth <= estimated.high)
        seeds_alone.append(student.low <= truth <= student.high)
        width.append(estimated.high - estimated.low)
    return {
        "seeds_and_questions": float(np.mean(both)),
        "seeds_alone": float(np.mean(seeds_alone)),
        "width": float(np.mean(width)),
    }


def main() -> None:
    """Measure and write the report."""
    rng = np.random.default_rng(0)
    rates: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for seeds in SEEDS:
        by_shift = rates[f"{seeds} seeds"] = {}
        for shift in SHIFTS:
            by_shift[str(shift)] = {f"shared {shared}": coverage(rng, seeds, shift, shared) for shared in SHARED}
    report = circumstances("numpy") | {
        "studies": STUDIES,
        "questions": QUESTIONS,
        "slots": SLOTS,
        "by_seeds_and_spread_of_training_runs": rates,
    }
    (Path(__file__).parent / "seeds.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
