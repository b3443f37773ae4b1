"""Accuracy without an effect of position: without documents (closed-book), and with the gold documents alone.

Their difference is what reading documents can add. A model without position bias that other documents do not distract
would reach the accuracy with the gold documents alone at every position.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config import Study
from pos2distill.evaluation.statistics import accuracy_interval, difference_interval
from pos2distill.records import Floats

REFERENCES = {"closed_book": "without documents", "gold_alone": "gold documents alone"}
"""The two kinds of prompts: their keys in results, and their descriptions for people."""


def summarize_references(predictions: pa.Table, study: Study) -> dict[str, Any] | None:
    """Accuracy on both kinds of prompts with its 95 % interval, as plain values for JSON.

    Args:
        predictions: a table of `PREDICTION_SCHEMA`.
    Returns: by name of `REFERENCES`: `accuracy`, `ci95`, and `cut`, the fraction of answers that reached the length
        limit. None unless `evaluation.reference_prompts`.
    """
    if not study.evaluation.reference_prompts:
        return None
    return {name: _summarize(table) for name, table in _select(predictions, study).items()}


def compare_references(before: pa.Table, after: pa.Table, study: Study) -> dict[str, Any] | None:
    """The same of two models, `base` and `distilled`, with the paired difference.

    Returns: by name of `REFERENCES`: `base` and `distilled` as in `summarize_references`, and `paired`, with
        `mean_difference` and `ci95`. None unless `evaluation.reference_prompts`.
    """
    if not study.evaluation.reference_prompts:
        return None
    compared = {}
    both = _select(before, study), _select(after, study)
    for name in REFERENCES:
        base, distilled = both[0][name], both[1][name]
        difference_E = _correct(distilled) - _correct(base)
        paired = {"mean_difference": float(difference_E.mean()), "ci95": difference_interval(difference_E)}
        compared[name] = {"base": _summarize(base), "distilled": _summarize(distilled), "paired": paired}
    return compared


def _select(predictions: pa.Table, study: Study) -> dict[str, pa.Table]:
    """The answers to each kind of prompt, sorted by example."""
    documents = pc.field("documents")
    # Every other prompt has more documents than gold ones.
    chosen = {"closed_book": documents == 0, "gold_alone": (documents > 0) & (documents <= max(study.data.hops))}
    return {name: predictions.filter(chosen[name]).sort_by("example_id") for name in REFERENCES}


def _summarize(answers: pa.Table) -> dict[str, Any]:
    correct_E = _correct(answers)
    cut_E = np.asarray(pc.equal(answers["finish_reason"], "length"))
    return {"accuracy": float(correct_E.mean()), "ci95": accuracy_interval(correct_E), "cut": float(cut_E.mean())}


def _correct(answers: pa.Table) -> Floats:
    """(E,) 1 where the answer is correct, else 0."""
    correct_E: Floats = answers["correct"].to_numpy(zero_copy_only=False).astype(float)
    return correct_E
