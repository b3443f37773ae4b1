"""Do the intervals of a sweep over seeds contain the truth? Simulated studies whose seeds share questions.

A model's answer to a question at a position is right if the sum of the question's ease, the noise of that answer and a
shift of the training run is above a limit, which sets the accuracy; all three are normal. Nine tenths of the noise are
the same for all seeds, because the seeds start from one model. Seeds share all questions, none, or draw them from one
pool, whose size sets the fraction that two seeds share. The truth is the mean over all questions and seeds that could
be drawn. It is compared with the interval of `estimate` and with Student's t over seeds alone.

The GAP is simulated likewise, for models that are flat, lost in the middle, or slightly better at one position: how
often `estimate_gap` contains the true GAP, how often its lower end is above 0 (for flat models a false alarm), and the
same without its rule for the lower end. Writes seeds.json to this folder.

  python -m benchmarks.statistics.seeds
"""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks.circumstances import circumstances
from pos2distill.evaluation.cross_fitting import corrected_gap
from pos2distill.evaluation.gap import gap_interval, position_p_value
from pos2distill.evaluation.statistics import Interval, accuracy_interval, student_t
from pos2distill.evaluation.sweep import estimate, estimate_gap
from pos2distill.records import Floats

STUDIES = 2000
GAP_STUDIES = 200
GAP_DRAWS = 200  # random permutations, and bootstrap samples, of each study
QUESTIONS = 150
SLOTS = 5
SEEDS = (2, 3, 10)
TRUTHS = (0.5, 0.9, 0.98)
SHIFTS = (0.0, 0.1, 0.4)  # standard deviations between training runs, of a noise of 1
SPREAD = 1.2  # standard deviation of the questions' ease
OWN_NOISE = 0.1  # fraction of the noise's variance that is a seed's own
SHARED = (1.0, 0.5, 0.0)  # fraction of its questions that a seed shares with another
# Accuracies by position whose GAP is estimated.
CURVES = {
    "flat": (0.5,) * SLOTS,
    "lost in the middle": (0.6, 0.5, 0.4, 0.5, 0.6),
    "one position .06 above the others": (0.5, 0.5, 0.5, 0.5, 0.56),
}
GAP_SEEDS = (3, 10)
GAP_SHIFT = 0.1


def study(
    rng: np.random.Generator, seeds: int, accuracies: Sequence[float], shift: float, shared: float
) -> list[Floats]:
    """Whether each answer of one study is right, of each seed by question and slot: 1 or 0."""
    answer_sum = NormalDist(0, math.sqrt(SPREAD**2 + 1 + shift**2))
    limit_S = np.array([-answer_sum.inv_cdf(accuracy) for accuracy in accuracies])
    # Two seeds that each draw n questions of a pool of n / shared have this fraction in common on average.
    pool = round(QUESTIONS / shared) if shared else seeds * QUESTIONS
    ease_P1 = rng.normal(0, SPREAD, (pool, 1))
    common_PS = (1 - OWN_NOISE) ** 0.5 * rng.normal(size=(pool, SLOTS))
    answers = []
    for seed in range(seeds):
        order = rng.permutation(pool) if shared else np.roll(np.arange(pool), seed * QUESTIONS)
        drawn = order[:QUESTIONS]
        own_ES = OWN_NOISE**0.5 * rng.normal(size=(QUESTIONS, SLOTS))
        correct_ES = ease_P1[drawn] + common_PS[drawn] + own_ES + rng.normal(0, shift) > limit_S
        answers.append(correct_ES.astype(float))
    return answers


def coverage(rng: np.random.Generator, seeds: int, truth: float, shift: float, shared: float) -> dict[str, float]:
    """How often the intervals contain the truth, and how wide that of `estimate` is on average."""
    both, seeds_alone, width = [], [], []
    for _ in range(STUDIES):
        scores = [correct_ES.mean(1) for correct_ES in study(rng, seeds, (truth,) * SLOTS, shift, shared)]
        means = [float(score_E.mean()) for score_E in scores]
        intervals = [accuracy_interval(score_E, answers=SLOTS) for score_E in scores]
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


def gap_coverage(rng: np.random.Generator, seeds: int, accuracies: Sequence[float], shared: float) -> dict[str, float]:
    """How often the interval of the GAP contains the truth and excludes 0, with and without its rule for the end."""
    truth = max(accuracies) - min(accuracies)
    contains, above_0, contains_without, above_0_without = [], [], [], []
    for _ in range(GAP_STUDIES):
        gaps: list[float] = []
        intervals: list[Interval] = []
        corrected: list[float] = []
        for correct_ES in study(rng, seeds, accuracies, GAP_SHIFT, shared):
            accuracy_S = correct_ES.mean(0)
            p = position_p_value(correct_ES, draws=GAP_DRAWS, seed=0)
            gaps.append(float(accuracy_S.max() - accuracy_S.min()))
            intervals.append(gap_interval(correct_ES, position_p=p, draws=GAP_DRAWS, seed=0))
            corrected.append(corrected_gap(correct_ES, seed=0))
        estimated, _corrected = estimate_gap(gaps, intervals, corrected, shared=shared)
        without = estimate(gaps, intervals, shared=shared)
        contains.append(estimated.low <= truth <= estimated.high)
        above_0.append(estimated.low > 0)
        contains_without.append(without.low <= truth <= without.high)
        above_0_without.append(without.low > 0)
    return {
        "contains the truth": float(np.mean(contains)),
        "above 0": float(np.mean(above_0)),
        "without the rule, contains the truth": float(np.mean(contains_without)),
        "without the rule, above 0": float(np.mean(above_0_without)),
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
        "gap_studies": GAP_STUDIES,
        "gap": [
            {"curve": name, "seeds": seeds, "shared questions": shared} | gap_coverage(rng, seeds, accuracies, shared)
            for (name, accuracies), seeds, shared in itertools.product(CURVES.items(), GAP_SEEDS, SHARED)
        ],
    }
    (Path(__file__).parent / "seeds.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
