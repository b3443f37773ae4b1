"""The settings of an evaluation."""

from typing import Any, Literal

from pydantic import Field, model_validator

from pos2distill.config.base import Count, Section, without_null
from pos2distill.config.method import DEFAULT_SLOT_LIMIT


class EvaluationSection(Section):
    """The evaluation: greedy answers by the gold document's slot."""

    slots: Literal["all", "pairs"] | Count | tuple[int | tuple[int, ...], ...] = Field(
        "all",
        description="Slots to evaluate: `all`, a number of slots spread evenly from first to last, or a list "
        "(0-based); for several hops, every ordered tuple of these, or `pairs`, the paper's 12 in their "
        "three groups. Default: `all`; `pairs` for several hops.",
    )
    other_documents: tuple[int, ...] = Field((), description="Additional prompt lengths to evaluate, in documents.")
    other_slots: Literal["all", "pairs"] | Count = Field(
        default_factory=lambda settings: min([DEFAULT_SLOT_LIMIT, *settings.get("other_documents", ())]),
        description="Slots to evaluate at each additional prompt length. Default: 10, or as many as the shortest of "
        "these lengths has; `pairs` for several hops.",
    )
    max_new_tokens: int = Field(
        100,
        ge=1,
        description="Maximum number of new tokens per answer. Default: 100; 512 for data.prompt reasoning or coc, or "
        "data.metric em.",
    )
    distractor_orders: int = Field(
        1,
        ge=1,
        description="Orders of the distractors in which every question is asked at each slot: the data set's, then "
        "distinct random ones; at most (documents - gold documents)!. With several, the report has the "
        "fraction of questions that are correct in one order and wrong in another.",
    )
    retriever_ranks: tuple[float, ...] = Field(
        (),
        description="Relative frequencies with which your retriever ranks the gold document first, second, and so on. "
        "The results then include the accuracy to expect with this retriever.",
    )
    # Left out of dumps, and so of fingerprints, where there are none.
    reference_prompts: bool = Field(
        False,
        exclude_if=lambda asked: not asked,
        description="Also ask every question without documents (closed-book) and with its gold documents alone: what "
        "the model knows, and what it can answer where there is nothing to find.",
    )
    also_evaluate: tuple[str, ...] = Field(
        (), description="Other recipes, by name or path, on whose data both models are evaluated too."
    )
    bootstrap_samples: int = Field(
        2000, ge=100, le=100_000, description="Bootstrap samples for the confidence intervals."
    )
    seed: int = Field(
        0,
        ge=0,
        lt=1 << 63,
        description="Seed for the choice of the evaluation examples and of their distractors. Default: the study's "
        "seed; a fixed number evaluates all studies of a sweep over seeds on the same questions, and the "
        "base model once.",
    )

    @model_validator(mode="before")
    @classmethod
    def _null_leaves_open_what_the_study_fills_in(cls, settings: Any) -> Any:
        return without_null(settings, ("slots", "seed"))
