"""Does the interval of a mean over seeds contain the truth? Simulated studies whose seeds answer the same questions.

A model's answer to a question at a position is right if the sum of the question's ease, the noise of that answer and a
shift of the training run is above 0; all three are normal. Nine tenths of the noise are the same for all seeds, because
the seeds start from one model. The truth is the mean over all questions and seeds that could be drawn. It is compared
with the interval of `estimate` and with Student's t over seeds alone. Writes seeds.json to this folder.

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


def study(rng: np.random.Generator, seeds: int, shift: float) -> tuple[list[float], list[Interval]]:
    """The means of the seeds of one study and their intervals over questions."""
    ease_E1 = rng.normal(0, SPREAD, (QUESTIONS, 1))
    common_ES = (1 - OWN_NOISE) ** 0.5 * rng.normal(size=(QUESTIONS, SLOTS))
    means, intervals = [], []
    for _ in range(seeds):
        own_ES = OWN_NOISE**0.5 * rng.normal(size=(QUESTIONS, SLOTS))
        answers_ES = ease_E1 + common_ES + own_ES + rng.normal(0, shift) > 0
        score_E = answers_ES.mean(1)
        means.append(float(score_E.mean()))
        intervals.append(accuracy_interval(score_E, answers=SLOTS))
    return means, intervals


def coverage(rng: np.random.Generator, seeds: int, shift: float) -> dict[str, float]:
    """How often the intervals contain the truth, and how wide that of `estimate` is on average."""
    truth = 0.5  # all noise is symmetric
    both, seeds_alone, width = [], [], []
    for _ in range(STUDIES):
        means, intervals = study(rng, seeds, shift)
        estimated = estimate(means, intervals, same_questions=True)
        student = estimate(means, intervals, same_questions=False)
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
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for seeds in SEEDS:
        rates[f"{seeds} seeds"] = {str(shift): coverage(rng, seeds, shift) for shift in SHIFTS}
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
