"""Methods against position bias that need no training (`inference`), and the search of LPES."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pos2distill.config.base import Section
from pos2distill.config.inference_table import INFERENCE_METHODS, InferenceMethod, InferenceMethodName

Scale = Annotated[float, Field(ge=0.25, le=16)]


class MsPoeSection(Section):
    """Ms-PoE (arXiv:2403.04797): every attention head has a RoPE scale of its own, by how it attends to the prompt."""

    smallest: Scale = Field(1.2, description="RoPE scale of the attention head that attends most to single positions.")
    largest: Scale = Field(1.8, description="RoPE scale of the attention head that attends least to single positions.")
    spacing: Literal["closed", "released"] = Field(
        "closed",
        description="Spacing of the scales between the two. `closed`: the last head has exactly the largest; "
        "`released`: as in the authors' code, which divides by the number of heads and never reaches it.",
    )
    ranking: Literal["rank", "released"] = Field(
        "rank",
        description="How heads get their scales. `rank`: by their rank, as in the paper; `released`: by the inverse "
        "permutation, as in the authors' code.",
    )
    first_layer: int = Field(2, ge=0, description="First layer that is changed, counted from 0.")

    @model_validator(mode="after")
    def _smallest_is_at_most_largest(self) -> "MsPoeSection":
        if self.smallest > self.largest:
            raise ValueError(f"smallest: {self.smallest:g} is above largest ({self.largest:g})")
        return self


class SearchSection(Section):
    """The search of LPES. Its numbers are not published with certainty (docs/inference_methods.md)."""

    strategy: Literal["genetic", "random", "uniform"] = Field(
        "genetic",
        description="Search strategy. `genetic`: new candidates from the fittest ones; `random` (control): as many "
        "candidates, without a choice of parents; `uniform` (control): `population` scales, each for all "
        "layers.",
    )
    curve: Literal["bezier", "linear", "step"] = Field(
        "bezier", description="Shape of the curve that gives each layer its scale."
    )
    control_points: int = Field(
        4, ge=2, le=100, description="Control points of the curve. 4 make a Bezier curve cubic."
    )
    monotone: bool = Field(True, description="Let scales only rise, or only fall, from layer to layer.")
    smallest: Scale = Field(1.0, description="Smallest scale of a candidate.")
    largest: Scale = Field(
        2.0,
        description="Largest scale of a candidate. A small model may answer nothing with scales far above 1 "
        "(SmolLM2-135M: above about 1.4), so that a search in the whole range compares few candidates.",
    )
    gamma: float = Field(
        0.25,
        ge=0,
        description="Weight of the GAP in a candidate's fitness, mean - gamma * GAP. Above 1 / slots, scales that "
        "break the model (mean and GAP 0) can be fitter than a model with a large GAP.",
    )
    examples: int = Field(200, ge=1, description="Training examples on which candidates are measured.")
    slots: int = Field(
        3,
        ge=2,
        description="Slots of the gold document at which candidates are measured, spread evenly from first to last.",
    )
    generations: int = Field(
        40, ge=1, le=10_000, description="Generations of the search. Strategy `uniform` has only one."
    )
    population: int = Field(
        64, ge=2, le=10_000, description="Candidates in the first generation, including the unscaled model."
    )
    parents: int = Field(32, ge=1, description="Fittest candidates so far, from which the next generation is made.")
    mutations: int = Field(
        16, ge=0, le=10_000, description="Candidates made by mutation in each generation after the first."
    )
    crossovers: int = Field(
        16, ge=0, le=10_000, description="Candidates made by crossover in each generation after the first."
    )
    mutation_rate: float = Field(
        0.3, gt=0, le=1, description="Probability with which a mutation changes each number of a candidate."
    )
    mutation_step: float = Field(0.01, gt=0, description="Standard deviation of the changes that a mutation makes.")

    @property
    def rounds(self) -> int:
        """Generations that are measured."""
        return 1 if self.strategy == "uniform" else self.generations

    @property
    def children(self) -> int:
        """New candidates of every generation but the first."""
        return self.mutations + self.crossovers

    @model_validator(mode="after")
    def _numbers_fit(self) -> "SearchSection":
        if self.smallest >= self.largest:
            raise ValueError(f"smallest: {self.smallest:g} is not below largest ({self.largest:g})")
        if self.rounds > 1 and not self.children:
            raise ValueError("mutations: 0, and no crossovers; later generations would be empty")
        # The controls choose no parents.
        if self.strategy == "genetic" and self.parents > self.population:
            raise ValueError(f"parents: {self.parents}, but a population of {self.population}; lower parents")
        return self


class InferenceSection(Section):
    """How the model answers: as it is, or with a method that needs no training (docs/inference_methods.md)."""

    method: InferenceMethodName = Field(
        "none",
        description="Inference-time method. "
        + "; ".join(f"`{method.name}`: {method.description}" for method in INFERENCE_METHODS.values())
        + ".",
    )
    scales: tuple[Scale, ...] = Field(
        (),
        description="RoPE scales. Method `uniform_scale`: one number; `lpes`: one for each layer, or none to search "
        "them.",
    )
    search: SearchSection = Field(SearchSection(), description="Search of the scales by method `lpes`.")
    ms_poe: MsPoeSection = Field(MsPoeSection(), description="Settings of method `ms_poe`.")
    bases: tuple[Scale, ...] = Field(
        (1.0, 1.75, 1.8, 1.9, 2.0, 2.5),
        min_length=2,
        description="RoPE bases that method `attention_buckets` combines, as multiples of the model's own.",
    )

    @model_validator(mode="after")
    def _scales_fit_the_method(self) -> "InferenceSection":
        if self.method == "uniform_scale" and len(self.scales) != 1:
            given = f"{len(self.scales)} numbers" if self.scales else "none"
            raise ValueError(f"scales: 'uniform_scale' needs one number, for example [1.1], got {given}")
        if self.method == "lpes" and len(self.scales) == 1:
            raise ValueError(
                "scales: 'lpes' needs one for each layer, got 1 number; for one scale, set inference.method to "
                "uniform_scale"
            )
        if self.scales and self.spec.changes != "scales":
            raise ValueError(f"scales: method '{self.method}' has none; set inference.method to uniform_scale or lpes")
        return self

    @property
    def spec(self) -> InferenceMethod:
        """The method's entry in the table."""
        return INFERENCE_METHODS[self.method]

    @property
    def reorders(self) -> bool:
        """Whether documents are ordered by a curve that is measured before."""
        return self.spec.changes == "order"

    @property
    def searches_scales(self) -> bool:
        """Whether the scales are searched before anything else runs."""
        return self.method == "lpes" and not self.scales

    @property
    def measures_slots(self) -> bool:
        """Whether answers to training examples are measured by slot before the evaluation."""
        return self.reorders or self.searches_scales
