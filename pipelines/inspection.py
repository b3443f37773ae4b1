"""Single questions of a run: the prompt that was asked, what was answered, and what became of the answer."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from pos2distill.config import Study
from pos2distill.config.fields import validate_evaluated
from pos2distill.errors import UserError, did_you_mean_one
from pos2distill.evaluation.attribution import Attribution
from pos2distill.evaluation.questions import document_order, golds_first
from pos2distill.evaluation.scores import format_slots, position_order
from pos2distill.records import Example, example_from_row, sample_ids
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore, StoreIndex
from pos2distill.tasks.permutations import order_of_prompt
from pos2distill.tasks.prompts import MessageBuilder, PromptBuilder, joined_text

from .artifact_names import BASE_SCORES, DISTILLED_SCORES, SAMPLES
from .provenance import corrupt_provenance
from .results import input_artifact, list_artifacts, open_artifact, provenance_of
from .stages.answers import PREDICTIONS, read_refused
from .stages.evaluate import eval_specs
from .stages.prepare import EVALUATION, TRAIN, read_locations, training_ids
from .stages.stage import Input

SCORES = (DISTILLED_SCORES, BASE_SCORES)
_CHANGES = ("gained", "lost", "flipped")
_ANSWER_OUTCOMES = ("right", "wrong", *_CHANGES, "cut", "refused")
_SAMPLE_OUTCOMES = ("kept", "wrong", "empty", "failed", "cut")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which questions to show.

    example: an id, or text in the id or the question. position: of the gold documents, as shown, such as `3` or `1>5`.
    outcome: as of `_outcomes`, or of a sample. limit: how many at most; None: all.
    """

    example: str | None = None
    position: str | None = None
    outcome: str | None = None
    limit: int | None = 5

    def accepts(self, row: Row) -> bool:
        """Whether a question is shown."""
        words = f"{row['example_id']}\n{row['location']}\n{row['question']}".lower()
        return (
            (self.example is None or self.example.lower() in words)
            and (self.position is None or self.position == row["position"])
            and (self.outcome is None or self.outcome in row["outcomes"])
        )


def inspect(
    run: str,
    selection: Selection,
    *,
    samples: bool,
    prompts: bool,
    entropy: bool = False,
    task: str | None = None,
) -> Iterator[Row]:
    """The selected questions of a run, in the order of its examples.

    Args:
        run: a storage, or the path of an artifact with answers or samples.
        samples: of a storage, its samples, not its answers; also those of a run that did not finish them.
        prompts: with the text of each prompt.
        entropy: of kept samples, with the teacher's entropy at each token. task: of a storage, one of
            `evaluation.also_evaluate`. Default: the main task.
    Raises:
        UserError: if the run has no answers or samples, or none at this position, or its samples no teacher states
            although `entropy` needs them.
    """
    # Samples before answers, or the other way round.
    artifact = open_artifact(run, [[SAMPLES], SCORES] if samples else [SCORES, [SAMPLES]], task, unfinished=True)
    study = study_of(artifact)
    method = study.inference.method
    is_finished = artifact.is_finished
    if not is_finished:
        print(f"{artifact.url}: not finished; what is stored so far is shown", file=sys.stderr, flush=True)
    elif method != "none" and artifact.name != SAMPLES:
        print(f"{artifact.url}: inference.method={method}", file=sys.stderr, flush=True)
    if entropy and artifact.name != SAMPLES:
        raise UserError("--entropy: is of samples; give --samples too")
    if entropy and study.method.teacher != "cached":
        raise UserError(
            f"--entropy: {artifact.url} holds no teacher states, which method.teacher=cached stores "
            f"(here {study.method.teacher})"
        )
    _require_outcome(selection.outcome, artifact)
    if artifact.name == SAMPLES:
        rows = _sample_rows(artifact, _TeacherEntropy(study) if entropy else None)
    else:
        rows = _answer_rows(artifact, study)
    decoder = _PromptText(study) if prompts else None
    shown = 0
    positions: set[str] = set()
    for row in rows:
        if shown == selection.limit:
            return
        positions.add(row["position"])
        if selection.accepts(row):
            shown += 1
            build = row.pop("build")
            if "entropy" in row:
                row["entropy"] = row["entropy"]()
            yield row | {"prompt": decoder.text(build)} if decoder else row
    if is_finished and positions and selection.position is not None and selection.position not in positions:
        evaluated = ", ".join(sorted(positions, key=position_order))
        raise UserError(f"--position: {selection.position}: expected one of those evaluated: {evaluated}")


def study_of(artifact: Artifact) -> Study:
    """The settings that made an artifact, of the main task or of another one."""
    settings = provenance_of(artifact).settings
    # The section `analysis` is left out where a study has none.
    sections = {name: settings[name] for name in Study.model_fields if name in settings}
    try:
        return validate_evaluated(sections)
    except ValidationError:
        raise corrupt_provenance(artifact) from None


def _answer_rows(artifact: Artifact, study: Study) -> Iterator[Row]:
    """Every question at every position, with the answers of the base model and, if there is one, the distilled one."""
    examples = input_artifact(artifact, "examples")
    models = {"before" if artifact.name == BASE_SCORES else "after": artifact}
    if artifact.name == DISTILLED_SCORES:
        # A storage may also hold answers of other models, and to other prompts.
        asked = _asked_with(artifact)
        for base in list_artifacts(artifact.storage, [BASE_SCORES], provenance_of(artifact).task):
            same_questions = input_artifact(base, "examples").path == examples.path
            if "before" not in models and same_questions and _asked_with(base) == asked:
                models["before"] = base
    # `before` first: its answers come first in each row.
    answers = {name: _by_prompt(models[name]) for name in ("before", "after") if name in models}
    locations = read_locations(examples)
    orders = study.evaluation.distractor_orders
    curve = None
    if "curve" in provenance_of(artifact).inputs:
        curve = Input(input_artifact(artifact, "curve"), "")  # its fingerprint is not read
    # Prompts with the gold documents alone, or with none, are not reordered.
    slot_of_rank = {spec.documents: spec.slot_of_rank for spec in eval_specs(study, curve)}
    for record in examples.read_table(EVALUATION).to_pylist():
        example = example_from_row(record)
        attribution = Attribution(example.question, study.data.metric, golds_first(example))
        keys = next(iter(answers.values())).get(example.example_id, ())
        # The prompt length of training first.
        for key in sorted(keys, key=lambda key: (key[0] != study.data.documents, key)):
            found = {}
            for name, by_id in answers.items():
                if key in by_id.get(example.example_id, ()):
                    found[name] = by_id[example.example_id][key]
            first = next(iter(found.values()))
            documents, slots = first["documents"], tuple(first["slots"])
            order = document_order(documents, slots, slot_of_rank.get(documents, ()))
            distractors = order_of_prompt(key[1], orders)
            row: Row = {
                "example_id": example.example_id,
                "location": locations.get(example.example_id, ""),
                "question": example.question,
                "answers": list(example.answers),
                "documents": documents,
                "position": format_slots(slots),
                "slots": list(slots),
                "placement": key[1],
                "prompt_tokens": first.get("prompt_tokens"),
            }
            for name, answer in found.items():
                if "error" in answer:
                    row["error"] = answer["error"]
                    continue
                row[name] = {
                    "text": answer["text"],
                    "right": answer["correct"],
                    "cut": answer["finish_reason"] == "length",
                }
                # With another order of the distractors, documents are not at the places of `order`.
                if not answer["correct"] and distractors == 0:
                    places = [order.index(index) + 1 for index in attribution(answer["text"]) if index in order]
                    row[name]["found_in_documents"] = sorted(places)
            row["outcomes"] = _outcomes(row)
            row["build"] = _PromptParts(example, documents, slots, distractors, slot_of_rank.get(documents, ()))
            yield row


def _asked_with(artifact: Artifact) -> list[Any]:
    """The settings that decide which model is asked which prompts, before it is distilled."""
    study = study_of(artifact)
    asked: list[Any] = [study.model, study.inference]
    asked += [getattr(study.data, name) for name in ("prompt", "template", "metric", "hops", "documents")]
    names = ("slots", "other_documents", "other_slots", "distractor_orders", "reference_prompts", "max_new_tokens")
    return asked + [getattr(study.evaluation, name) for name in names]


def _by_prompt(artifact: Artifact) -> dict[str, dict[tuple[int, int], Mapping[str, Any]]]:
    """Predictions and refusals by example, then by (number of documents, number of the prompt)."""
    found: dict[str, dict[tuple[int, int], Mapping[str, Any]]] = {}
    for row in artifact.read_table(PREDICTIONS).to_pylist() + read_refused(artifact).to_pylist():
        found.setdefault(row["example_id"], {})[row["documents"], row["placement"]] = row
    return found


def _outcomes(row: Row) -> list[str]:
    """What became of the answer: right or wrong of the last model, and the change if there are two.

    Or `refused`, of a prompt that a server refused.
    """
    if "error" in row:
        return ["refused"]
    last = row["after"] if "after" in row else row["before"]
    outcomes = ["right" if last["right"] else "wrong"]
    if "before" in row and "after" in row and row["before"]["right"] != row["after"]["right"]:
        outcomes += ["gained" if row["after"]["right"] else "lost", "flipped"]
    if any(row[name]["cut"] for name in ("before", "after") if name in row):
        outcomes.append("cut")
    return outcomes


def _sample_rows(artifact: Artifact, entropy: "_TeacherEntropy | None") -> Iterator[Row]:
    """Every sampled answer, with why it was kept or not, and the teacher's entropy if it is asked for."""
    examples = input_artifact(artifact, "examples")
    locations = read_locations(examples)
    questions = {
        row["example_id"]: row for row in examples.read_table(TRAIN, ["example_id", "question", "answers"]).to_pylist()
    }
    example_ids = training_ids(examples).to_pylist()
    study = study_of(artifact)
    per_example = study.method.responses_per_example
    # Then the prompt that was answered is not stored.
    stored_prompt_is_teachers = study.method.teacher_gets_another_prompt
    ids = pa.array(example_ids if per_example == 1 else sample_ids(example_ids, per_example), pa.string())
    example_of = dict(zip(ids.to_pylist(), np.repeat(example_ids, per_example).tolist(), strict=True))
    store = SampleStore(artifact)
    index = store.index(ids)
    columns = ["example_id", "documents", "slots", "text", "truncated_text", "outcome", "error", "finish_reason"]
    columns.append("example" if stored_prompt_is_teachers else "prompt_ids")
    stored = np.flatnonzero(index.stored)
    samples = store.load(index, ids, stored, columns).to_pylist()
    for position, sample in zip(stored.tolist(), samples, strict=True):
        example_id = example_of[sample["example_id"]]
        question = questions[example_id]
        is_kept = sample["outcome"] == "kept"
        build: Any = sample.get("prompt_ids", ())
        # A sample that failed may have a prompt that is too long to be built.
        if stored_prompt_is_teachers and sample["outcome"] != "failed":
            build = _PromptParts(example_from_row(sample["example"]), sample["documents"], tuple(sample["slots"]))
        yield {
            "example_id": sample["example_id"],
            "location": locations.get(example_id, ""),
            "question": question["question"],
            "answers": question["answers"],
            "documents": sample["documents"],
            "position": format_slots(tuple(sample["slots"])),
            "prompt_tokens": None if stored_prompt_is_teachers else len(build),
            "outcomes": [sample["outcome"], *(["cut"] if sample["finish_reason"] == "length" else [])],
            "text": sample["text"],
            "kept_text": sample["truncated_text"],
            "error": sample["error"],
            # Only for samples that are shown: the states of all may not fit the memory.
            **({"entropy": partial(entropy, store, index, ids, position)} if entropy and is_kept else {}),
            "build": build,
        }


class _TeacherEntropy:
    """How uncertain the teacher is at the tokens of a response.

    H_t = - sum_v p_tv log p_tv, in nats, of the teacher's distribution p_t at token t
    """

    def __init__(self, study: Study) -> None:
        # Imported where needed: torch and transformers take seconds to import.
        from pos2distill.models.head import FrozenHead
        from pos2distill.models.load import load_tokenizer, torch_dtype

        self.tokenizer = load_tokenizer(study.model)
        self.head = FrozenHead.from_checkpoint(study.model, torch_dtype(study.model.dtype))

    def __call__(self, store: SampleStore, index: StoreIndex, ids: pa.Array, position: int) -> Row:
        """The mean over the tokens of one sample, and each token's text and entropy."""
        import torch

        from pos2distill.models.hidden_states import hidden_from_bytes

        columns = ["response_ids", "hidden", "hidden_dtype"]
        (sample,) = store.load(index, ids, np.array([position]), columns).to_pylist()
        response = sample["response_ids"]
        hidden_TH = hidden_from_bytes(sample["hidden"], sample["hidden_dtype"], len(response))
        entropy_T = torch.distributions.Categorical(logits=self.head(hidden_TH)).entropy()
        tokens = [self.tokenizer.decode([token]) for token in response]
        return {"mean": entropy_T.mean().item(), "tokens": list(zip(tokens, entropy_T.tolist(), strict=True))}


@dataclass(frozen=True)
class _PromptParts:
    """What a prompt is built from. order: of the distractors; 0 is the data set's."""

    example: Example
    documents: int
    slots: tuple[int, ...]
    order: int = 0
    slot_of_rank: tuple[int, ...] = ()


class _PromptText:
    """The text of prompts, special tokens included: of stored token ids, or of prompts that are built again.

    Of a model behind a server, the messages: only the server has its chat template.
    """

    def __init__(self, study: Study) -> None:
        self.builder: MessageBuilder | PromptBuilder
        if study.model.is_served_name:
            self.builder = MessageBuilder(study.data.wording, max_length=None, reserve=0)
            return
        # Imported where needed: transformers takes seconds to import.
        from pos2distill.models.prompts import load_prompt_builder

        self.builder = load_prompt_builder(study, reserve=0)

    def text(self, build: "Sequence[int] | _PromptParts") -> str:
        """build: token ids, or what the prompt was built from."""
        prompt: Any = build
        if isinstance(build, _PromptParts):
            prompt = self.builder(
                build.example,
                build.documents,
                build.slots,
                slot_of_rank=build.slot_of_rank,
                order="reshuffled" if build.order else "fixed",
                seed=build.order,
            )
        if isinstance(self.builder, MessageBuilder):
            return joined_text(prompt)
        return str(self.builder.tokenizer.decode(prompt))


def require_limit(limit: int) -> None:
    """Refuse a number of questions that cannot be shown."""
    if limit < 0:
        raise UserError(f"--limit: {limit}: expected 1 or more, or 0 for all")


def _require_outcome(name: str | None, artifact: Artifact) -> None:
    """Refuse an outcome that nothing in the artifact can have."""
    possible = _SAMPLE_OUTCOMES if artifact.name == SAMPLES else _ANSWER_OUTCOMES
    if name in _CHANGES and artifact.name == BASE_SCORES:
        raise UserError(f"--outcome: {name}: {artifact.url} has answers before training alone")
    if name is None or name in possible:
        return
    if name in _SAMPLE_OUTCOMES:
        raise UserError(f"--outcome: {name}: is of samples; give --samples too")
    raise UserError(f"--outcome: {name}: expected one of {', '.join(possible)}{did_you_mean_one(name, possible)}")
