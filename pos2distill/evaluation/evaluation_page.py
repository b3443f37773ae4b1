"""The page of one model's evaluation: its curve, its verdict, its questions. Two models have a report instead."""

from dataclasses import dataclass

from pos2distill.evaluation.page import RunDescription, ShownCurves, render_page
from pos2distill.evaluation.questions import EvaluatedTask
from pos2distill.evaluation.result import Evaluation
from pos2distill.evaluation.search_charts import search_charts
from pos2distill.literal_paths import last_part


@dataclass(frozen=True, slots=True)
class EvaluationInputs:
    """Everything that the page shows.

    Attributes:
        task: the questions and answers at all prompt lengths, in the order of the evaluation's curves.
    """

    run: RunDescription
    evaluation: Evaluation
    task: EvaluatedTask


def render_evaluation(inputs: EvaluationInputs) -> dict[str, bytes]:
    """The page's files by name: `index.html`, `curves.csv`, and the charts as PNG."""
    # The last part of a path or hub name fits into a legend.
    model = last_part(inputs.evaluation.model)
    shown = []
    for view, curve in enumerate(inputs.evaluation.curves):
        picture = f"accuracy-{curve.documents}-documents.png" if view else "accuracy.png"
        # The same for all prompt lengths, since these prompts have no distractors.
        references = {model: inputs.evaluation.references} if inputs.evaluation.references else {}
        label = f"{curve.documents} documents"
        shown.append(ShownCurves(label, {model: curve}, picture, 0, view, references=references))
    return render_page(
        "evaluation.html.j2",
        inputs.run,
        inputs,
        verdict=inputs.evaluation.verdict,
        shown=shown,
        models=[""],  # the column needs no name, since it is the only one
        tasks=[inputs.task],
        charts=search_charts(inputs.run.search),
    )
