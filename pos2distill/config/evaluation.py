"""The settings of an evaluation."""

from typing import Any, Literal

from pydantic import Field, model_validator

from pos2distill.config.base import Count, Section, without_null
from pos2distill.config.method import DEFAULT_SLOT_LIMIT


class EvaluationSection(Section):
    """The evaluation: greedy answers by the gold document's slot."""

    slots: Literal["all", "pairs"] | Count | tuple[int | tuple[int, ...], ...] = Field(
        "all",
        description="all; a number of slots spread evenly from first to last; a list (0-based). For several hops: "
        "every ordered tuple of these; pairs: the paper's 12 in their three groups. Default: all; for several hops "
        "pairs",
    )
    other_documents: tuple[int, ...] = Field((), description="further prompt lengths, in documents")
    other_slots: Literal["all", "pairs"] | Count = Field(
        default_factory=lambda settings: min([DEFAULT_SLOT_LIMIT, *settings.get("other_documents", ())]),
        description="slots at each further length. Default: 10, or as many as the shortest of them has; of several "
        "hops pairs",
    )
    max_new_tokens: int = Field(100, ge=1, description="of an answer; 512 for data.prompt reasoning or coc")
    distractor_orders: int = Field(
        1,
        ge=1,
        description="orders of the distractors in which every question is asked at each slot: the data set's, then "
        "random ones, all of them different; at most (documents - gold documents)!. With several, the report has the "
        "fraction of questions that an order breaks",
    )
    retriever_ranks: tuple[float, ...] = Field(
        (),
        description="how often your retriever ranks the gold document first, second, and so on; numbers in proportion. "
        "The results then have the accuracy to expect from it",
    )
    # Left out of dumps, and so of fingerprints, where there are none.
    reference_prompts: bool = Field(
        False,
        exclude_if=lambda asked: not asked,
        description="ask every question without documents (closed-book) and with its gold documents alone too: what "
        "the model knows, and what it can answer where there is nothing to find",
    )
    also_evaluate: tuple[str, ...] = Field(
        (), description="other recipes, by name or path, on whose data both models are evaluated too"
    )
    bootstrap_samples: int = Field(
        2000, ge=100, le=100_000, description="bootstrap samples for the confidence intervals"
    )
    seed: int = Field(
        0,
        ge=0,
        lt=1 << 63,
        description="of the choice of the evaluation examples and of their distractors. Default: the study's seed; a "
        "number of its own evaluates all seeds of a sweep on the same questions, and the base model once",
    )

    @model_validator(mode="before")
    @classmethod
    def _null_leaves_open_what_the_study_fills_in(cls, settings: Any) -> Any:
        return without_null(settings, ("slots", "seed"))
