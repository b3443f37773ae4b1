"""Do the intervals contain the truth as often as they say? Simulated models whose true accuracies are known.

A question has a difficulty, which is drawn once and is the same at all slots; a slot makes every question harder or
easier. So the answers to one question depend on each other as those of a real model do. For every scenario and
statistic, this measures how often the 95 % interval contains the true value, the mean of the estimates, and how often
the gate and the test raise a false alarm. For studies in which the gate cannot decide, it measures how often the gate
decides with the number of questions that it names.

  python -m benchmarks.statistics.coverage              # 1000 studies of each scenario, 30 minutes on one core
  python -m benchmarks.statistics.coverage --studies 50 --output runs/coverage.json
  python -m benchmarks.statistics.coverage --add "flat, 500 x 5"    # this scenario alone, into the existing report
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from tqdm import tqdm

from benchmarks.circumstances import circumstances
from pos2distill.evaluation.cross_fitting import best_slot_change, corrected_gap, gap_change
from pos2distill.evaluation.gap import gap_interval, position_p_value, questions_above
from pos2distill.evaluation.statistics import accuracy_interval, difference_interval, fraction_interval, ratio_interval
from pos2distill.randomness import derive_generator
from pos2distill.records import Floats

RESAMPLES = 400
DRAWS = 199
_FLAT = 1e-9


@dataclass(frozen=True)
class Scenario:
    """A base model and a distilled one, by the ease of each slot.

    spread: standard deviation of the questions' difficulty.
    alike: correlation of the noise at each slot with that at the slot before; one number for all slots, or one for each
        slot from the second on.
    """

    questions: int
    base: tuple[float, ...]
    distilled: tuple[float, ...]
    spread: float = 1.0
    alike: float | tuple[float, ...] = 0.0

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
    # The constants of `gap_interval` were chosen with the scenarios above, but not with these.
    "lost in the middle, 24 x 3": Scenario(24, (0.8, -0.6, 0.5), (0.8, 0.4, 0.7)),
    "lost in the middle, 20 x 5": Scenario(20, (0.9, -0.5, -0.3, 0.1, 0.6), (0.9, 0.4, 0.5, 0.5, 0.8)),
    "flat, 30 x 5, nearly all right": Scenario(30, (2.6,) * 5, (2.8,) * 5),
    "two slots, 100 x 2": Scenario(100, (0.5, 0.1), (0.5, 0.4)),
    "one bad slot, 100 x 15": Scenario(100, (1.0,) * 14 + (0.2,), (1.0,) * 15),
    "small differences, 300 x 20": Scenario(300, tuple(np.linspace(0.7, 0.3, 20)), tuple(np.linspace(0.7, 0.5, 20))),
    "one bad slot, 60 x 5, nearly all right": Scenario(60, (4.0,) * 4 + (2.0,), (4.0,) * 5),
    # The treatment of few wrong answers was chosen with the scenario above, but not with these.
    "one bad slot, 500 x 5, nearly all right": Scenario(500, (4.0,) * 4 + (2.9,), (4.0,) * 5),
    "flat, 60 x 5, all right but one of a thousand": Scenario(60, (4.4,) * 5, (4.4,) * 5),
    "flat, then one bad slot, 100 x 15": Scenario(100, (0.4,) * 15, (4.0,) * 14 + (2.4,)),
    "one bad slot, 40 x 8, nearly all right": Scenario(40, (4.0,) * 7 + (2.4,), (4.0,) * 7 + (3.0,)),
    "two bad slots, 60 x 10, nearly all right": Scenario(60, (3.5,) * 8 + (2.2,) * 2, (3.5,) * 9 + (2.2,)),
    "lost in the middle, then one bad slot, 80 x 5": Scenario(
        80, (0.1, -1.5, -1.2, -0.9, -0.7), (3.5, 3.5, 2.0, 3.5, 3.5)
    ),
    "one good slot, 60 x 5, nearly all wrong": Scenario(60, (-1.8,) + (-3.5,) * 4, (-1.0, -2.5, -3.5, -3.0, -2.0)),
    # Answers at neighboring slots are alike, as those of real models are.
    "flat, 100 x 5, neighbors alike": Scenario(100, (0.5,) * 5, (0.8,) * 5, alike=0.9),
    "flat, 100 x 15, neighbors alike": Scenario(100, (0.5,) * 15, (0.8,) * 15, alike=0.9),
    "lost in the middle, 80 x 5, neighbors alike": Scenario(
        80, (0.1, -1.5, -1.2, -0.9, -0.7), (0.1, -0.7, -0.8, -0.2, 0.3), alike=0.7
    ),
    # If one slot is answered independently of the others, and these are alike, the test of position errs more often:
    # its shifts presuppose that the correlation of two slots depends only on their distance.
    "flat, 100 x 5, all alike but the first": Scenario(100, (0.5,) * 5, (0.8,) * 5, alike=(0.0,) + (1.0,) * 3),
    "flat, 100 x 10, all alike but the first": Scenario(100, (0.5,) * 10, (0.8,) * 10, alike=(0.0,) + (1.0,) * 8),
    "flat, 100 x 20, all alike but the first": Scenario(100, (0.5,) * 20, (0.8,) * 20, alike=(0.0,) + (1.0,) * 18),
}
# Relative frequencies of the gold document's rank.
RETRIEVER_RANKS = (8, 4, 2, 1, 1)
ORDERS = 3  # orders of the distractors

# A scenario with fewer questions, and a limit on the GAP that these questions often cannot decide.
UNDECIDED = {
    "lost in the middle, 80 x 5": (60, 0.25),
    "lost in the middle, 150 x 3": (60, 0.10),
    "lost in the middle, 500 x 5": (60, 0.10),
    "one bad slot, 100 x 15": (60, 0.10),
}

# Nats of a question, with a mean of 1. In a real model (benchmarks/analysis) their deviation is 0.7, as with shape 2.
NATS: Mapping[str, Callable[[np.random.Generator, int], Floats]] = {
    "gamma, shape 2": lambda generator, questions: generator.gamma(2.0, 0.5, questions),
    "gamma, shape 0.5": lambda generator, questions: generator.gamma(0.5, 2.0, questions),
    "log-normal, deviation 1": lambda generator, questions: generator.lognormal(-0.5, 1.0, questions),
    "log-normal, deviation 1.5": lambda generator, questions: generator.lognormal(-1.125, 1.5, questions),
}
NATS_QUESTIONS = (8, 20, 60, 200)

# Recovered fractions of an example's tokens: their mean, the precision of their beta distribution, tokens, examples.
RECOVERIES = (
    (0.8, 5.0, 22, 3),
    (0.8, 5.0, 22, 8),
    (0.8, 5.0, 22, 12),
    (0.998, 20.0, 240, 20),
    (0.998, 20.0, 240, 58),
    (0.99, 8.0, 240, 40),
    (0.98, 3.0, 240, 20),
    (0.98, 3.0, 240, 60),
    (0.953, 30.0, 240, 40),
    (0.92, 10.0, 22, 58),
    (0.7, 5.0, 22, 58),
    (0.1, 1.0, 12, 20),
    (0.1, 1.0, 12, 60),
)


def draw(scenario: Scenario, ease: tuple[float, ...], difficulty_E1: Floats, generator: np.random.Generator) -> Floats:
    """(E, S) answers of one of the scenario's models, which has this ease at each slot."""
    noise_ES = generator.normal(size=(len(difficulty_E1), len(ease)))
    for slot, alike in enumerate(np.broadcast_to(scenario.alike, len(ease) - 1), start=1):
        noise_ES[:, slot] = alike * noise_ES[:, slot - 1] + (1 - alike**2) ** 0.5 * noise_ES[:, slot]
    return (noise_ES < np.asarray(ease) + difficulty_E1).astype(float)


def draw_difficulty(scenario: Scenario, questions: int, generator: np.random.Generator) -> Floats:
    """(E, 1) difficulties of the questions, the same for all models."""
    difficulty_E1: Floats = scenario.spread * generator.normal(size=(questions, 1))
    return difficulty_E1


def simulate(scenario: Scenario, seed: int) -> dict[str, float]:
    """One study: 1 where an interval contains the truth or an alarm is raised, else 0; and the estimates."""
    # Each scenario has other draws, so that chance does not repeat.
    generator = derive_generator(seed, repr(scenario))
    difficulty_E1 = draw_difficulty(scenario, scenario.questions, generator)
    base_ES = draw(scenario, scenario.base, difficulty_E1, generator)
    distilled_ES = draw(scenario, scenario.distilled, difficulty_E1, generator)
    base_S, distilled_S = scenario.accuracies(scenario.base), scenario.accuracies(scenario.distilled)
    gap, distilled_gap = float(np.ptp(base_S)), float(np.ptp(distilled_S))
    position_p = position_p_value(base_ES, draws=DRAWS, seed=seed)
    low, high = gap_interval(base_ES, position_p=position_p, draws=RESAMPLES, seed=seed)
    change, change_interval = gap_change(base_ES, distilled_ES, bootstrap_samples=RESAMPLES, seed=seed)
    change_E = (distilled_ES - base_ES).mean(1)
    difference, true_difference = difference_interval(change_E), float((distilled_S - base_S).mean())
    mean = accuracy_interval(base_ES.mean(1), base_ES.shape[1])
    orders_ES = np.mean([draw(scenario, scenario.base, difficulty_E1, generator) for _ in range(ORDERS)], axis=0)
    weight_S = np.zeros(len(base_S))
    weight_S[: len(RETRIEVER_RANKS)] = RETRIEVER_RANKS[: len(base_S)]
    weight_S /= weight_S.sum()
    ranks = accuracy_interval(base_ES @ weight_S, 1 / float((weight_S**2).sum()))
    # A model that answers again, with the same true accuracies: no change is real.
    repeated_ES = draw(scenario, scenario.base, difficulty_E1, generator)
    _, best = best_slot_change(base_ES, repeated_ES, bootstrap_samples=RESAMPLES, seed=seed)
    values = {
        "first slot": _contains(accuracy_interval(base_ES[:, 0]), base_S[0]),
        "first slot, 3 orders": _contains(accuracy_interval(orders_ES[:, 0], ORDERS), base_S[0]),
        "mean": _contains(mean, base_S.mean()),
        "retriever's ranks": _contains(ranks, float(base_S @ weight_S)),
        "paired difference": _contains(difference, true_difference),
        "GAP": _contains((low, high), gap),
        "change of GAP": _contains(change_interval, distilled_gap - gap),
        "no change of best slot": _contains(best, 0.0),
        "alarm, GAP": float(low > gap + _FLAT),
        "alarm, mean": float(mean[1] < base_S.mean() - _FLAT),
        "alarm, drop": float(difference[1] < true_difference - _FLAT),
        "GAP estimate": float(np.ptp(base_ES.mean(0))),
        "corrected GAP estimate": corrected_gap(base_ES, seed=seed),
        "change estimate": change,
    }
    values["alarm, position" if gap < _FLAT else "power, position"] = float(position_p <= 0.05)
    return values


def simulate_nats(kind: str, questions: int, studies: int) -> dict[str, float]:
    """How often the interval contains the true mean of nats, or the true share of a part, of skewed questions."""
    mean, share = [], []
    for seed in range(studies):
        generator = derive_generator(seed, f"nats {kind} {questions}")
        total_E = NATS[kind](generator, questions)
        # Each part has a random size; on average the parts sum to half of all nats.
        part_E = total_E * generator.uniform(size=questions)
        ones_E = np.ones(questions)
        mean.append(_contains(ratio_interval(total_E, ones_E, bootstrap_samples=RESAMPLES, seed=seed), 1.0))
        share.append(_contains(ratio_interval(part_E, total_E, bootstrap_samples=RESAMPLES, seed=seed), 0.5))
    return {"mean": float(np.mean(mean)), "share": float(np.mean(share))}


def simulate_recovery(mean: float, precision: float, tokens: int, examples: int, studies: int) -> float:
    """How often the interval contains the true share of tokens that are recovered; or of chains that fail."""
    covered = []
    for seed in range(studies):
        generator = derive_generator(seed, f"recovery {mean} {precision} {tokens} {examples}")
        chance_E = generator.beta(mean * precision, (1 - mean) * precision, examples)
        share_E = generator.binomial(tokens, chance_E) / tokens
        interval = fraction_interval(share_E, np.ones(examples), answers=tokens, bootstrap_samples=RESAMPLES, seed=seed)
        covered.append(_contains(interval, mean))
    return float(np.mean(covered))


def simulate_named_questions(scenario: Scenario, questions: int, limit: float, studies: int) -> dict[str, float]:
    """The median number of questions that an undecided gate names, and how often it decides with that number."""

    def study(count: int, seed: int) -> tuple[Floats, float]:
        generator = derive_generator(seed, f"{count} {scenario!r}")
        correct_ES = draw(scenario, scenario.base, draw_difficulty(scenario, count, generator), generator)
        p = position_p_value(correct_ES, draws=DRAWS, seed=seed)
        return correct_ES, gap_interval(correct_ES, position_p=p, draws=RESAMPLES, seed=seed)[0]

    named = []
    for seed in range(studies):
        correct_ES, low = study(questions, seed)
        if low <= limit < np.ptp(correct_ES.mean(0)):
            needed = questions_above(correct_ES, limit, draws=RESAMPLES, seed=seed)
            named.append(np.inf if needed is None else needed)
    result = {"questions": questions, "limit": limit, "undecided": len(named) / studies}
    median = float(np.median(named)) if named else np.inf
    if np.isfinite(median):  # there is no median if most studies name no number
        decided = [study(int(median), seed)[1] > limit for seed in range(studies)]
        result |= {"named, median": int(median), "decides with as many": float(np.mean(decided))}
    return result


def _contains(interval: tuple[float, float], value: float) -> float:
    return float(interval[0] - _FLAT <= value <= interval[1] + _FLAT)


def summarize(scenario: Scenario, results: list[dict[str, float]]) -> dict[str, float]:
    """Means over the simulated studies, beside the true values."""
    summary = {name: float(np.mean([result[name] for result in results])) for name in results[0]}
    summary["true GAP"] = float(np.ptp(scenario.accuracies(scenario.base)))
    corrected = [result["corrected GAP estimate"] for result in results]
    error = float(np.std(corrected, ddof=1)) / len(corrected) ** 0.5
    summary["corrected GAP estimate, standard error"] = error
    if summary["true GAP"] < _FLAT:
        summary["corrected GAP estimate, standard errors from 0"] = summary["corrected GAP estimate"] / error
    summary["true change"] = float(np.ptp(scenario.accuracies(scenario.distilled))) - summary["true GAP"]
    return summary


def table(summaries: Mapping[str, Mapping[str, float]]) -> str:
    """The report as Markdown."""
    found = dict.fromkeys(name for summary in summaries.values() for name in summary)
    columns = [name for name in found if "estimate" not in name and "true" not in name]
    lines = ["| scenario | true GAP | max - min | corrected | " + " | ".join(columns) + " |"]
    lines.append("|---" * (len(columns) + 4) + "|")
    for name, summary in summaries.items():
        estimates = (summary["true GAP"], summary["GAP estimate"], summary["corrected GAP estimate"])
        cells = [f"{value:.3f}" for value in estimates]
        cells += [f"{summary[column]:.3f}" if column in summary else "" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def simulate_scenario(name: str, studies: int) -> dict[str, float]:
    """The summary of a scenario's studies."""
    return summarize(SCENARIOS[name], [simulate(SCENARIOS[name], seed) for seed in tqdm(range(studies), desc=name)])


def add_to_report(output: Path, names: Sequence[str], studies: int) -> None:
    """Simulate some scenarios, put them into an existing report, which keeps what else it has, and print their table.

    `added` of the report has, for each of them, the number of studies, and where and when they were simulated.
    """
    report = json.loads(output.read_text())
    added = report.setdefault("added", {})
    for name in names:
        report["scenarios"][name] = simulate_scenario(name, studies)
        added[name] = {"studies": studies, **circumstances("numpy")}
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(table({name: report["scenarios"][name] for name in names}))


def main() -> None:
    """Simulate all scenarios, write coverage.json, and print the table; or add some scenarios to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000, help="of each scenario (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("coverage.json"), help="the report")
    parser.add_argument(
        "--add", action="append", choices=SCENARIOS, metavar="SCENARIO", help="simulate this one alone, into the report"
    )
    options = parser.parse_args()
    if options.studies < 2:
        parser.error(f"--studies: expected at least 2, got {options.studies}")
    if options.add:
        add_to_report(options.output, options.add, options.studies)
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    summaries = {name: simulate_scenario(name, options.studies) for name in SCENARIOS}
    undecided = {}
    for name, (questions, limit) in UNDECIDED.items():
        undecided[name] = simulate_named_questions(SCENARIOS[name], questions, limit, options.studies)
    nats = {}
    for kind in NATS:
        for questions in NATS_QUESTIONS:
            nats[f"{kind}, {questions} questions"] = simulate_nats(kind, questions, options.studies)
    report = {"studies": options.studies, "resamples": RESAMPLES, "scenarios": summaries, "undecided": undecided}
    report["nats"] = nats
    recoveries = {}
    for mean, precision, tokens, examples in RECOVERIES:
        name = f"{mean:g}, precision {precision:g}, {tokens} tokens, {examples} examples"
        recoveries[name] = simulate_recovery(mean, precision, tokens, examples, options.studies)
    report["recovery"] = recoveries
    report |= circumstances("numpy")
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(table(summaries))
    for name, result in (undecided | nats | recoveries).items():
        print(name, result)


if __name__ == "__main__":
    main()
