"""The rows of answers: every question at every position."""

from collections.abc import Iterator, Mapping
from typing import Any

from pos2distill.config import Study
from pos2distill.config.restrict import restrict
from pos2distill.errors import UserError
from pos2distill.evaluation.attribution import Attribution
from pos2distill.evaluation.questions import document_order, golds_first
from pos2distill.evaluation.scores import format_slots
from pos2distill.records import PREDICTION_SCHEMA, Slots, example_from_row
from pos2distill.store.artifacts import Artifact

from ...artifact_names import BASE_SCORES
from ...stages.evaluate import declared_settings, eval_specs
from ...stages.predictions import read_predictions, read_refused
from ...stages.prepare import EVALUATION_FILE, read_locations, read_prepared
from ...stages.stage import Input
from ..artifact_lookup import input_artifact, list_artifacts, provenance_of, study_of
from .question import InspectedQuestion, PromptParts, QuestionValues

_PromptVariant = tuple[int, int, int]
"""One prompt of a question: the number of documents, the placement and the order of the distractors."""
_Answer = Mapping[str, Any]


def iter_answers(artifact: Artifact, study: Study, models: Mapping[str, Artifact]) -> Iterator[InspectedQuestion]:
    """Every question at every position, with the answers of the base model and, if there is one, the distilled one.

    Args:
        models: what `find_models` returns.
    """
    examples = input_artifact(artifact, "examples")
    answers = {model: _by_variant(scores) for model, scores in models.items()}
    locations = read_locations(examples)
    slots_of_ranks = _slots_of_ranks(artifact, study)
    for record in read_prepared(examples, EVALUATION_FILE).to_pylist():
        example = example_from_row(record)
        attribution = Attribution(example.question, study.data.metric, golds_first(example))
        of_example = {model: by_example.get(example.example_id, {}) for model, by_example in answers.items()}
        first_model = next(iter(of_example.values()))
        # The prompt length of training first.
        for variant in sorted(first_model, key=lambda variant: (variant[0] != study.data.documents, variant)):
            first_answer = first_model[variant]
            documents, slots = first_answer["documents"], tuple(first_answer["slots"])
            prompt = PromptParts(example, documents, slots, first_answer["order"], slots_of_ranks.get(documents, ()))
            values: QuestionValues = {
                "example_id": example.example_id,
                "location": locations.get(example.example_id, ""),
                "question": example.question,
                "answers": list(example.answers),
                "documents": documents,
                "position": format_slots(slots),
                "slots": list(slots),
                "placement": first_answer["placement"],
                "order": first_answer["order"],
                "prompt_tokens": first_answer.get("prompt_tokens"),
            }
            for model, by_variant in of_example.items():
                answer = by_variant.get(variant)
                if answer is not None and "error" in answer:
                    values["error"] = answer["error"]
                elif answer is not None:
                    values[model] = _answer_values(answer, prompt, attribution)
            values["outcomes"] = _outcomes(values)
            yield InspectedQuestion(values, prompt)


def find_models(artifact: Artifact) -> dict[str, Artifact]:
    """The answers of the base model and of the distilled one, `before` and `after`, as far as there are any."""
    if artifact.name == BASE_SCORES:
        return {"before": artifact}
    for base in list_artifacts(artifact.storage, [BASE_SCORES], provenance_of(artifact).task):
        if _is_base_of(base, artifact):
            return {"before": base, "after": artifact}
    return {"after": artifact}


def _is_base_of(base: Artifact, distilled: Artifact) -> bool:
    """Whether answers are those of a distilled model's base model, to the same prompts.

    A storage may also hold answers of other models, and to other prompts.
    """
    if not _asks_the_same(base, distilled):
        return False
    one, other = (provenance_of(each).model_digest for each in (base, distilled))
    before, after = (_prompt_settings(study_of(each)) for each in (base, distilled))
    if not one or not other:  # a record of an earlier version, which knows the model by its path alone
        return before == after
    # Without the path, since the model may have been moved in between.
    return one == other and _without_location(before) == _without_location(after)


def _asks_the_same(one: Artifact, other: Artifact) -> bool:
    """Whether two evaluations are of the same questions and documents: studies that train on others share them."""
    examples = [input_artifact(each, "examples") for each in (one, other)]
    if examples[0].path == examples[1].path:
        return True
    try:
        tables = [read_prepared(each, EVALUATION_FILE) for each in examples]
    except UserError:  # one was deleted
        return False
    return bool(tables[0].equals(tables[1]))


def _prompt_settings(study: Study) -> Study:
    """The settings that decide the model, before it is distilled, and its prompts.

    An evaluation itself declares no inference method that acts by scales, since these are an input of its stage.
    """
    return restrict(study, [*declared_settings(study), "inference"])


def _without_location(study: Study) -> Study:
    """The same settings without where the model is, which its digest stands for."""
    return study.replace(model=study.model.model_copy(update={"path": "", "revision": None}))


def _by_variant(artifact: Artifact) -> dict[str, dict[_PromptVariant, _Answer]]:
    """Predictions and refusals by example, then by the variant of its prompt."""
    found: dict[str, dict[_PromptVariant, _Answer]] = {}
    columns = [name for name in PREDICTION_SCHEMA.names if name != "sampled_ids"]  # the largest, and not shown
    for row in read_predictions(artifact, columns).to_pylist() + read_refused(artifact).to_pylist():
        found.setdefault(row["example_id"], {})[row["documents"], row["placement"], row["order"]] = row
    return found


def _slots_of_ranks(artifact: Artifact, study: Study) -> dict[Any, Slots]:
    """Where documents are reordered, the slot of each rank, by the number of documents of a prompt."""
    curve = None
    if "curve" in provenance_of(artifact).inputs:
        curve = Input(input_artifact(artifact, "curve"), "")  # its fingerprint is not read
    # Prompts with the gold documents alone, or with none, are not reordered.
    return {spec.documents: spec.slot_of_rank for spec in eval_specs(study, curve)}


def _answer_values(answer: _Answer, prompt: PromptParts, attribution: Attribution) -> QuestionValues:
    """What is shown of one model's answer. found_in_documents: positions of those that hold a wrong answer's words."""
    values: QuestionValues = {
        "text": answer["text"],
        "correct": answer["correct"],
        "cut": answer["finish_reason"] == "length",
    }
    # `document_order` knows the data set's order of the distractors alone.
    if not answer["correct"] and prompt.order == 0:
        order = document_order(prompt.documents, prompt.slots, prompt.slot_of_rank)
        positions = [order.index(index) + 1 for index in attribution(answer["text"]) if index in order]
        values["found_in_documents"] = sorted(positions)
    return values


def _outcomes(values: QuestionValues) -> list[str]:
    """What became of the answer: correct or wrong of the last model, and the change if there are two.

    Or `refused`, of a prompt that a server refused.
    """
    if "error" in values:
        return ["refused"]
    last = values["after"] if "after" in values else values["before"]
    outcomes = ["correct" if last["correct"] else "wrong"]
    if "before" in values and "after" in values and values["before"]["correct"] != values["after"]["correct"]:
        outcomes += ["gained" if values["after"]["correct"] else "lost", "flipped"]
    if any(values[name]["cut"] for name in ("before", "after") if name in values):
        outcomes.append("cut")
    return outcomes
