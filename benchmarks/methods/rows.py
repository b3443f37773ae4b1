"""The rows of the tables: what the runs of a variant measured, compared with the base, as JSON, plot and Markdown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pos2distill.evaluation.cross_fitting import mean_gap_change
from pos2distill.evaluation.statistics import difference_interval
from pos2distill.evaluation.sweep import Estimate, estimate
from pos2distill.records import Floats


@dataclass(frozen=True)
class Run:
    """What one seed of a variant measured.

    cost: seconds of search, sampling and training.
    right: for each question, the number of slots at which its answer is right.
    answers: for each question, one character for each slot, 1 if its answer there is right and 0 if not.
    cut: number of answers that ended at the limit of tokens.
    search: what the search of scales found, if there was one: the scale of each layer, their fitness on the questions
        of the search, and the fitness of scale 1 there.
    sampled, kept: number of samples of all rounds, and of those used in training.
    date, commit, machine, versions: when and with what the answers were made. A field is None in runs that were
        measured before it was recorded.
    """

    seed: int
    date: str
    accuracy: list[float]
    mean: float
    mean_ci95: tuple[float, float]
    worst: float
    gap: float
    gap_corrected: float
    seconds_per_answer: float
    cost: float
    right: list[int] | None = None
    answers: list[str] | None = None
    cut: int | None = None
    sampled: int | None = None
    kept: int | None = None
    search: dict[str, Any] | None = None
    commit: str | None = None
    machine: str | None = None
    versions: dict[str, str] | None = None


def accuracies(runs: Sequence[Run], base: Run) -> dict[str, Any]:
    """The answers of the runs of a variant. base: the variant with which it is compared."""
    means = estimate([run.mean for run in runs], [run.mean_ci95 for run in runs], shared=1)
    return {
        "seeds": len(runs),
        "mean": asdict(means),
        "change": change(runs, base),
        "gap_change": change_of_gap(runs, base),
        "worst": float(np.mean([run.worst for run in runs])),
        "gap": float(np.mean([run.gap for run in runs])),
        "gap_corrected": float(np.mean([run.gap_corrected for run in runs])),
        "accuracy": np.mean([run.accuracy for run in runs], axis=0).tolist(),
    }


def summarize(runs: Sequence[Run], base: Run, *, timed: bool) -> dict[str, Any]:
    """One line of the table: `accuracies`, times and the runs themselves.

    Args:
        timed: whether times of the runs and of the base can be compared; if not, there is no relative time.
    """
    seconds_per_answer = float(np.mean([run.seconds_per_answer for run in runs]))
    return {
        **accuracies(runs, base),
        "seconds_per_answer": seconds_per_answer,
        "relative_time": seconds_per_answer / base.seconds_per_answer if timed else None,
        "cost_seconds": float(np.mean([run.cost for run in runs])),
        "runs": [asdict(run) for run in runs],
    }


def change(runs: Sequence[Run], base: Run) -> dict[str, float] | None:
    """The mean over seeds minus the base model's, with an interval over questions; None where they are not known.

    The base has no change.
    """
    right = [run.right for run in (base, *runs)]
    if None in right or runs[0] is base:
        return None
    base_E, *others = np.asarray(right, float) / len(base.accuracy)
    difference_E = np.mean(others, axis=0) - base_E
    low, high = difference_interval(difference_E)
    return {"value": float(difference_E.mean()), "low": low, "high": high}


def change_of_gap(runs: Sequence[Run], base: Run) -> dict[str, float] | None:
    """The mean over seeds of the corrected GAP minus the base model's; None where it is not known.

    The base has no change.
    """
    known = [run.answers for run in (base, *runs) if run.answers is not None]
    if len(known) < 1 + len(runs) or runs[0] is base:
        return None
    before_ES, *after = map(to_scores, known)
    value, (low, high) = mean_gap_change(before_ES, after, bootstrap_samples=2000, seed=0)
    return {"value": value, "low": low, "high": high}


def to_scores(answers: Sequence[str]) -> Floats:
    """(E, S), 1 where an answer is right."""
    return np.array([[float(right) for right in question] for question in answers])


def format_change(change: dict[str, float] | None) -> str:
    """A change with its interval; empty if there is none."""
    return f"{change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]" if change else ""


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Mean, worst slot and corrected GAP of every variant."""
    figure = Figure(figsize=(9, 1.4 + 0.34 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    y = np.arange(len(rows))[::-1]
    means = [Estimate(**row["mean"]) for row in rows.values()]
    values = np.array([mean.value for mean in means])
    errors = [values - [mean.low for mean in means], [mean.high for mean in means] - values]
    axes.errorbar(values, y, xerr=np.maximum(errors, 0), fmt="o", label="mean over positions, 95 %", markersize=4)
    axes.plot([row["worst"] for row in rows.values()], y, "v", label="worst position", markersize=4)
    axes.plot([row["gap_corrected"] for row in rows.values()], y, "x", label="GAP, corrected", markersize=5)
    axes.set_yticks(y, list(rows))
    axes.set_xlim(-0.02, 1.02)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False, ncols=3)
    figure.savefig(path, dpi=120)


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """The report as Markdown."""
    print("| | seeds | mean | change | worst | GAP | corrected | change of the GAP | time per answer | cost, s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        mean = Estimate(**row["mean"])
        relative_time = "" if row["relative_time"] is None else f"{row['relative_time']:.2f}"
        print(
            f"| {name} | {row['seeds']} | {mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}] | "
            f"{format_change(row['change'])} | {row['worst']:.2f} | {row['gap']:.2f} | {row['gap_corrected']:.2f} | "
            f"{format_change(row['gap_change'])} | "
            f"{relative_time} | {row['cost_seconds']:.0f} |"
        )
