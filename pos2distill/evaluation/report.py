"""The report: one self-contained HTML page, `summary.json`, the plots as PNG, and the checkpoint's model card."""

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

# Only HTML is escaped; the model card is Markdown. With StrictUndefined a misspelt name in a template is an error.
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["format_slots"] = format_slots
TEMPLATES.filters["truncation_warning"] = truncation_warning
METRICS = {
    "sub_em": "sub-EM of the first line, SQuAD normalisation, greedy",
    "em": "EM of the text after 'The answer is:', SQuAD normalisation, greedy",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Scores of the base model and of the distilled one on the same prompts of one length."""

    dataset: str
    metric: str
    before: Curve
    after: Curve
    paired: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """Everything that the report shows.

    main: at the prompt length of the training data; others: at further lengths; other_tasks: on other tasks, by name.
    advantageous: the slots; none if each example has its own. choice: their accuracy and interval if they were chosen
    by measurement.
    steps: the training log. counts, seconds: by stage.
    """

    name: str
    description: str
    method: str
    advantageous: Slots
    choice: Mapping[str, Any] | None
    main: Comparison
    others: Sequence[Comparison]
    other_tasks: Mapping[str, Comparison]
    steps: Sequence[Mapping[str, Any]]
    counts: Mapping[str, Mapping[str, int]]
    seconds: Mapping[str, float]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    checkpoint: str
    fingerprint: str


def compare(before: Any, after: Any, documents: int, study: Study) -> Comparison:
    """Compare the predictions of two models at one prompt length.

    Args:
        before: a table of `PREDICTION_SCHEMA`, of the base model; after: of the distilled one.
        documents: the prompt length.
        study: names the data set and its metric, and sets the bootstrap.
    Raises:
        ValueError: as `to_grid` and `paired_difference`.
    """
    # One seed for both models, so that their intervals are computed from the same resamples.
    bootstrap_samples, seed = study.evaluation.bootstrap_samples, study.evaluation.seed
    before_grid = to_grid(before, documents)
    after_grid = to_grid(after, documents)
    return Comparison(
        dataset=dataset_name(study.data),
        metric=METRICS[study.data.metric],
        before=to_curve(before_grid, bootstrap_samples=bootstrap_samples, seed=seed),
        after=to_curve(after_grid, bootstrap_samples=bootstrap_samples, seed=seed),
        paired=paired_difference(before_grid, after_grid, bootstrap_samples=bootstrap_samples, seed=seed),
    )


def build_summary(inputs: ReportInputs) -> dict[str, Any]:
    """Content of `summary.json`: curves, paired differences, counts, seconds."""
    return {
        "name": inputs.name,
        "method": inputs.method,
        "advantageous_slots": inputs.advantageous,
        "choice": inputs.choice,
        **summarise(inputs.main),
        "other_documents": {str(other.before.documents): summarise(other) for other in inputs.others},
        "other_tasks": {name: summarise(transfer) for name, transfer in inputs.other_tasks.items()},
        "counts": inputs.counts,
        "seconds": inputs.seconds,
        "checkpoint": inputs.checkpoint,
        "fingerprint": inputs.fingerprint,
    }


def render_report(inputs: ReportInputs) -> dict[str, bytes]:
    """The report's files by name: `index.html`, which embeds the plots, and the plots."""
    before, after = inputs.main.before, inputs.main.after
    pictures = {"loss.png": plot_loss(inputs.steps)}
    if isinstance(before.slots[0], int):
        is_rank = inputs.settings["inference"]["method"] == "reorder"
        marked = inputs.advantageous[0] if inputs.advantageous and not is_rank else None
        pictures["accuracy.png"] = plot_curves(before, after, advantageous=marked)
        pictures["weights.png"] = plot_weights(inputs.steps, before.documents)
    else:
        # A placement of several documents has no single position to mark, or to sum weights by.
        pictures["accuracy.png"] = plot_curves(before, after)
    for other in inputs.others:
        pictures[f"accuracy-{other.before.documents}-documents.png"] = plot_curves(other.before, other.after, width=5)
    embedded = {name: to_data_uri(png) for name, png in pictures.items()}
    html = TEMPLATES.get_template("report.html.j2").render(report=inputs, pictures=embedded)
    return {"index.html": html.encode(), **pictures}


def to_data_uri(png: bytes) -> str:
    """A PNG as the `src` of an `<img>`, so that the page needs no other file."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def render_model_card(inputs: ReportInputs) -> str:
    """The checkpoint's README.md: its base model, its method and its measured curve."""
    return TEMPLATES.get_template("model_card.md.j2").render(report=inputs)


def render_scales_card(model: str, scales: Sequence[float]) -> str:
    """A README.md for the config of a model whose RoPE scales were searched: what it is and how to load it."""
    return TEMPLATES.get_template("scaled_model.md.j2").render(model=model, scales=list(scales))


def summarise(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain values for JSON."""
    return {
        "dataset": comparison.dataset,
        "metric": comparison.metric,
        "base": asdict(comparison.before),
        "distilled": asdict(comparison.after),
        "paired": comparison.paired,
    }
