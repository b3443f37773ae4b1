"""What defines a result: the part of a recipe that is fingerprinted."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from pos2distill.config.base import Count, Precision, Section
from pos2distill.config.data import DataSection
from pos2distill.config.inference import InferenceSection
from pos2distill.config.methods import METHODS, Method, MethodName, RowWeights
from pos2distill.config.training import SamplingSection, TrainingSection

_DEFAULT_SLOTS = 10  # to try for `auto`, and to evaluate at further prompt lengths
_DEFAULT_TOPK = 64


class ModelSection(Section):
    """The model that is measured, sampled from and distilled."""

    path: str = Field(description="folder or fsspec URL of a Hugging Face model, or its hub name")
    revision: str | None = Field(None, description="hub revision, to fix the version of a model named by its hub name")
    dtype: Precision = Field(
        "bfloat16",
        description="auto, for runs on CPUs: bfloat16 if the CPU of the machine that loads the recipe has instructions "
        "for it (AVX512-BF16, AMX, Arm BF16), else float32, which is several times faster there",
    )
    engine: Literal["vllm", "hf", "fake"] = Field(
        "vllm",
        description="the generator. vllm; hf: transformers, slower but without start-up time; fake: for tests",
    )
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = Field(
        "auto", description="auto: flash_attention_2 if it is available, else sdpa"
    )
    max_length: int | None = Field(None, gt=0, description="context in tokens; default: from the model's config")
    rope_scales: tuple[float, ...] = Field((), description="filled in from inference.scales")
    trust_remote_code: bool = False


class MethodSection(Section):
    """The distillation method (arXiv:2508.15709); docs/methods.md explains it."""

    name: MethodName = Field(
        "r1", description="; ".join(f"{method.name}: {method.description}" for method in METHODS.values())
    )
    advantageous_slot: Literal["first", "last", "auto", "random"] | int | tuple[int, ...] = Field(
        "first",
        description="where the model does best; of several hops, the first or last slots in hop order, or a list; "
        "auto: measured on the training examples; random: drawn for each example, the control of all others",
    )
    auto_slots: Literal["all"] | Count = Field(
        _DEFAULT_SLOTS,
        description="auto: slots to try, spread evenly; of several hops the first slot, with the others next to it. "
        "Default: 10, or all if there are fewer",
    )
    auto_examples: int = Field(100, ge=1, description="auto: training examples to measure on")
    k: int = Field(4, ge=0, description="trivial slots, or ordered tuples of them, drawn for each example")
    distractor_order: Literal["fixed", "reshuffled"] = Field("fixed", description="their order in each row's prompt")
    # These defaults depend on the fields above, which pydantic passes to a default factory in the order of declaration.
    weights: RowWeights = Field(
        default_factory=lambda settings: _spec_of(settings).weights,
        description="of trivial rows. paper: alpha; official: alpha as the authors' code scales it; uniform: equal; "
        "adaptive (cross-entropies only): harder rows count more. Default: paper for r1 and kl+align, else uniform",
    )
    anchor_weight: float = Field(
        default_factory=lambda settings: _spec_of(settings).anchor_weight,
        ge=0,
        description="lambda, the weight of the rows at the advantageous slot. Default: 1 for r1, else 0",
    )
    view: Literal["none", "skip", "cyclic", "pose"] = Field(
        "none",
        description="positions of training rows, for methods with a cross-entropy. skip, cyclic: RPSD, a second view "
        "of every row whose positions are shifted; pose: a skip in the only view",
    )
    view_weight: float = Field(1.0, gt=0, description="weight of the second view's divergence; views skip and cyclic")
    alignment: Literal["shifted", "official"] = Field(
        "shifted",
        description="shifted: logits that predict the response; official: one position later, as the authors' code",
    )
    teacher: Literal["cached", "resident", "topk", "none"] = Field(
        "cached",
        # The default is validated too, because `_no_teacher_unless_needed` replaces it for some methods.
        validate_default=True,
        description="cached: hidden states stored with the samples; resident: the frozen model next to the student; "
        "topk: the sampler's most likely tokens, no teacher stage, approximate; none: of every method that needs "
        "no teacher",
    )
    teacher_topk: int = Field(
        default_factory=lambda settings: _DEFAULT_TOPK if settings.get("teacher") == "topk" else 0,
        ge=0,
        description="topk: tokens stored at each position, all others count as one. Default: 64; 0 for other teachers",
    )

    @model_validator(mode="before")
    @classmethod
    def _null_leaves_open(cls, settings: Any) -> Any:
        return _without_null(settings, ("auto_slots", "weights", "anchor_weight", "teacher", "teacher_topk"))

    @field_validator("teacher", mode="after")
    @classmethod
    def _no_teacher_unless_needed(cls, teacher: str, info: ValidationInfo) -> str:
        # A sweep over methods names one teacher for all of them, so a teacher that is not needed is no error.
        known = "name" in info.data and "weights" in info.data
        if known and not _needs_teacher(_spec_of(info.data), info.data["weights"]):
            return "none"
        return teacher

    @field_validator("teacher_topk", mode="after")
    @classmethod
    def _no_tokens_without_teacher(cls, teacher_topk: int, info: ValidationInfo) -> int:
        # A number of tokens that a sweep names for all methods is no error either.
        return 0 if info.data.get("teacher") == "none" else teacher_topk

    @property
    def spec(self) -> Method:
        """The method's entry in the table."""
        return METHODS[self.name]

    @property
    def loss(self) -> Literal["kl", "ce"]:
        """The loss of a row: KL to the frozen model, or cross-entropy on the response."""
        return self.spec.loss

    @property
    def needs_teacher(self) -> bool:
        """Whether training uses the frozen model's distribution."""
        return _needs_teacher(self.spec, self.weights)

    @model_validator(mode="after")
    def _weights_fit_the_loss(self) -> "MethodSection":
        if self.weights not in self.spec.allowed_weights:
            raise ValueError(f"weights: '{self.weights}' is not supported by method '{self.name}'")
        if self.alignment == "official" and self.loss == "ce":
            raise ValueError(f"alignment: 'official' applies to KL losses only; method '{self.name}' has loss 'ce'")
        if self.view != "none" and (self.loss == "kl" or self.weights != "uniform"):
            raise ValueError(
                f"view: '{self.view}' is for cross-entropies with uniform weights, not for method '{self.name}' with "
                f"weights '{self.weights}'"
            )
        if not self.k and not self.anchor_weight:
            raise ValueError("k: 0 trivial slots and no weight on the advantageous one leave nothing to train on")
        return self

    @model_validator(mode="after")
    def _teacher_fits_the_method(self) -> "MethodSection":
        if self.needs_teacher and self.teacher == "none":
            raise ValueError(f"teacher: method '{self.name}' needs one; set cached, resident or topk")
        if self.teacher != "topk":
            if self.teacher_topk:
                raise ValueError(f"teacher_topk: only teacher 'topk' keeps some tokens, not '{self.teacher}'")
            return self
        # 0 passes the field's own check, since it is the value of other teachers.
        if not self.teacher_topk:
            raise ValueError("teacher_topk: input should be greater than or equal to 1, got 0")
        if self.alignment == "official":
            raise ValueError(
                "alignment: 'official' distils one position after the response's end, where the sampler knows no "
                "probabilities; set teacher to cached or resident"
            )
        if self.weights == "adaptive":
            raise ValueError(
                "weights: 'adaptive' needs the frozen model's loss on the whole response, and the sampler knows no "
                "probability of a closing token that it did not draw; set teacher to cached or resident"
            )
        return self


def _spec_of(settings: Mapping[str, Any]) -> Method:
    # Without a valid name the section is refused anyway, so any entry will do.
    return METHODS[settings.get("name", "r1")]


def _needs_teacher(spec: Method, weights: RowWeights) -> bool:
    return spec.loss == "kl" or weights == "adaptive"


def _without_null(settings: Any, names: Collection[str]) -> Any:
    """The mapping without the named settings that are null: `weights: null` in YAML leaves the setting open."""
    if not isinstance(settings, Mapping):
        return settings
    return {name: value for name, value in settings.items() if value is not None or name not in names}


class EvaluationSection(Section):
    """The evaluation: greedy answers by the gold document's slot."""

    slots: Literal["all", "pairs"] | Count | tuple[int | tuple[int, ...], ...] = Field(
        "all",
        description="all; a number of slots spread evenly from first to last; a list (0-based). Of several hops: every "
        "ordered tuple of these; pairs: the paper's 12 in their three groups. Default: all; of several hops pairs",
    )
    other_documents: tuple[int, ...] = Field((), description="further prompt lengths, in documents")
    other_slots: Literal["all", "pairs"] | Count = Field(
        default_factory=lambda settings: min([_DEFAULT_SLOTS, *settings.get("other_documents", ())]),
        description="slots at each further length. Default: 10, or as many as the shortest of them has; of several "
        "hops pairs",
    )
    max_new_tokens: int = Field(100, ge=1, description="of an answer; 512 for data.prompt reasoning or coc")
    also_evaluate: tuple[str, ...] = Field(
        (), description="other recipes, by name or path, on whose data both models are evaluated too"
    )
    bootstrap_samples: int = Field(2000, ge=100, description="bootstrap samples for the confidence intervals")
    seed: int = Field(
        0,
        ge=0,
        description="of the choice of the evaluation examples and of their distractors. Default: the study's seed; a "
        "number of its own evaluates all seeds of a sweep on the same questions, and the initial model once",
    )

    @model_validator(mode="before")
    @classmethod
    def _null_leaves_open(cls, settings: Any) -> Any:
        return _without_null(settings, ("slots", "other_slots", "seed"))


class Study(Section):
    """All that defines a result: equal studies have equal fingerprints."""

    # First, because sections that are validated after it take their defaults from it.
    seed: int = Field(0, ge=0)
    inference: InferenceSection = InferenceSection()
    model: ModelSection
    data: DataSection
    # Defaults are validated too: `_resolve_method` and `_resolve_evaluation` fill in what depends on the data.
    method: MethodSection = Field(MethodSection(), validate_default=True)
    sampling: SamplingSection = SamplingSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = Field(EvaluationSection(), validate_default=True)

    @field_validator("model", mode="before")
    @classmethod
    def _resolve_model(cls, model: Any, info: ValidationInfo) -> Any:
        """The model as `inference` changes it: every part that loads it knows its section alone."""
        inference = info.data.get("inference")
        settings = model.model_dump() if isinstance(model, Section) else model
        if inference is None or not isinstance(settings, Mapping):
            return model
        return {**settings, "rope_scales": inference.scales}

    @field_validator("method", mode="before")
    @classmethod
    def _resolve_method(cls, method: Any, info: ValidationInfo) -> Any:
        """Fill in the settings that are left open and depend on other sections. `info.data`: the sections before."""
        # What an earlier validation filled in is left out, since with other data it may be different.
        settings, data = _as_written(method), info.data.get("data")
        if data is None or not isinstance(settings, Mapping):
            return method  # invalid, and refused as such
        resolved = dict(settings)
        if resolved.get("auto_slots") is None:
            # The number of tuples of adjacent slots: the gold documents of `auto` are next to each other.
            resolved["auto_slots"] = min(_DEFAULT_SLOTS, data.documents - max(data.hops) + 1)
        return resolved

    @field_validator("evaluation", mode="before")
    @classmethod
    def _resolve_evaluation(cls, evaluation: Any, info: ValidationInfo) -> Any:
        """As `_resolve_method`."""
        settings, data = _as_written(evaluation), info.data.get("data")
        if data is None or not isinstance(settings, Mapping):
            return evaluation
        resolved = dict(settings)
        if resolved.get("seed") is None:
            resolved["seed"] = info.data.get("seed", 0)
        # `all` would mean every ordered tuple of slots: 380 for two hops and 20 documents.
        if data.hops != (1,):
            for name in ("slots", "other_slots"):
                if resolved.get(name) is None:
                    resolved[name] = "pairs"
        return resolved

    def advantageous(self, hops: int) -> tuple[int, ...]:
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
    def has_frozen_copy(self) -> bool:
        """Whether a second model is held next to the student. With adapters the student contains the initial one."""
        return self.method.teacher == "resident" and self.training.lora is None

    @model_validator(mode="after")
    def _advantageous_slot_exists(self) -> "Study":
        documents, hops = self.data.documents, self.data.hops
        slot = self.method.advantageous_slot
        if not isinstance(slot, str):
            _check_slots("method.advantageous_slot", slot, documents, hops)
        elif slot == "auto" and len(hops) > 1:
            raise ValueError("method.advantageous_slot: 'auto' requires one number of hops (data.hops)")
        elif (self.inference.method == "reorder" or self.inference.searches_scales) and len(hops) > 1:
            raise ValueError(f"inference.method: '{self.inference.method}' requires one number of hops (data.hops)")
        if slot == "auto" or self.inference.method == "reorder":
            _check_count("method.auto_slots", self.method.auto_slots, documents - hops[0] + 1)
        if self.inference.method == "reorder" and self.method.auto_slots == 1:
            raise ValueError("method.auto_slots: 1, but inference.method 'reorder' compares at least 2 slots")
        # Placements are ordered tuples of slots, and one is the advantageous one. Examples with the fewest hops have
        # the fewest placements.
        trivial = math.perm(documents, min(hops)) - 1
        if self.method.k > trivial:
            raise ValueError(
                f"method.k: {self.method.k} trivial slots, but {documents} documents have {trivial}; "
                f"lower method.k or raise data.documents"
            )
        return self

    @model_validator(mode="after")
    def _engine_has_the_method(self) -> "Study":
        if self.inference.method in ("ms_poe", "attention_buckets") and self.model.engine == "vllm":
            raise ValueError(
                f"inference.method: '{self.inference.method}' changes attention in a way that vLLM has no place for; "
                f"set model.engine to hf"
            )
        if self.inference.method == "ms_poe" and self.model.attention == "flash_attention_2":
            raise ValueError(
                "inference.method: 'ms_poe' cannot use flash_attention_2; set model.attention to auto, sdpa or eager"
            )
        return self

    @model_validator(mode="after")
    def _batch_holds_an_example(self) -> "Study":
        # A global batch holds whole examples: k trivial rows and the row at the advantageous slot.
        if self.training.global_batch_rows <= self.method.k:
            raise ValueError(
                f"training.global_batch_rows: {self.training.global_batch_rows} rows cannot hold one example, "
                f"which needs {self.method.k + 1} rows (method.k + 1)"
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


def _as_written(section: Any) -> Any:
    """The settings given to a section, without those that it filled in; a mapping as it is."""
    return section.model_dump(exclude_unset=True) if isinstance(section, Section) else section


def _check_evaluated(field: str, slots: object, documents: int, hops: tuple[int, ...]) -> None:
    """Refuse slots that prompts of that many documents do not have."""
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
