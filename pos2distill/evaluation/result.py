"""The evaluation of one model as an object: its curve, a verdict, a plot, its answers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pos2distill.config import EndpointSection, Study
from pos2distill.evaluation.charts import curve_chart, to_png
from pos2distill.evaluation.references import summarize_references
from pos2distill.evaluation.scores import Curve, questions_to_see_positions, summarize_expected, to_curve, to_grid
from pos2distill.evaluation.verdict import describe_curve
from pos2distill.tasks.datasets import dataset_name
from pos2distill.tasks.metrics import describe_metric

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG that a notebook shows."""

    png: bytes = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_bytes(self.png)

    def _repr_png_(self) -> bytes:
        return self.png


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """One model's answers at every slot.

    Attributes:
        curves: accuracy by slot, for each prompt length; that of training first.
        expected: the accuracy under `evaluation.retriever_ranks`, and `ci95`, its interval; None without them.
        references: see `summarize_references`.
        questions_to_see: how many questions show a difference between two slots, by its points (see
            `questions_to_see_positions`). Like the references, they are of the prompt length of training.
        predictions: a table of `PREDICTION_SCHEMA`.
        refused: a table of `REFUSAL_SCHEMA`: the prompts that a server refused; their questions are left out of
            everything else.
        counts: the counts in the stage's manifest.
        cost: cost of all answered requests, in the currency of the prices; None without prices or without counts.
        fingerprint: fingerprint of everything the answers depend on.
    """

    model: str
    dataset: str
    metric: str
    curves: tuple[Curve, ...]
    expected: Mapping[str, Any] | None
    references: Mapping[str, Any] | None
    questions_to_see: Mapping[str, int]
    predictions: pa.Table
    refused: pa.Table
    counts: Mapping[str, int]
    cost: float | None
    fingerprint: str

    def __repr__(self) -> str:
        return f"<Evaluation of {self.model} on {self.dataset}: mean {self.curve.mean:.3f}. {self.verdict}>"

    @property
    def curve(self) -> Curve:
        """Accuracy by slot, at the prompt length of training."""
        return self.curves[0]

    @property
    def verdict(self) -> str:
        """What the curve says about the effect of position, in one line."""
        return describe_curve(self.curve)

    def plot(self) -> Picture:
        """Accuracy by position, with 95 % intervals, and the reference accuracies if they were evaluated."""
        references = {self.model: self.references} if self.references else {}
        return Picture(to_png(curve_chart({self.model: self.curve}, references=references)))

    def to_pandas(self) -> "pd.DataFrame":
        """One row for each answer: its example, number of documents, slots (0-based), text, score and tokens."""
        return self.predictions.to_pandas()

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON; without the answers."""
        return {
            "model": self.model,
            "dataset": self.dataset,
            "metric": self.metric,
            "verdict": self.verdict,
            "curves": [asdict(curve) for curve in self.curves],
            "expected": None if self.expected is None else dict(self.expected),
            "references": None if self.references is None else dict(self.references),
            "questions_to_see": dict(self.questions_to_see),
            "counts": dict(self.counts),
            "cost": self.cost,
            "fingerprint": self.fingerprint,
        }


def to_evaluation(
    study: Study,
    model: str,
    predictions: pa.Table,
    refused: pa.Table,
    counts: Mapping[str, int],
    prices: EndpointSection,
    fingerprint: str,
) -> Evaluation:
    """The evaluation of a model from its predictions.

    Args:
        study: names the data set and its metric, and sets the bootstrap.
        model: the model's name for people.
        prices: settings with the prices of tokens.
    """
    settings = study.evaluation
    grids = [to_grid(predictions, documents) for documents in study.prompt_lengths]
    # The same bootstrap as in the report, so that both show equal intervals.
    curves = [to_curve(grid, bootstrap_samples=settings.bootstrap_samples, seed=settings.seed) for grid in grids]
    ranks = settings.retriever_ranks
    return Evaluation(
        model=model,
        dataset=dataset_name(study.data),
        metric=describe_metric(study),
        curves=tuple(curves),
        expected=summarize_expected(grids[0], ranks) if ranks else None,
        references=summarize_references(predictions, study),
        questions_to_see=questions_to_see_positions(grids[0]),
        predictions=predictions,
        refused=refused,
        counts=counts,
        cost=_cost(counts, prices),
        fingerprint=fingerprint,
    )


def _cost(counts: Mapping[str, int], prices: EndpointSection) -> float | None:
    if prices.price_input is None or prices.price_output is None:
        return None
    # A server may not report them.
    if "prompt_tokens" not in counts or "answer_tokens" not in counts:
        return None
    total = counts["prompt_tokens"] * prices.price_input + counts["answer_tokens"] * prices.price_output
    return total / 1_000_000
