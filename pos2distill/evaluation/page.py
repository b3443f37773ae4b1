"""What the pages of studies and of evaluations share: templates, the charts' library, curves, and their files."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pos2distill.evaluation.charts import VEGA_LITE, Spec, curve_chart, theme, to_png
from pos2distill.evaluation.count_warnings import count_warnings
from pos2distill.evaluation.formatting import (
    code_span,
    format_estimate,
    format_gap,
    format_interval,
    format_value,
    to_csv,
)
from pos2distill.evaluation.questions import EvaluatedTask, encode_questions
from pos2distill.evaluation.references import REFERENCES
from pos2distill.evaluation.scores import Curve, format_slots

# Only HTML is escaped; the model card is Markdown. With StrictUndefined a misspelled name in a template is an error.
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["format_slots"] = format_slots
TEMPLATES.filters["count_warnings"] = count_warnings
TEMPLATES.filters["format_interval"] = format_interval
TEMPLATES.filters["format_value"] = format_value
TEMPLATES.filters["code_span"] = code_span
TEMPLATES.globals |= {"format_estimate": format_estimate, "format_gap": format_gap, "reference_names": REFERENCES}

# The filters of the browser of questions, whose conditions are in page.js.j2: for one model, and for two.
_WRONG_ELSEWHERE = "wrong, but correct at another position"
_CUT = "cut at the length limit"
_OUTCOMES_OF_ONE = {"wrong": "wrong", "elsewhere": _WRONG_ELSEWHERE, "cut": _CUT}
_OUTCOMES_OF_TWO = {
    "flipped": "flipped (gained or lost)",
    "gained": "gained: wrong before, correct after",
    "lost": "lost: correct before, wrong after",
    "wrong": "wrong after",
    "elsewhere": f"after: {_WRONG_ELSEWHERE}",
    "cut": _CUT,
}


@dataclass(frozen=True, slots=True)
class RunDescription:
    """What every page shows of what was run, besides its results.

    Attributes:
        counts, seconds: the counts and the duration of each stage, by its name.
        peak_memory_gib: of each stage that trained, that of the worker which needed most.
        settings: all settings.
        changed_settings: those that differ from their defaults, by dotted name.
        command, made_with, versions: how, where and with which packages the checkpoint was made; without a checkpoint,
            the answers.
        prompt_lengths: tokens of prompts by number of documents, and of the model's context, as the stage `evaluate`
            records them.
        search: what the stage `search scales` recorded, its details and counts; None without it.
    """

    name: str
    description: str
    counts: Mapping[str, Mapping[str, int]]
    seconds: Mapping[str, float]
    peak_memory_gib: Mapping[str, float]
    settings: Mapping[str, Any]
    changed_settings: Mapping[str, Any]
    command: str
    made_with: Mapping[str, str]
    versions: Mapping[str, str]
    fingerprint: str
    prompt_lengths: Mapping[str, Any]
    search: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ShownCurves:
    """The curves of one prompt length of one task, of which a page shows one at a time.

    Attributes:
        label: the text in the page's selection.
        curves: the curve of each model, by its name.
        picture: the name of the chart's file; empty for none.
        task, view: the indices of the questions and answers in the data of `encode_questions`.
        task_name: empty for the main task.
        advantageous: the slot to mark.
        references: as in `curve_chart`.
    """

    label: str
    curves: Mapping[str, Curve]
    picture: str
    task: int
    view: int
    task_name: str = ""
    advantageous: int | None = None
    references: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def render_page(
    template: str,
    run: RunDescription,
    report: Any,
    *,
    verdict: str,
    shown: Sequence[ShownCurves],
    models: Sequence[str],
    tasks: Sequence[EvaluatedTask],
    charts: Mapping[str, Spec],
    **values: Any,
) -> dict[str, bytes]:
    """The files of a page by name: `index.html`, `curves.csv`, and the charts as PNG.

    Args:
        template: a template that extends page.html.j2.
        run, report: what it shows.
        models: names of the answers' columns; one name may be empty.
        charts: further charts, by name.
        values: further variables of the template.
    """
    curves = [_to_page_curve(each) for each in shown]
    html = TEMPLATES.get_template(template).render(
        run=run,
        report=report,
        verdict=verdict,
        curves=curves,
        models=models,
        outcomes=_OUTCOMES_OF_ONE if len(models) == 1 else _OUTCOMES_OF_TWO,
        charts=charts,
        themes=themes(),
        questions=encode_questions(tasks),
        chart_library=chart_library(),
        **values,
    )
    pictures = {each.picture: curve["spec"] for each, curve in zip(shown, curves, strict=True) if each.picture}
    pictures |= {f"{name}.png": spec for name, spec in charts.items()}
    files = {name: to_png(spec) for name, spec in pictures.items()}
    return {"index.html": html.encode(), "curves.csv": _curves_csv(shown), **files}


def _to_page_curve(shown: ShownCurves) -> dict[str, Any]:
    spec = curve_chart(shown.curves, advantageous=shown.advantageous, references=shown.references)
    first = next(iter(shown.curves.values()))
    # Only bars can be filtered by group.
    groups = list(first.by_group) if "params" in spec else []
    return {"label": shown.label, "spec": spec, "groups": groups, "task": shown.task, "view": shown.view}


def _curves_csv(shown: Sequence[ShownCurves]) -> bytes:
    """Every point of every curve, one line for each."""
    rows = []
    for each in shown:
        for model, curve in each.curves.items():
            for slot, group, accuracy, interval in zip(
                curve.slots, curve.groups, curve.accuracy_by_slot, curve.accuracy_ci95, strict=True
            ):
                labels = [each.task_name, curve.documents, model, format_slots(slot), group]
                rows.append([*labels, accuracy, *interval, curve.examples])
    header = ["task", "documents", "model", "position", "group", "accuracy", "low", "high", "questions"]
    return to_csv(header, rows)


def themes() -> dict[str, Spec]:
    """The configurations of charts, of which a page chooses by the reader's preference."""
    return {"light": theme(), "dark": theme(dark=True)}


@functools.cache
def chart_library() -> Markup:
    """The JavaScript of Vega-Embed, Vega-Lite and Vega (BSD-3-Clause), to be a part of a page."""
    # Imported where used: it starts a JavaScript engine, which takes seconds.
    import vl_convert

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    return Markup(bundle)  # vl-convert's own code, which contains no "</script"
