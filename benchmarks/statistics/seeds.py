"""Does the interval of a mean over seeds contain the truth? Simulated studies whose seeds share questions.

A model's answer to a question at a position is right if the sum of the question's ease, the noise of that answer and a
shift of the training run is above a limit, which sets the accuracy; all three are normal. Nine tenths of the noise are
the same for all seeds, because the seeds start from one model. Seeds share all questions, none, or draw them from one
pool, whose size sets the fraction that two seeds share. The truth is the mean over all questions and seeds that could
be drawn. It is compared with the interval of `estimate` and with Student's t over seeds alone. Writes seeds.json to
this folder.

  python -m benchmarks.statistics.seeds
"""

import itertools
import json
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks.circumstances import circumstances
from pos2distill.evaluation.statistics import Interval, accuracy_interval, student_t
from pos2distill.evaluation.sweep import estimate

STUDIES = 2000
QUESTIONS = 150
SLOTS = 5
SEEDS = (2, 3, 10)
TRUTHS = (0.5, 0.9, 0.98)
SHIFTS = (0.0, 0.1, 0.4)  # standard deviations between training runs, of a noise of 1
SPREAD = 1.2  # standard deviation of the questions' ease
OWN_NOISE = 0.1  # fraction of the noise's variance that is a seed's own
SHARED = (1.0, 0.5, 0.0)  # fraction of its questions that a seed shares with another


def study(
    rng: np.random.Generator, seeds: int, truth: float, shift: float, shared: float
) -> tuple[list[float], list[Interval]]:
    """The means of the seeds of one study and their intervals over questions."""
    limit = -NormalDist(0, math.sqrt(SPREAD**2 + 1 + shift**2)).inv_cdf(truth)
    # Two seeds that each draw n questions of a pool of n / shared have this fraction in common on average.
    pool = round(QUESTIONS / shared) if shared else seeds * QUESTIONS
    ease_P1 = rng.normal(0, SPREAD, (pool, 1))
    common_PS = (1 - OWN_NOISE) ** 0.5 * rng.normal(size=(pool, SLOTS))
    means, intervals = [], []
    for seed in range(seeds):
        order = rng.permutation(pool) if shared else np.roll(np.arange(pool), seed * QUESTIONS)
        drawn = order[:QUESTIONS]
        own_ES = OWN_NOISE**0.5 * rng.normal(size=(QUESTIONS, SLOTS))
        answers_ES = ease_P1[drawn] + common_PS[drawn] + own_ES + rng.normal(0, shift) > limit
        score_E = answers_ES.mean(1)
        means.append(float(score_E.mean()))
        intervals.append(accuracy_interval(score_E, answers=SLOTS))
    return means, intervals


def coverage(rng: np.random.Generator, seeds: int, truth: float, shift: float, shared: float) -> dict[str, float]:
    """How often the intervals contain the truth, and how wide that of `estimate` is on average."""
    both, seeds_alone, width = [], [], []
    for _ in range(STUDIES):
        means, intervals = study(rng, seeds, truth, shift, shared)
        estimated = estimate(means, intervals, shared=shared)
        both.append(estimated.low <= truth <= estimated.high)
        over_seeds = student_t(seeds - 1) * float(np.std(means, ddof=1)) / math.sqrt(seeds)
        seeds_alone.append(abs(float(np.mean(means)) - truth) <= over_seeds)
        width.append(estimated.high - estimated.low)
    return {
        "seeds_and_questions": float(np.mean(both)),
        "seeds_alone": float(np.mean(seeds_alone)),
        "width": float(np.mean(width)),
    }


def main() -> None:
    """Measure and write the report."""
    rng = np.random.default_rng(0)
    rates = [
        {"seeds": seeds, "truth": truth, "spread of training runs": shift, "shared questions": shared}
        | coverage(rng, seeds, truth, shift, shared)
        for seeds, truth, shift, shared in itertools.product(SEEDS, TRUTHS, SHIFTS, SHARED)
    ]
    report = circumstances("numpy") | {
        "studies": STUDIES,
        "questions": QUESTIONS,
        "slots": SLOTS,
        "coverage": rates,
    }
    (Path(__file__).parent / "seeds.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
