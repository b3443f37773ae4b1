"""What defines a result: the part of a recipe that is fingerprinted."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from pos2distill.config.analysis import AnalysisSection
from pos2distill.config.base import Section
from pos2distill.config.data import DataSection
from pos2distill.config.evaluation import EvaluationSection
from pos2distill.config.inference import InferenceSection, SearchSection
from pos2distill.config.method import DEFAULT_SLOT_LIMIT, MethodSection
from pos2distill.config.model import ModelSection
from pos2distill.config.sampling import SamplingSection
from pos2distill.config.training import TrainingSection


class Study(Section):
    """All that defines a result: equal studies have equal fingerprints."""

    # First, because sections that are validated after it take their defaults from it.
    seed: int = Field(
        0, ge=0, lt=1 << 63, description="Seed from which, together with example ids, all randomness is derived."
    )
    inference: InferenceSection = Field(InferenceSection(), description="How the model answers.")
    model: ModelSection = Field(description="Model that is measured, sampled from and distilled.")
    data: DataSection = Field(description="Questions, and how prompts show them.")
    # Defaults are validated too: the `_resolve_…` below fill in what depends on sections before.
    method: MethodSection = Field(MethodSection(), validate_default=True, description="Distillation method.")
    sampling: SamplingSection = Field(
        SamplingSection(), validate_default=True, description="How responses are sampled."
    )
    training: TrainingSection = Field(TrainingSection(), description="How the student is optimized.")
    evaluation: EvaluationSection = Field(
        EvaluationSection(), validate_default=True, description="How both models are evaluated."
    )
    # Left out of dumps, and so of fingerprints, where there is none.
    analysis: AnalysisSection | None = Field(
        None,
        exclude_if=lambda section: section is None,
        description="Analysis of why answers differ by position. Default: none.",
    )

    @field_validator("model", mode="before")
    @classmethod
    def _resolve_model(cls, model: Any, info: ValidationInfo) -> Any:
        """The model with the changes of `inference`, since code that loads a model gets its section alone."""
        inference = info.data.get("inference")
        settings = model.model_dump() if isinstance(model, Section) else model
        if inference is None or not isinstance(settings, Mapping):
            return model
        return {**settings, "rope_scales": inference.scales}

    @field_validator("method", mode="before")
    @classmethod
    def _resolve_method(cls, method: Any, info: ValidationInfo) -> Any:
        """Fill in the settings that are left open and depend on other sections. `info.data`: the sections before."""
        # Values that an earlier validation filled in are left out, since they may differ with other data.
        settings, data = _as_written(method), info.data.get("data")
        if data is None or not isinstance(settings, Mapping):
            return method  # invalid, and rejected as such
        resolved = dict(settings)
        if resolved.get("auto_slots") is None:
            # The number of tuples of adjacent slots: the gold documents of `auto` are next to each other.
            resolved["auto_slots"] = min(DEFAULT_SLOT_LIMIT, data.documents - max(data.hops) + 1)
        return resolved

    @field_validator("sampling", mode="before")
    @classmethod
    def _resolve_sampling(cls, sampling: Any, info: ValidationInfo) -> Any:
        """As `_resolve_method`."""
        settings, method, data = _as_written(sampling), info.data.get("method"), info.data.get("data")
        if method is None or data is None or not isinstance(settings, Mapping):
            return sampling
        resolved = dict(settings)
        if resolved.get("max_new_tokens") is None:
            resolved["max_new_tokens"] = _default_max_new_tokens(data)
        if resolved.get("keep") is None:
            resolved["keep"] = "all" if method.spec.on_policy else "correct"
        return resolved

    @field_validator("evaluation", mode="before")
    @classmethod
    def _resolve_evaluation(cls, evaluation: Any, info: ValidationInfo) -> Any:
        """As `_resolve_method`."""
        settings, data = _as_written(evaluation), info.data.get("data")
        if data is None or not isinstance(settings, Mapping):
            return evaluation
        resolved = dict(settings)
        if resolved.get("max_new_tokens") is None:
            resolved["max_new_tokens"] = _default_max_new_tokens(data)
        if resolved.get("seed") is None:
            resolved["seed"] = info.data.get("seed", 0)
        # `all` would mean every ordered tuple of slots: 380 for two hops and 20 documents.
        if data.hops != (1,):
            for name in ("slots", "other_slots"):
                if resolved.get(name) is None:
                    resolved[name] = "pairs"
        return resolved

    def fixed_advantageous_slots(self, hops: int) -> tuple[int, ...]:
        """The advantageous slots of an example with this many gold documents, 0-based, in hop order.

        Raises:
            ValueError: for `auto`, before it is measured; for `random`, which depends on the example (see
                `permutations.advantageous_slots`).
        """
        slot = self.method.advantageous_slot
        if slot in ("auto", "random"):
            raise ValueError(f"the advantageous slot is '{slot}'")
        if isinstance(slot, str):
            # Adjacent slots in hop order, as in the paper for two hops.
            first = 0 if slot == "first" else self.data.documents - hops
            return tuple(range(first, first + hops))
        return (slot,) if isinstance(slot, int) else slot

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Documents in the prompts that are evaluated by slot; the length of training first."""
        return (self.data.documents, *self.evaluation.other_documents)

    @property
    def has_weights(self) -> bool:
        """Whether the model's weights can be read, and so trained. A server only returns answers."""
        return self.model.engine != "openai"

    @property
    def wanted_samples(self) -> int:
        """Kept samples to train on: on-policy methods have several of each example."""
        return self.data.train_examples * self.method.responses_per_example

    def holds_base_copy(self, *, starts_from_base: bool) -> bool:
        """Whether the base model is held next to the student.

        A student with adapters that begins as the base model contains it, but not in later rounds, which begin with the
        merged model of the one before.
        """
        contains_it = self.training.lora is not None and starts_from_base
        return self.method.teacher == "resident" and not contains_it

    @property
    def examples_per_batch(self) -> int:
        """Examples of a global batch: as many as fit with all their rows."""
        return self.training.global_batch_rows // self.method.reserved_rows_per_example

    @property
    def samples_per_batch(self) -> int:
        """Samples of a global batch."""
        return self.examples_per_batch * self.method.responses_per_example

    @property
    def largest_batch(self) -> tuple[int, int]:
        """The examples of a global batch, and its rows that are computed."""
        examples = min(self.examples_per_batch, self.data.train_examples)
        return examples, examples * self.method.computed_rows_per_example

    @model_validator(mode="after")
    def _evaluation_fits(self) -> "Study":
        evaluation, documents = self.evaluation, self.data.documents
        if evaluation.distractor_orders > 1 and self.inference.reorders:
            raise ValueError(
                f"evaluation.distractor_orders: {evaluation.distractor_orders}, but inference.method "
                f"'{self.inference.method}' orders them; set 1"
            )
        ranks = evaluation.retriever_ranks
        if not ranks:
            return self
        if len(ranks) > documents or min(ranks) < 0 or sum(ranks) <= 0:
            raise ValueError(
                f"evaluation.retriever_ranks: expected at most {documents} numbers (data.documents), none of them "
                f"negative and not all 0, got {list(ranks)}"
            )
        if self.data.hops != (1,):
            raise ValueError("evaluation.retriever_ranks: only for one gold document (data.hops)")
        return self

    @model_validator(mode="after")
    def _advantageous_slot_exists(self) -> "Study":
        documents, hops = self.data.documents, self.data.hops
        slot = self.method.advantageous_slot
        if not isinstance(slot, str):
            _check_slots("method.advantageous_slot", slot, documents, hops)
        elif slot == "auto" and len(hops) > 1:
            raise ValueError("method.advantageous_slot: 'auto' requires one number of hops (data.hops)")
        return self

    @model_validator(mode="after")
    def _measured_slots_exist(self) -> "Study":
        hops, inference = self.data.hops, self.inference
        if inference.measures_slots and len(hops) > 1:
            raise ValueError(f"inference.method: '{inference.method}' requires one number of hops (data.hops)")
        available = self.data.documents - hops[0] + 1
        if self.method.advantageous_slot == "auto" or inference.reorders:
            _check_count("method.auto_slots", self.method.auto_slots, available)
        # The default is lowered silently (`candidate_placements`).
        default = SearchSection.model_fields["slots"].default
        searched = inference.search.slots
        if inference.searches_scales and searched > max(available, default):
            raise ValueError(f"inference.search.slots: {searched} slots, but there are {available}; lower it")
        if inference.reorders and self.method.auto_slots == 1:
            raise ValueError(
                f"method.auto_slots: 1, but inference.method '{inference.method}' compares at least 2 slots"
            )
        return self

    @model_validator(mode="after")
    def _measurements_have_examples(self) -> "Study":
        if self.inference.measures_slots and not self.data.train_examples:
            raise ValueError(
                f"data.train_examples: 0, but inference.method '{self.inference.method}' measures on training "
                f"examples; set both, for example data.train_examples=80 data.eval_fraction=0.5, or less if the "
                f"file has few"
            )
        return self

    @model_validator(mode="after")
    def _trivial_slots_suffice(self) -> "Study":
        # Placements are ordered tuples of slots, and one is the advantageous one. Examples with the fewest hops have
        # the fewest placements.
        documents = self.data.documents
        trivial = math.perm(documents, min(self.data.hops)) - 1
        if self.method.k > trivial:
            raise ValueError(
                f"method.k: {self.method.k} trivial slots, but {documents} documents have {trivial}; "
                f"lower method.k or raise data.documents"
            )
        return self

    @model_validator(mode="after")
    def _engine_has_the_method(self) -> "Study":
        changes = self.inference.spec.changes
        if changes == "attention" and self.model.engine == "vllm":
            raise ValueError(
                f"inference.method: '{self.inference.method}' changes attention in a way that vLLM does not support; "
                f"set model.engine to hf"
            )
        if changes in ("scales", "attention") and self.model.engine == "openai":
            raise ValueError(
                f"inference.method: '{self.inference.method}' changes the model, which a server keeps as it is; set "
                f"model.engine to hf"
            )
        if self.inference.method == "ms_poe" and self.model.attention == "flash_attention_2":
            raise ValueError(
                "inference.method: 'ms_poe' cannot use flash_attention_2; set model.attention to auto, sdpa or eager"
            )
        return self

    @model_validator(mode="after")
    def _a_server_has_the_limit_of_the_evaluation(self) -> "Study":
        sent, limit = self.model.extra_body.get("max_completion_tokens"), self.evaluation.max_new_tokens
        if self.model.engine == "openai" and sent is not None and sent != limit:
            raise ValueError(
                f"model.extra_body: max_completion_tokens: {sent}, but evaluation.max_new_tokens is {limit}; set both "
                f"to the same"
            )
        return self

    @model_validator(mode="after")
    def _engine_args_are_used(self) -> "Study":
        # An error and not a warning, because they are part of the fingerprint and look as if they were measured.
        if self.model.engine_args and self.model.engine != "vllm":
            raise ValueError(
                f"model.engine_args: are arguments of vLLM, but model.engine is {self.model.engine}; set model.engine "
                f"to vllm, or leave them out"
            )
        if self.model.engine_args and self.method.teacher == "topk":
            raise ValueError(
                "model.engine_args: may change the engine's distributions, from which method.teacher 'topk' learns; "
                "set method.teacher to cached or resident"
            )
        return self

    @model_validator(mode="after")
    def _on_policy_takes_every_answer(self) -> "Study":
        if self.method.spec.on_policy and self.sampling.candidates > 1:
            raise ValueError(
                f"sampling.candidates: {self.sampling.candidates}, but method '{self.method.name}' learns from what "
                f"the student answers, not from a choice of its answers; set 1"
            )
        return self

    @model_validator(mode="after")
    def _analysis_knows_the_method(self) -> "Study":
        if self.analysis is not None and self.inference.spec.only_evaluated:
            raise ValueError(
                f"analysis: it runs the model as it is, without inference.method '{self.inference.method}'; "
                f"leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _batch_holds_an_example(self) -> "Study":
        # A global batch holds whole examples.
        rows = self.method.reserved_rows_per_example
        if self.training.global_batch_rows < rows:
            needed = "method.k" if rows == self.method.k else "method.k + 1"
            raise ValueError(
                f"training.global_batch_rows: {self.training.global_batch_rows} rows cannot hold one example, "
                f"which needs {rows} rows ({needed})"
            )
        return self

    @model_validator(mode="after")
    def _evaluated_slots_exist(self) -> "Study":
        documents, hops = self.data.documents, self.data.hops
        slots = self.evaluation.slots
        if isinstance(slots, tuple):
            for each in slots:
                _check_slots("evaluation.slots", each, documents, hops)
            if len(set(slots)) != len(slots) or not slots:
                raise ValueError("evaluation.slots: expected at least one slot, each of them once")
        others = self.evaluation.other_documents
        _check_evaluated("evaluation.slots", slots, documents, hops)
        for length in others:
            _check_evaluated("evaluation.other_slots", self.evaluation.other_slots, length, hops)
        for length in others:
            if length <= max(hops) or length == documents:
                raise ValueError(
                    f"evaluation.other_documents: {length} leaves no distractor (data.hops) or equals data.documents"
                )
        if len(set(others)) != len(others):
            raise ValueError("evaluation.other_documents: expected each number once")
        return self

    @model_validator(mode="after")
    def _distractor_orders_exist(self) -> "Study":
        documents, golds, orders = min(self.prompt_lengths), max(self.data.hops), self.evaluation.distractor_orders
        if orders == 1:
            return self
        # Beyond 20 distractors there are more orders than anybody asks for.
        available = math.factorial(min(documents - golds, 20))
        if orders > available:
            raise ValueError(
                f"evaluation.distractor_orders: {orders} orders, but {documents} documents, {golds} of them gold, have "
                f"{available}; lower it"
            )
        return self


def _default_max_new_tokens(data: DataSection) -> int:
    """Those of the paper's recipes: of chains of thought, which `em` looks for an answer in, and of short answers."""
    return 512 if data.prompt in ("reasoning", "coc") or data.metric == "em" else 100


def _as_written(section: Any) -> Any:
    """The settings given to a section, without those that it filled in; a mapping as it is."""
    return section.model_dump(exclude_unset=True) if isinstance(section, Section) else section


def _check_evaluated(field: str, slots: object, documents: int, hops: tuple[int, ...]) -> None:
    """Reject slots that prompts of that many documents do not have."""
    if slots == "pairs" and hops == (1,):
        raise ValueError(f"{field}: 'pairs' are for several hops (data.hops)")
    if slots != "pairs" and len(hops) > 1:
        raise ValueError(f"{field}: of several numbers of hops (data.hops) only 'pairs' are possible")
    if isinstance(slots, int) and slots < max(hops):
        raise ValueError(f"{field}: {slots} slots cannot hold {max(hops)} gold documents")
    _check_count(field, slots, documents)


def _check_count(field: str, slots: object, available: int) -> None:
    if isinstance(slots, int) and slots > available:
        raise ValueError(f"{field}: {slots} slots, but there are {available}; lower it, or set it to all")


def _check_slots(field: str, slots: int | tuple[int, ...], documents: int, hops: tuple[int, ...]) -> None:
    listed = (slots,) if isinstance(slots, int) else slots
    for slot in listed:
        if not 0 <= slot < documents:
            raise ValueError(f"{field}: {slot} is not one of the slots 0 to {documents - 1}")
    if hops != (len(listed),) or len(set(listed)) != len(listed):
        expected = " or ".join(map(str, hops))
        raise ValueError(f"{field}: {list(listed)} should be {expected} different slots, one for each gold document")
