import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from pos2distill.config import AnalysisSection, DataSection, EvaluationSection, ModelSection, Study, TemplateSection
from pos2distill.evaluation.analysis import summarize_analysis
from pos2distill.records import PASSES_SCHEMA, PREDICTION_SCHEMA, Document, Example
from pos2distill.tasks.permutations import arrange

EXAMPLE = Example(
    "e",
    "Which code has the fox?",
    ("40",),
    (Document("Fox", "It is 40.", 0), Document("Owl", "It is 51."), Document("Bear", "It is 62.")),
)


def study(**evaluation: Any) -> Study:
    return Study(
        model=ModelSection(path="m"),
        data=DataSection(format="jsonl", path="d", documents=3),
        evaluation=EvaluationSection(slots=(0, 2), bootstrap_samples=100, **evaluation),
        analysis=AnalysisSection(),
        method={"k": 2},  # type: ignore[arg-type]
    )


def prediction(placement: int, slot: int, text: str, documents: int = 3, order: int = 0) -> dict[str, Any]:
    values = dict.fromkeys(PREDICTION_SCHEMA.names)
    return values | {
        "example_id": "e",
        "documents": documents,
        "placement": placement,
        "order": order,
        "group": "",
        "slots": [slot],
        "text": text,
        "correct": "40" in text,
    }


def predictions(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=PREDICTION_SCHEMA)


def test_summarize_analysis_attributes_wrong_answers_at_the_length_of_training() -> None:
    table = predictions(
        prediction(0, 0, "It is 51."), prediction(1, 2, "It is 40."), prediction(0, 0, "It is 62.", documents=2)
    )
    summary = summarize_analysis(study(), PASSES_SCHEMA.empty_table(), table, {"e": EXAMPLE})
    wrong = summary["wrong_answers"]
    assert (wrong["answers"], wrong["wrong"], wrong["by_slot"]) == (2, 1, [0, 1, 0])
    assert summary["slots"] == [[0], [2]]
    assert summary["token_shift"] == {"skipped": "no answer at the advantageous slot was correct"}
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize("order", [0, 1])
def test_summarize_analysis_knows_the_order_of_the_distractors(order: int) -> None:
    table = predictions(prediction(1, 2, "It is 51.", order=order))
    summary = summarize_analysis(study(distractor_orders=2), PASSES_SCHEMA.empty_table(), table, {"e": EXAMPLE})
    shown = arrange(EXAMPLE, 3, (2,), order=order)
    expected = [0, 0, 0]
    expected[shown.index(EXAMPLE.documents[1])] = 1
    assert summary["wrong_answers"]["by_slot"] == expected


def test_summarize_analysis_means_of_passes_by_hand() -> None:
    """Two examples, one layer, parts: three documents, before, after, response."""
    answer = {0: [0.5, 0.1, 0.1, 0.1, 0.1, 0.1], 2: [0.1, 0.1, 0.3, 0.3, 0.1, 0.1]}
    last = {0: [0.2, 0.2, 0.2, 0.2, 0.2, 0.0], 2: [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]}
    row = {
        "slots": [0],
        "placement_slots": [[0], [2]],
        "kl": [[0.0, 0.0], [0.0, 0.4]],
        "agrees": [[True, True], [True, False]],
        "layers": 1,
        "attention": [answer[0] + last[0], answer[2] + last[2]],
    }
    rows = [dict.fromkeys(PASSES_SCHEMA.names) | row | {"example_id": name} for name in "ef"]
    passes = pa.Table.from_pylist(rows, schema=PASSES_SCHEMA)
    summary = summarize_analysis(study(), passes, predictions(prediction(0, 0, "40")), {"e": EXAMPLE})
    assert summary["token_shift"]["nats_per_token"]["value"] == pytest.approx(0.2)
    attention = summary["attention"]
    assert attention["answer"]["by_document"] == [pytest.approx(answer[0][:3]), pytest.approx(answer[2][:3])]
    assert attention["answer"]["before"] == pytest.approx([0.1, 0.3])
    assert attention["answer"]["response"] == pytest.approx([0.1, 0.1])
    assert [each["value"] for each in attention["answer"]["gold"]] == pytest.approx([0.5, 0.3])
    assert attention["last_prompt_token"]["gold_by_layer"] == [pytest.approx([0.2, 1.0])]


def test_summarize_analysis_judges_the_chain_behind_the_thought() -> None:
    """The thought names a wrong document, the chain the right ones."""
    golds = tuple(replace(EXAMPLE.documents[index], hop=index) for index in (0, 1))
    example = replace(EXAMPLE, documents=(*golds, EXAMPLE.documents[2]))
    chains = study().model_copy(
        update={
            "data": study().data.model_copy(update={"hops": (2,), "metric": "em"}),
            "evaluation": EvaluationSection(slots="pairs"),
        }
    )
    text = "<think>Bear?</think>The fox and the owl say 40. The answer is: 40"
    row = {**prediction(0, 0, text), "slots": [0, 1]}
    summary = summarize_analysis(chains, PASSES_SCHEMA.empty_table(), predictions(row), {"e": example})
    assert summary["thought_shift"]["overall"]["none"]["value"] == 1.0


@pytest.mark.parametrize(
    ("user", "document", "by"),
    [
        ("{documents} {question}", "[{number}] {title}: {text}", "title"),
        ("Cite as [1]. {documents} {question}", "[{number}] {title}: {text}", "number"),
        ("{documents} {question}", "[{number}] {text}", "number"),
        ("{documents} {question}", "{text}", None),
    ],
)
def test_summarize_analysis_recognizes_documents_as_the_template_shows_them(
    user: str, document: str, by: str | None
) -> None:
    template = TemplateSection(user=user, document=document)
    golds = tuple(replace(EXAMPLE.documents[index], hop=index) for index in (0, 1))
    example = replace(EXAMPLE, documents=(*golds, EXAMPLE.documents[2]))
    data = {"hops": (2,), "metric": "em", "template": template, "prompt": "template"}
    chains = study().model_copy(
        update={"data": study().data.model_copy(update=data), "evaluation": EvaluationSection(slots="pairs")}
    )
    text = "The fox [1] and the owl [2] say 40. The answer is: 40"
    row = {**prediction(0, 0, text), "slots": [0, 1]}
    thoughts = summarize_analysis(chains, PASSES_SCHEMA.empty_table(), predictions(row), {"e": example})[
        "thought_shift"
    ]
    if by is None:
        assert thoughts == {
            "skipped": "documents cannot be named in a chain: data.template shows neither their numbers nor titles"
        }
    else:
        assert (thoughts["documents_named_by"], thoughts["overall"]["none"]["value"]) == (by, 1.0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "questions of one hop are answered without a chain (data.hops)"),
        ({"hops": (2,)}, "answers are not chains of thought with a conclusion (data.metric is not em)"),
    ],
)
def test_summarize_analysis_says_why_there_is_no_thought_shift(data: dict[str, Any], reason: str) -> None:
    changed = study()
    changed = changed.model_copy(
        update={"data": changed.data.model_copy(update=data), "evaluation": EvaluationSection(slots=2)}
    )
    table = predictions(prediction(0, 0, "40"))
    summary = summarize_analysis(changed, PASSES_SCHEMA.empty_table(), table, {"e": EXAMPLE})
    assert summary["thought_shift"] == {"skipped": reason}
