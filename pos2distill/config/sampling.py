"""The settings of sampling: how responses are sampled, and which of them are kept."""

from typing import Literal

from pydantic import Field, model_validator

from pos2distill.config.base import Section


class SamplingSection(Section):
    """How responses are sampled for training, and which of them are kept."""

    temperature: float = Field(0.0, ge=0, description="Sampling temperature. 0: greedy.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the most likely tokens that together have this probability. 1: from all tokens.",
    )
    max_new_tokens: int = Field(
        100,
        ge=1,
        description="Maximum number of new tokens per response. Default: 100; 512 for data.prompt reasoning or coc, or "
        "data.metric em.",
    )
    keep: Literal["correct", "all"] = Field(
        "correct",
        description="Responses to train on: the `correct` ones or `all`. Default: `correct`; `all` for r1-on-policy, "
        "which also learns from its mistakes.",
    )
    candidates: int = Field(
        1,
        ge=1,
        le=1000,
        description="Responses that are sampled for each prompt, of which the one that agrees most with the others is "
        "used (SeaLong, docs/methods.md).",
    )

    @model_validator(mode="after")
    def _greedy_has_no_choice(self) -> "SamplingSection":
        if self.candidates > 1 and not self.temperature:
            raise ValueError(
                f"candidates: {self.candidates} greedy responses would all be the same; set sampling.temperature"
            )
        return self
