"""The distillation method of a study: an entry of the table in `method_table`, and its settings."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from pos2distill.config.base import Count, Section, without_null
from pos2distill.config.method_table import METHODS, Method, MethodName, RowWeights
from pos2distill.errors import did_you_mean

DEFAULT_SLOT_LIMIT = 10
"""The most slots that `auto` tries, and that are evaluated at a further prompt length, by default."""

_DEFAULT_TOPK = 64

Alignment = Literal["shifted", "official"]
Divergence = Literal["forward", "reverse"]
DistractorOrder = Literal["fixed", "reshuffled"]


class MethodSection(Section):
    """The distillation method (arXiv:2508.15709); docs/methods.md explains it."""

    name: MethodName = Field(
        "r1",
        description="Distillation method. "
        + "; ".join(f"`{method.name}`: {method.description}" for method in METHODS.values())
        + ".",
    )
    advantageous_slot: Literal["first", "last", "auto", "random"] | int | tuple[int, ...] = Field(
        "first",
        description="Slot where the model does best (0-based); a list for several hops. `first`, `last`: these slots, "
        "in hop order; `auto`: measured on the training examples; `random`: drawn for each example, the "
        "control of all others.",
    )
    auto_slots: Literal["all"] | Count = Field(
        DEFAULT_SLOT_LIMIT,
        description="Slots to try for advantageous_slot `auto` and inference.method `reorder`, spread evenly; for "
        "several hops, the slot of the first gold document, with the others next to it. Default: 10, or "
        "all if there are fewer.",
    )
    auto_examples: int = Field(100, ge=1, description="Training examples on which these slots are measured.")
    k: int = Field(
        4, ge=0, description="Trivial slots, or ordered tuples of them for several hops, drawn for each example."
    )
    distractor_order: DistractorOrder = Field(
        "fixed",
        description="Order of the distractors in training rows. `fixed`: that of the advantageous prompt; "
        "`reshuffled`: drawn for each row.",
    )
    # These defaults depend on the fields above, which pydantic passes to a default factory in the order of declaration.
    weights: RowWeights = Field(
        default_factory=lambda settings: _spec_of(settings).weights,
        description="Weights of the rows at trivial slots. `paper`: alpha; `official`: alpha as the authors' code "
        "scales it, which also sums anchor rows instead of averaging them; `uniform`: equal; `adaptive`: "
        "more for harder rows (experimental, cross-entropies only). Default: `paper` for r1, kl+align and "
        "r1-on-policy, else `uniform`.",
    )
    anchor_weight: float = Field(
        default_factory=lambda settings: _spec_of(settings).anchor_weight,
        ge=0,
        description="Weight (lambda) of the rows at the advantageous slot. Default: 1 for r1 and r1-on-policy, else 0.",
    )
    rounds: int = Field(
        default_factory=lambda settings: _spec_of(settings).rounds,
        ge=1,
        le=100,
        description="Rounds of an on-policy method, in each of which the student answers and is then trained on its "
        "answers. Default: 2; 1 for other methods.",
    )
    view: Literal["none", "skip", "cyclic", "pose"] = Field(
        "none",
        description="Changed token positions in training rows, for methods with a cross-entropy. `skip`, `cyclic`: "
        "RPSD, a second view of every row whose positions are shifted; `pose`: a skip in the only view.",
    )
    view_weight: float = Field(
        1.0, gt=0, description="Weight of the divergence between both views, for view `skip` or `cyclic`."
    )
    # Left out of dumps, and so of fingerprints, where it is the paper's.
    divergence: Divergence = Field(
        "forward",
        exclude_if=lambda divergence: divergence == "forward",
        description="KL of methods with one. `forward`: weighted by the teacher's probabilities, as in the paper; "
        "`reverse`: by the student's, as other on-policy distillation often has it (docs/methods.md).",
    )
    alignment: Alignment = Field(
        "shifted",
        description="Positions of the logits that are distilled. `shifted`: those that predict the response; "
        "`official`: one position later, as in the authors' code.",
    )
    teacher: Literal["cached", "resident", "topk", "none"] = Field(
        "cached",
        # The default is validated too, because `_drop_unneeded_teacher` replaces it for some methods.
        validate_default=True,
        description="Where the teacher's distribution comes from. `cached`: hidden states stored with the samples; "
        "`resident`: the base model next to the student; `topk`: the sampler's most likely tokens, "
        "approximate and without a teacher stage; `none`: for every method that needs no teacher.",
    )
    # Left out of dumps, and so of fingerprints, if the teacher's prompt is the advantageous one.
    teacher_slot: Literal["advantageous", "random"] = Field(
        "advantageous",
        exclude_if=lambda slot: slot == "advantageous",
        description="Slot of the gold document in the teacher's prompt, for methods with a KL to a cached or resident "
        "teacher. `random`: drawn for each example, while the student's prompts and the seeds of its "
        "samples stay the same, as a control for the teacher's advantage.",
    )
    teacher_topk: int = Field(
        default_factory=lambda settings: _DEFAULT_TOPK if settings.get("teacher") == "topk" else 0,
        ge=0,
        description="Tokens stored at each position by teacher `topk`, where all others count as one. Default: 64; 0 "
        "for other teachers.",
    )

    @model_validator(mode="before")
    @classmethod
    def _null_leaves_open_what_the_study_fills_in(cls, settings: Any) -> Any:
        return without_null(settings, ("auto_slots", "teacher"))

    @field_validator("teacher", mode="after")
    @classmethod
    def _drop_unneeded_teacher(cls, teacher: str, info: ValidationInfo) -> str:
        # A sweep over methods names one teacher for all of them, so a teacher that is not needed is not an error.
        known = "name" in info.data and "weights" in info.data
        if known and not _needs_teacher(_spec_of(info.data), info.data["weights"]):
            return "none"
        return teacher

    @field_validator("teacher_topk", mode="after")
    @classmethod
    def _drop_topk_without_teacher(cls, teacher_topk: int, info: ValidationInfo) -> int:
        # A number of tokens that a sweep names for all methods is not an error either.
        return 0 if info.data.get("teacher") == "none" else teacher_topk

    @property
    def spec(self) -> Method:
        """The method's entry in the table."""
        return METHODS[self.name]

    @property
    def loss(self) -> Literal["kl", "ce"]:
        """The loss of a row: KL to the base model, or cross-entropy on the response."""
        return self.spec.loss

    @property
    def needs_teacher(self) -> bool:
        """Whether training uses the base model's distribution."""
        return _needs_teacher(self.spec, self.weights)

    @property
    def responses_per_example(self) -> int:
        """Responses that are sampled for an example: one, or on-policy one for each of its rows that are computed."""
        return self.computed_rows_per_example if self.spec.on_policy else 1

    @property
    def computed_rows_per_example(self) -> int:
        """Rows of an example that are computed: K, and one at the advantageous slot if it has a weight."""
        return self.k + (self.anchor_weight > 0)

    @property
    def teacher_gets_another_prompt(self) -> bool:
        """Whether the teacher gets another prompt than the one that was answered."""
        return self.spec.on_policy or self.teacher_slot == "random"

    @property
    def reserved_rows_per_example(self) -> int:
        """Rows that a global batch reserves for an example: K trivial rows and one anchor row.

        The anchor row is also reserved for R1's baselines, which do not compute it, so that they make as many steps. R2
        reserves none: the paper's batches are full without anchors.
        """
        has_anchor_row = self.spec.reserves_anchor or self.anchor_weight > 0
        return self.k + has_anchor_row

    @model_validator(mode="after")
    def _weights_fit_the_loss(self) -> "MethodSection":
        if self.weights not in self.spec.allowed_weights:
            hint = did_you_mean(self.weights, self.spec.allowed_weights)
            raise ValueError(f"weights: '{self.weights}' is not supported by method '{self.name}'{hint}")
        for name, value in {"alignment": self.alignment, "divergence": self.divergence}.items():
            if value in ("official", "reverse") and self.loss == "ce":
                raise ValueError(f"{name}: '{value}' applies to KL losses only; method '{self.name}' has loss 'ce'")
        return self

    @model_validator(mode="after")
    def _view_fits_the_loss(self) -> "MethodSection":
        if self.view != "none" and (self.loss == "kl" or self.weights != "uniform"):
            raise ValueError(
                f"view: '{self.view}' is for cross-entropies with uniform weights, not for method '{self.name}' with "
                f"weights '{self.weights}'"
            )
        return self

    @model_validator(mode="after")
    def _rows_are_left(self) -> "MethodSection":
        if not self.k and not self.anchor_weight:
            raise ValueError("k: 0 trivial slots and no weight on the advantageous one leave nothing to train on")
        if not self.k and self.loss == "kl":
            raise ValueError("k: 0 trivial slots leave the KL of the model to itself alone; set at least 1")
        return self

    @model_validator(mode="after")
    def _on_policy_is_possible(self) -> "MethodSection":
        if not self.spec.on_policy:
            if self.rounds > 1:
                raise ValueError(f"rounds: {self.rounds}, but method '{self.name}' samples once, from the base model")
            return self
        if self.teacher == "topk":
            raise ValueError(
                f"teacher: 'topk' stores what the sampler knows, which for method '{self.name}' is the student and not "
                f"the base model; set cached or resident"
            )
        if self.distractor_order != "fixed":
            raise ValueError(
                f"distractor_order: '{self.distractor_order}' would train on other prompts than those that the student "
                f"of method '{self.name}' answered; set fixed"
            )
        return self

    @model_validator(mode="after")
    def _random_teacher_slot_is_possible(self) -> "MethodSection":
        if self.teacher_slot == "advantageous":
            return self
        if self.loss == "ce":
            problem = f"the loss of method '{self.name}' has no teacher"
            if self.needs_teacher:
                problem = f"weights '{self.weights}' compare with the teacher at the advantageous slots"
            raise ValueError(f"teacher_slot: '{self.teacher_slot}', but {problem}")
        if self.teacher == "topk":
            raise ValueError(
                f"teacher_slot: '{self.teacher_slot}', but teacher 'topk' knows the answered prompt alone; set teacher "
                f"to cached or resident"
            )
        if self.distractor_order != "fixed":
            raise ValueError(
                f"teacher_slot: '{self.teacher_slot}' is the control of distractor_order 'fixed', not "
                f"'{self.distractor_order}'"
            )
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
                "alignment: 'official' distills one position after the response's end, where the sampler knows no "
                "probabilities; set teacher to cached or resident"
            )
        if self.divergence == "reverse":
            raise ValueError(
                "divergence: 'reverse' needs the teacher's probability of every token, and teacher 'topk' has some; "
                "set teacher to cached or resident"
            )
        if self.weights == "adaptive":
            raise ValueError(
                "weights: 'adaptive' needs the base model's loss on the whole response, and the sampler knows no "
                "probability of a closing token that it did not draw; set teacher to cached or resident"
            )
        return self


def _spec_of(settings: Mapping[str, Any]) -> Method:
    # Without a valid name the section is rejected anyway, so any entry will do.
    return METHODS[settings.get("name", "r1")]


def _needs_teacher(spec: Method, weights: RowWeights) -> bool:
    return spec.loss == "kl" or weights == "adaptive"
