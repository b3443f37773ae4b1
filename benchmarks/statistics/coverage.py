"""Do the intervals contain the truth as often as they say? Simulated models whose true accuracies are known.

A question has a difficulty, drawn once and equal at all its slots; a slot makes every question harder or easier. So
the answers to one question depend on each other as those of a real model do. For every scenario and statistic: how
often the 95 % interval contains the true value, the mean of estimates, and how often the gate and the test raise a
false alarm.

  python -m benchmarks.statistics.coverage              # 1000 simulated studies of each scenario, about 15 minutes
  python -m benchmarks.statistics.coverage --studies 50
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks.circumstances import circumstances
from pos2distill.evaluation.statistics import (
    accuracy_interval,
    corrected_gap,
    difference_interval,
    gap_change,
    gap_interval,
    position_p_value,
)
from pos2distill.randomness import derive_generator

Floats = npt.NDArray[np.float64]
RESAMPLES = 400
PERMUTATIONS = 199
_FLAT = 1e-9


@dataclass(frozen=True)
class Scenario:
    """A base model and a distilled one, by the ease of each slot; spread: of the questions' difficulty."""

    questions: int
    base: tuple[float, ...]
    distilled: tuple[float, ...]
    spread: float = 1.0

    def accuracies(self, ease: tuple[float, ...]) -> Floats:
        """The true accuracy at each slot: P(noise < ease + spread * difficulty), all normal."""
        scale = (1 + self.spread**2) ** 0.5
        return np.array([NormalDist().cdf(slot / scale) for slot in ease])


SCENARIOS = {
    "flat, 100 x 5": Scenario(100, (0.9,) * 5, (1.2,) * 5),
    "flat, 100 x 15, nearly all right": Scenario(100, (2.6,) * 15, (2.8,) * 15),
    "flat, 60 x 6": Scenario(60, (1.0,) * 6, (1.0,) * 6),
    "flat, 500 x 5": Scenario(500, (0.7,) * 5, (0.7,) * 5),
    "lost in the middle, 80 x 5": Scenario(80, (0.1, -1.5, -1.2, -0.9, -0.7), (0.1, -0.7, -0.8, -0.2, 0.3)),
    "lost in the middle, 150 x 3": Scenario(150, (0.3, -0.5, 0.1), (0.3, 0.0, 0.2)),
    "lost in the middle, 500 x 5": Scenario(500, (0.6, 0.1, 0.0, 0.2, 0.5), (0.6, 0.5, 0.5, 0.5, 0.6)),
    "small differences, 150 x 10": Scenario(150, tuple(np.linspace(0.6, 0, 10)), tuple(np.linspace(0.6, 0.3, 10))),
    "only the first positions, 100 x 15": Scenario(100, (2.0,) * 3 + (0.0,) * 12, (2.0,) * 15),
}


def draw(scenario: Scenario, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Answers of both models to the same questions, (E, S) each."""
    difficulty_E1 = scenario.spread * generator.normal(size=(scenario.questions, 1))
    models = []
    for ease in (scenario.base, scenario.distilled):
        noise_ES = generator.normal(size=(scenario.questions, len(ease)))
        models.append((noise_ES < np.asarray(ease) + difficulty_E1).astype(float))
    return models[0], models[1]


def simulate(scenario: Scenario, seed: int) -> dict[str, float]:
    """One study: 1 where an interval contains the truth or an alarm is raised, else 0; and the estimates."""
    # Other draws in each scenario, so that chance does not repeat.
    generator = derive_generator(seed, repr(scenario))
    base_ES, distilled_ES = draw(scenario, generator)
    base_S, distilled_S = scenario.accuracies(scenario.base), scenario.accuracies(scenario.distilled)
    gap, distilled_gap = float(np.ptp(base_S)), float(np.ptp(distilled_S))
    position_p = position_p_value(base_ES, permutations=PERMUTATIONS, seed=seed)
    low, high = gap_interval(base_ES, position_p=position_p, resamples=RESAMPLES, seed=seed)
    change, change_interval = gap_change(base_ES, distilled_ES, resamples=RESAMPLES, seed=seed)
    difference_E = (distilled_ES - base_ES).mean(1)
    difference = difference_interval(difference_E)
    mean = accuracy_interval(base_ES.mean(1), base_ES.shape[1])
    values = {
        "first slot": _contains(accuracy_interval(base_ES[:, 0]), base_S[0]),
        "mean": _contains(mean, base_S.mean()),
        "paired difference": _contains(difference, (distilled_S - base_S).mean()),
        "GAP": _contains((low, high), gap),
        "change of GAP": _contains(change_interval, distilled_gap - gap),
        "gate alarm at the true GAP": float(low > gap + _FLAT),
        "GAP estimate": float(np.ptp(base_ES.mean(0))),
        "corrected GAP estimate": corrected_gap(base_ES, seed=seed),
        "change estimate": change,
    }
    if gap < _FLAT:
        values["position test alarm"] = float(position_p <= 0.05)
    return values


def _contains(interval: tuple[float, float], value: float) -> float:
    return float(interval[0] - _FLAT <= value <= interval[1] + _FLAT)


def summarise(scenario: Scenario, results: list[dict[str, float]]) -> dict[str, float]:
    """Means over the simulated studies, beside the true values."""
    summary = {name: float(np.mean([result[name] for result in results])) for name in results[0]}
    summary["true GAP"] = float(np.ptp(scenario.accuracies(scenario.base)))
    summary["true change"] = float(np.ptp(scenario.accuracies(scenario.distilled))) - summary["true GAP"]
    return summary


def table(summaries: Mapping[str, Mapping[str, float]]) -> str:
    """The report as Markdown."""
    columns = ("first slot", "mean", "paired difference", "GAP", "change of GAP", "gate alarm at the true GAP")
    lines = ["| scenario | true GAP | max - min | corrected | " + " | ".join(columns) + " | position test alarm |"]
    lines.append("|---" * (len(columns) + 5) + "|")
    for name, summary in summaries.items():
        estimates = (summary["true GAP"], summary["GAP estimate"], summary["corrected GAP estimate"])
        cells = [f"{value:.3f}" for value in (*estimates, *(summary[column] for column in columns))]
        alarm = f"{summary['position test alarm']:.3f}" if "position test alarm" in summary else ""
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {alarm} |")
    return "\n".join(lines)


def main() -> None:
    """Simulate all scenarios, write coverage.json to this folder, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000, help="of each scenario (default: %(default)s)")
    options = parser.parse_args()
    summaries: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        results = [simulate(scenario, seed) for seed in tqdm(range(options.studies), desc=name)]
        summaries[name] = summarise(scenario, results)
    report = {"studies": options.studies, "resamples": RESAMPLES, "scenarios": summaries} | circumstances("numpy")
    Path(__file__).with_name("coverage.json").write_text(json.dumps(report, indent=2) + "\n")
    print(table(summaries))


if __name__ == "__main__":
    main()
