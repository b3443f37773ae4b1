"""The report: one self-contained HTML page, `summary.json`, the pictures, and the checkpoint's model card."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from pos2distill.config import Study
from pos2distill.evaluation.plots import plot_curves, plot_loss, plot_weights
from pos2distill.evaluation.scores import Curve, format_slots, paired_difference, to_curve, to_grid, truncation_warning
from pos2distill.records import Slots
from pos2distill.tasks.datasets import dataset_name

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["slots"] = format_slots
TEMPLATES.filters["cuts"] = truncation_warning
METRICS = {
    "sub_em": "sub-EM of the first line, SQuAD normalisation, greedy",
    "em": "EM of what follows 'The answer is:', SQuAD normalisation, greedy",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The base model and the distilled one on the same prompts of one length."""

    dataset: str
    metric: str
    before: Curve
    after: Curve
    paired: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """All that a report tells. `main` has the length trained on; `others` further lengths; `transfers` other tasks.

    choice: how the advantageous slots were measured, if they were.
    """

    name: str
    description: str
    method: str
    advantageous: Slots
    choice: Mapping[str, Any] | None
    main: Comparison
    others: Sequence[Comparison]
    transfers: Mapping[str, Comparison]
    steps: Sequence[Mapping[str, Any]]
    counts: Mapping[str, Mapping[str, int]]
    seconds: Mapping[str, float]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    checkpoint: str
    fingerprint: str


def compare(before: Any, after: Any, documents: int, study: Study) -> Comparison:
    """Compare two tables of `PREDICTION_SCHEMA` at one prompt length.

    Args:
        study: whose data and evaluation these are.
    """
    bootstrap_samples, seed = study.evaluation.bootstrap_samples, study.seed
    one, other = to_grid(before, documents), to_grid(after, documents)
    return Comparison(
        dataset=dataset_name(study.data),
        metric=METRICS[study.data.metric],
        before=to_curve(one, bootstrap_samples=bootstrap_samples, seed=seed),
        after=to_curve(other, bootstrap_samples=bootstrap_samples, seed=seed),
        paired=paired_difference(one, other, bootstrap_samples=bootstrap_samples, seed=seed),
    )


def build_summary(inputs: ReportInputs) -> dict[str, Any]:
    """What programs read: curves, paired difference, counts, seconds."""
    return {
        "name": inputs.name,
        "method": inputs.method,
        "advantageous_slots": inputs.advantageous,
        "choice": inputs.choice,
        **summarise(inputs.main),
        "other_documents": {str(other.before.documents): summarise(other) for other in inputs.others},
        "transfers": {name: summarise(each) for name, each in inputs.transfers.items()},
        "counts": inputs.counts,
        "seconds": inputs.seconds,
        "checkpoint": inputs.checkpoint,
        "fingerprint": inputs.fingerprint,
    }


def render_report(inputs: ReportInputs) -> dict[str, bytes]:
    """The report's files by name: `index.html` with its pictures inside, and the pictures."""
    one_hop = len(inputs.advantageous) == 1
    before, after = inputs.main.before, inputs.main.after
    pictures = {
        "accuracy.png": plot_curves(before, after, advantageous=inputs.advantageous[0] if one_hop else None),
        "loss.png": plot_loss(inputs.steps),
    }
    if one_hop:
        pictures["weights.png"] = plot_weights(inputs.steps, before.documents)
    for other in inputs.others:
        pictures[f"accuracy-{other.before.documents}-documents.png"] = plot_curves(other.before, other.after, width=5)
    embedded = {name: to_data_uri(png) for name, png in pictures.items()}
    html = TEMPLATES.get_template("report.html.j2").render(report=inputs, pictures=embedded)
    return {"index.html": html.encode(), **pictures}


def to_data_uri(png: bytes) -> str:
    """A picture as it stands inside a page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def render_model_card(inputs: ReportInputs) -> str:
    """The checkpoint's README.md: where it comes from and its measured curve."""
    return TEMPLATES.get_template("model_card.md.j2").render(report=inputs)


def summarise(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain values."""
    named = {"dataset": comparison.dataset, "metric": comparison.metric}
    return named | {
        "base": asdict(comparison.before),
        "distilled": asdict(comparison.after),
        "paired": comparison.paired,
    }
