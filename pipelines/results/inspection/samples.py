"""The rows of samples: every sampled answer, and how sure the teacher is of those that were kept."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from pos2distill.config import Study
from pos2distill.evaluation.scores import format_slots
from pos2distill.records import example_from_row, sample_id_array
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore, StoreIndex

from ...stages.prepare import TRAIN_FILE, read_locations, read_prepared, training_ids
from ..artifact_lookup import input_artifact
from .question import InspectedQuestion, PromptParts, QuestionValues

_COLUMNS = (
    "sample_id",
    "example_id",
    "documents",
    "slots",
    "text",
    "truncated_text",
    "outcome",
    "error",
    "finish_reason",
)


def iter_samples(artifact: Artifact, study: Study, *, entropy: bool) -> Iterator[InspectedQuestion]:
    """Every sampled answer, with why it was kept or not, and the teacher's entropy if it is asked for."""
    examples = input_artifact(artifact, "examples")
    locations = read_locations(examples)
    questions = {
        row["example_id"]: row
        for row in read_prepared(examples, TRAIN_FILE, ["example_id", "question", "answers"]).to_pylist()
    }
    ids = sample_id_array(training_ids(examples), study.method.responses_per_example)
    # Then the prompt that was answered is not stored.
    stored_prompt_is_teachers = study.method.teacher_gets_another_prompt
    store = SampleStore(artifact, read_only=True)
    store_index = store.index(ids)
    stored = np.flatnonzero(store_index.stored)
    samples = store.load(store_index, stored, [*_COLUMNS, "example" if stored_prompt_is_teachers else "prompt_ids"])
    teacher_entropy = TeacherEntropy(study, store, store_index) if entropy else None
    for index, sample in zip(stored.tolist(), samples.to_pylist(), strict=True):
        question = questions[sample["example_id"]]
        prompt = sample.get("prompt_ids", ())
        # A sample that failed may have a prompt that is too long to be built.
        if stored_prompt_is_teachers and sample["outcome"] != "failed":
            prompt = PromptParts(example_from_row(sample["example"]), sample["documents"], tuple(sample["slots"]))
        values: QuestionValues = {
            "sample_id": sample["sample_id"],
            "example_id": sample["example_id"],
            "location": locations.get(sample["example_id"], ""),
            "question": question["question"],
            "answers": question["answers"],
            "documents": sample["documents"],
            "position": format_slots(tuple(sample["slots"])),
            "prompt_tokens": None if stored_prompt_is_teachers else len(prompt),
            "outcomes": [sample["outcome"], *(["cut"] if sample["finish_reason"] == "length" else [])],
            "text": sample["text"],
            "kept_text": sample["truncated_text"],
            "error": sample["error"],
        }
        if teacher_entropy is not None and sample["outcome"] == "kept":
            yield InspectedQuestion(values, prompt, partial(teacher_entropy, index))
        else:
            yield InspectedQuestion(values, prompt)


class TeacherEntropy:
    """How uncertain the teacher is at the tokens of a response.

    H_t = - sum_v p_tv log p_tv, in nats, of the teacher's distribution p_t at token t

    Args:
        study: the study with the teacher.
        store, store_index: the samples with its hidden states.
    """

    def __init__(self, study: Study, store: SampleStore, store_index: StoreIndex) -> None:
        # Imported where needed: torch and transformers take seconds to import.
        from pos2distill.models.architecture import torch_dtype
        from pos2distill.models.head import FrozenHead
        from pos2distill.models.load import load_tokenizer

        self.store, self.store_index = store, store_index
        self.tokenizer = load_tokenizer(study.model)
        self.head = FrozenHead.from_checkpoint(study.model, torch_dtype(study.model.dtype))

    def __call__(self, index: int) -> QuestionValues:
        """The mean over the tokens of the sample at this index, and each token's text and entropy."""
        import torch

        from pos2distill.models.hidden_states import hidden_from_bytes

        columns = ["response_ids", "hidden", "hidden_dtype"]
        (sample,) = self.store.load(self.store_index, np.array([index]), columns).to_pylist()
        response = sample["response_ids"]
        hidden_TH = hidden_from_bytes(sample["hidden"], sample["hidden_dtype"], len(response))
        entropy_T = torch.distributions.Categorical(logits=self.head(hidden_TH)).entropy()
        tokens = [self.tokenizer.decode([token]) for token in response]
        return {"mean": entropy_T.mean().item(), "tokens": list(zip(tokens, entropy_T.tolist(), strict=True))}
