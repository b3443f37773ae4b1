"""The report: one self-contained HTML page, `summary.json`, `curves.csv`, pictures, and the checkpoint's model card."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from pos2distill.config import Study
from pos2distill.evaluation.analysis_charts import analysis_charts
from pos2distill.evaluation.charts import AFTER, BEFORE, loss_chart, to_png, weights_chart
from pos2distill.evaluation.page import TEMPLATES, RunDescription, ShownCurves, chart_library, render_page, themes
from pos2distill.evaluation.questions import EvaluatedTask
from pos2distill.evaluation.references import compare_references
from pos2distill.evaluation.scores import Curve, Grid, paired_difference, summarize_expected, to_curve, to_grid
from pos2distill.evaluation.search_charts import search_charts
from pos2distill.evaluation.verdict import describe_change
from pos2distill.literal_paths import last_part
from pos2distill.records import Slots
from pos2distill.tasks.datasets import dataset_name
from pos2distill.tasks.metrics import describe_metric

_PRIVATE = ("model.path", "data.path", "evaluation.also_evaluate")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Scores of the base model and of the distilled one on the same prompts of one length.

    Attributes:
        question_ids: the ids of the evaluated questions.
        expected: each model's accuracy under `evaluation.retriever_ranks` and its interval; None without them.
        references: see `compare_references`. Both are None unless this is the prompt length of training.
    """

    dataset: str
    metric: str
    before: Curve
    after: Curve
    paired: dict[str, Any]
    question_ids: frozenset[str]
    expected: dict[str, Any] | None = None
    references: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """Everything that the report shows.

    Attributes:
        main: the comparison at the prompt length of the training data.
        others: those at further lengths.
        other_tasks: those on other tasks, by name.
        advantageous: the slots; none if each example has its own.
        choice: their accuracy and interval if they were chosen by measurement.
        tasks: the questions and answers of the main task at all prompt lengths, then of the other tasks.
        steps: the training log.
        analyses: content of analysis.json by model, `base` first; empty if the study has none.
        results_digest: of the results that are shown.
        artifacts: the folders of both models' answers, `base` and `distilled`.
        base_model: the base model's name on the hub; None for a folder.
        license: the base model's, as its card names it; None if it names none.
        has_adapter: whether the checkpoint also has its adapters as separate files.
    """

    run: RunDescription
    method: str
    advantageous: Slots
    choice: Mapping[str, Any] | None
    main: Comparison
    others: Sequence[Comparison]
    other_tasks: Mapping[str, Comparison]
    tasks: Sequence[EvaluatedTask]
    steps: Sequence[Mapping[str, Any]]
    checkpoint: str
    base_model: str | None
    license: str | None
    results_digest: str
    artifacts: Mapping[str, str]
    analyses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_adapter: bool = False


def compare(before: pa.Table, after: pa.Table, documents: int, study: Study) -> Comparison:
    """Compare the predictions of two models at one prompt length.

    Args:
        before, after: tables of `PREDICTION_SCHEMA`: the answers of the base model and of the distilled one.
        documents: the prompt length.
        study: names the data set and its metric, and sets the bootstrap.
    Raises:
        ValueError: as in `to_grid` and `paired_difference`.
    """
    # One seed for both models, so that their intervals are computed from the same resamples.
    bootstrap_samples, seed = study.evaluation.bootstrap_samples, study.evaluation.seed
    before_grid = to_grid(before, documents)
    after_grid = to_grid(after, documents)
    # The ranks of a retriever are those among this number of documents.
    is_trained_length = documents == study.data.documents
    return Comparison(
        dataset=dataset_name(study.data),
        metric=describe_metric(study),
        before=to_curve(before_grid, bootstrap_samples=bootstrap_samples, seed=seed),
        after=to_curve(after_grid, bootstrap_samples=bootstrap_samples, seed=seed),
        paired=paired_difference(before_grid, after_grid, bootstrap_samples=bootstrap_samples, seed=seed),
        question_ids=frozenset(before_grid.example_ids),
        expected=_expected(before_grid, after_grid, study.evaluation.retriever_ranks) if is_trained_length else None,
        references=compare_references(before, after, study) if is_trained_length else None,
    )


def _expected(before: Grid, after: Grid, ranks: Sequence[float]) -> dict[str, Any] | None:
    if not ranks:
        return None
    return {"base": summarize_expected(before, ranks), "distilled": summarize_expected(after, ranks)}


def build_summary(inputs: ReportInputs) -> dict[str, Any]:
    """Content of `summary.json`: curves, paired differences, counts, seconds, memory."""
    return {
        "name": inputs.run.name,
        "method": inputs.method,
        "advantageous_slots": inputs.advantageous,
        "choice": inputs.choice,
        "verdict": verdict(inputs.main),
        **summarize(inputs.main),
        "other_documents": {str(other.before.documents): summarize(other) for other in inputs.others},
        "other_tasks": {name: summarize(transfer) for name, transfer in inputs.other_tasks.items()},
        **inputs.run.prompt_lengths,
        "search": inputs.run.search,
        "counts": inputs.run.counts,
        "seconds": inputs.run.seconds,
        "peak_memory_gib": inputs.run.peak_memory_gib,
        "settings": inputs.run.settings,
        "command": inputs.run.command,
        "made_with": inputs.run.made_with,
        "versions": inputs.run.versions,
        "checkpoint": inputs.checkpoint,
        "artifacts": inputs.artifacts,
        "results": inputs.results_digest,
        "fingerprint": inputs.run.fingerprint,
    }


def verdict(comparison: Comparison) -> str:
    """What the comparison says, in words."""
    return describe_change(comparison.before, comparison.after, comparison.paired)


def render_report(inputs: ReportInputs) -> dict[str, bytes]:
    """The report's files by name: `index.html`, `curves.csv`, and the charts as PNG."""
    charts = search_charts(inputs.run.search)
    if inputs.steps:
        charts["loss"] = loss_chart(inputs.steps)
        # A placement of several documents has no single position to sum weights by.
        if isinstance(inputs.main.before.slots[0], int):
            charts["weights"] = weights_chart(inputs.steps, inputs.main.before.documents)
    charts |= analysis_charts(inputs.analyses)
    return render_page(
        "report.html.j2",
        inputs.run,
        inputs,
        verdict=verdict(inputs.main),
        shown=_shown_curves(inputs),
        models=[BEFORE, AFTER],
        tasks=inputs.tasks,
        charts=charts,
        analyses=inputs.analyses,
    )


def render_analysis(name: str, analyses: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """The files of an analysis without a report: `index.html`, and the charts as PNG.

    Args:
        name: name of the recipe.
        analyses: as in `ReportInputs`; not empty.
    """
    charts = analysis_charts(analyses)
    html = TEMPLATES.get_template("analysis_page.html.j2").render(
        name=name, analyses=analyses, charts=charts, themes=themes(), chart_library=chart_library()
    )
    return {"index.html": html.encode(), **{f"{chart}.png": to_png(spec) for chart, spec in charts.items()}}


def _shown_curves(inputs: ReportInputs) -> list[ShownCurves]:
    """The curves that the page can show, in their order: prompt lengths of the main task, then other tasks."""
    is_rank = inputs.run.settings["inference"]["method"] == "reorder"
    marked = inputs.advantageous[0] if inputs.advantageous and not is_rank else None
    documents = inputs.main.before.documents
    label, references = f"{documents} documents (as trained)", _references(inputs.main)
    shown = [ShownCurves(label, _curves(inputs.main), "accuracy.png", 0, 0, advantageous=marked, references=references)]
    for view, other in enumerate(inputs.others, start=1):
        label = f"{other.before.documents} documents"
        picture = f"accuracy-{other.before.documents}-documents.png"
        # The same for all prompt lengths, since these prompts have no distractors.
        shown.append(ShownCurves(label, _curves(other), picture, 0, view, references=references))
    for task, (name, other) in enumerate(inputs.other_tasks.items(), start=1):
        label = f"{name}, {other.before.documents} documents"
        own = _references(other)
        shown.append(ShownCurves(label, _curves(other), "", task, 0, task_name=name, references=own))
    return shown


def _curves(comparison: Comparison) -> dict[str, Curve]:
    return {BEFORE: comparison.before, AFTER: comparison.after}


def _references(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """The reference prompts' results by model, as a chart shows them; empty if they were not evaluated."""
    by_model: dict[str, dict[str, Any]] = {}
    for name, compared in (comparison.references or {}).items():
        by_model.setdefault(BEFORE, {})[name] = compared["base"]
        by_model.setdefault(AFTER, {})[name] = compared["distilled"]
    return by_model


def render_model_card(inputs: ReportInputs) -> str:
    """The checkpoint's README.md: its base model, its method and its measured curve."""
    # A card is published, so it must not show a path or URL of the machine that made it.
    settings = {name: value for name, value in inputs.run.changed_settings.items() if name not in _PRIVATE}
    base = inputs.base_model or last_part(str(inputs.run.settings["model"]["path"]))
    return TEMPLATES.get_template("model_card.md.j2").render(
        run=inputs.run, report=inputs, verdict=verdict(inputs.main), base=base, settings=settings
    )


def summarize(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain values for JSON."""
    return {
        "dataset": comparison.dataset,
        "metric": comparison.metric,
        "base": asdict(comparison.before),
        "distilled": asdict(comparison.after),
        "paired": comparison.paired,
        "expected": comparison.expected,
        "references": comparison.references,
    }
