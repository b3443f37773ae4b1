"""What a report shows, without a study that was run."""

import itertools
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pos2distill.config import DataSection, EndpointSection, EvaluationSection, ModelSection, Study
from pos2distill.evaluation.evaluation_page import EvaluationInputs
from pos2distill.evaluation.page import RunDescription
from pos2distill.evaluation.questions import EvaluatedPrompts, EvaluatedTask
from pos2distill.evaluation.report import Comparison, ReportInputs, compare
from pos2distill.evaluation.result import to_evaluation
from pos2distill.records import REFUSAL_SCHEMA
from tests.support.predictions import make_examples, predictions
from tests.support.tables import examples_to_table

STUDY = Study(
    model=ModelSection(path="m"),
    data=DataSection(format="jsonl", path="d"),
    evaluation=EvaluationSection(bootstrap_samples=100),
)


def pair_predictions(correct: int) -> pa.Table:
    """One example at every ordered pair of three slots."""
    pairs = list(itertools.permutations((0, 1, 2), 2))
    return predictions(3, [[number < correct for number in range(6)]], slots=pairs)


def report_inputs() -> ReportInputs:
    """A small study: 3 and 5 documents, and another task of two hops. Its description contains HTML."""
    pairs = compare(pair_predictions(3), pair_predictions(6), 3, STUDY)
    # Accuracies before: 1, 1/2, 0; after: 1, 1, 1/2.
    before, after = [[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 0]]
    longer = [[1, 0], [1, 0]], [[1, 0], [0, 0]]
    step = {"loss": 0.5, "loss_trivial": 0.4, "loss_anchor": None, "weight_by_slot": {"1": 0.6, "2": 0.4}}
    return ReportInputs(
        run=RunDescription(
            name="tiny",
            description="A run <script>alert('x')</script> & more",
            counts={"examples": {"rows": 9, "train_unused": 2}},
            seconds={"examples": 0.25},
            peak_memory_gib={"distill": 1.25},
            settings={"model": {"path": "base/model", "rope_scales": []}, "inference": {"method": "none"}, "seed": 3},
            changed_settings={"training.epochs": 7},
            command="python run.py study tiny 'name=<b>'",
            made_with={"git revision": "abc1234"},
            versions={"torch": "2.13.0"},
            fingerprint="0123456789abcdef",
            prompt_lengths={"prompt_tokens": {"3": {"mean": 80.0, "max": 91}}, "context_tokens": 400},
        ),
        method="r1",
        advantageous=(0,),
        choice=None,
        main=compare(predictions(3, before), predictions(3, after), 3, STUDY),
        others=[compare(predictions(5, longer[0]), predictions(5, longer[1]), 5, STUDY)],
        other_tasks={"chains": pairs},
        tasks=[
            EvaluatedTask(
                "sub_em",
                "plain",
                examples_to_table(make_examples(2, 5)),
                {"e0": "d.jsonl, line 1"},
                [
                    EvaluatedPrompts("3 documents", 3, [predictions(3, before), predictions(3, after)]),
                    EvaluatedPrompts("5 documents", 5, [predictions(5, longer[0]), predictions(5, longer[1])]),
                ],
            ),
            EvaluatedTask(
                "em",
                "reasoning",
                examples_to_table(make_examples(1, 3, hops=2)),
                {},
                [EvaluatedPrompts("3 documents", 3, [pair_predictions(3), pair_predictions(6)])],
            ),
        ],
        steps=[{**step, "step": number} for number in range(3)],
        checkpoint="storage/checkpoint-abcd/model",
        base_model="base/model",
        license="apache-2.0",
        results_digest="fedcba9876543210",
        artifacts={"base": "base-scores-a", "distilled": "distilled-scores-b"},
    )


def with_gaps(comparison: Comparison) -> Comparison:
    """The same with a GAP of .35 [.25, .45], corrected .33, before, and of .1 [1e-6, .2], corrected -.01, after."""
    before = replace(comparison.before, gap=0.35, gap_ci95=(0.25, 0.45), gap_corrected=0.33)
    after = replace(comparison.after, gap=0.1, gap_ci95=(1e-6, 0.2), gap_corrected=-0.01)
    return replace(comparison, before=before, after=after)


def with_evaluation(study: Study, **settings: Any) -> Study:
    """The study with other settings of its evaluation."""
    return study.model_copy(update={"evaluation": study.evaluation.model_copy(update=settings)})


def evaluation_inputs(task: EvaluatedTask, *ranks: float) -> EvaluationInputs:
    """The evaluation of one model on 3 documents, whose answers are the first ones of the task.

    Args:
        ranks: `evaluation.retriever_ranks`.
    """
    study = STUDY.model_copy(update={"data": STUDY.data.model_copy(update={"documents": 3})})
    study = with_evaluation(study, retriever_ranks=ranks)
    table = task.prompts[0].models[0]
    report = report_inputs()
    return EvaluationInputs(
        run=RunDescription(
            name="tiny-questions",
            description="Accuracy by slot of <b>tiny</b>.",
            counts={"evaluate base": {"prompts": 6, "hit_max_tokens": 0}},
            seconds={"evaluate": 1.5},
            peak_memory_gib={},
            settings=report.run.settings,
            changed_settings=report.run.changed_settings,
            command="python run.py evaluate --model models/tiny",
            made_with=report.run.made_with,
            versions=report.run.versions,
            fingerprint="0123456789abcdef",
            prompt_lengths={"prompt_tokens": {"3": {"mean": None, "max": None}}, "context_tokens": None},
        ),
        evaluation=to_evaluation(
            study,
            "models/tiny",
            table,
            REFUSAL_SCHEMA.empty_table(),
            {"prompts": 6},
            EndpointSection(),
            "0123456789abcdef",
        ),
        task=task,
    )


def scale_search() -> dict[str, Any]:
    """What a search of five generations for a model of four layers recorded."""
    return {
        "candidates": 26,
        "examples": 40,
        "prompts": 3120,
        "scales": [1.5, 1.25, 1.125, 1.0],
        "fitness": 0.348,
        "accuracy": [0.375, 0.3, 0.575],
        "searched_slots": [[0], [1], [2]],
        "unscaled": {"genome": [0.5, 1.0], "accuracy": [0.5, 0.15, 0.45], "fitness": 0.279},
        "best_by_generation": [0.279, 0.298, 0.298, 0.298, 0.348],
    }


def with_search(run: RunDescription) -> RunDescription:
    """The run with this search."""
    settings = {**run.settings, "inference": {"method": "lpes", "search": {"gamma": 0.25}}}
    return replace(run, settings=settings, search=scale_search())


def estimate(value: float) -> dict[str, Any]:
    return {"value": value, "ci95": [max(0.0, value - 0.1), value + 0.1]}


def analysis(shift: float, slots: tuple[tuple[int, ...], ...] = ((0,), (2,))) -> dict[str, Any]:
    """The fields of an analysis of three documents that a page shows: two placements, responses of three tokens.

    shift: the KL at the second placement; 0 at the first.
    """
    concentration = {"top_1": {**estimate(0.6), "even": 0.33}, "top_3": {**estimate(1.0), "even": 1.0}}
    attention = {"gold": [estimate(0.5), estimate(0.3)], "by_document": [[0.5, 0.1, 0.1], [0.2, 0.1, 0.3]]}
    ratios = {"retrieval": 0.4, "reasoning": 0.2, "answer": 0.1, "none": 0.3}
    steps = {step: estimate(value) for step, value in ratios.items()}
    return {
        "documents": 3,
        "slots": [list(golds) for golds in slots],
        "groups": ["", ""],
        "token_shift": {
            "nats_per_token": estimate(shift),
            "recovery": estimate(0.8),
            "concentration": concentration,
            "nats_by_slot": [estimate(0.0), estimate(shift)],
            "recovery_by_slot": [estimate(1.0), estimate(0.8)],
            "nats_by_token": [[0.0, 0.0, 0.0], [2 * shift, shift, 0.0]],
        },
        "attention": {"answer": attention, "last_prompt_token": attention},
        "thought_shift": {"overall": steps, "by_group": {"connected": steps, "reversed": steps}},
        "wrong_answers": {
            "wrong": 6,
            "one_document": 3,
            "gold_document": 1,
            "several_documents": 0,
            "no_document": 2,
            "by_slot": [0, 2, 1],
        },
    }


def analyses() -> dict[str, dict[str, Any]]:
    """Of the base model and of the distilled one."""
    return {"base": analysis(0.4), "distilled": analysis(0.1)}
