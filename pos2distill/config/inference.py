"""Methods against position bias that need no training (`inference`), and the search of LPES."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pos2distill.config.base import Section
from pos2distill.config.inference_table import INFERENCE_METHODS, InferenceMethod, InferenceMethodName

Scale = Annotated[float, Field(ge=0.25, le=16)]


class MsPoeSection(Section):
    """Ms-PoE (arXiv:2403.04797): every attention head has a RoPE scale of its own, by how it attends to the prompt."""

    smallest: Scale = Field(1.2, description="scale of the head that attends most to single positions")
    largest: Scale = Field(1.8, description="scale of the head that attends to them least")
    spacing: Literal["closed", "released"] = Field(
        "closed",
        description="between the two. closed: the last head has exactly the largest; released: as the authors' code, "
        "which divides by the number of heads and never reaches it",
    )
    ranking: Literal["rank", "released"] = Field(
        "rank",
        description="rank: a head's scale is that of its rank, as the paper says; released: the authors' code takes "
        "the inverse permutation",
    )
    first_layer: int = Field(2, ge=0, description="layers before it, counted from 0, stay as they are")

    @model_validator(mode="after")
    def _smallest_is_at_most_largest(self) -> "MsPoeSection":
        if self.smallest > self.largest:
            raise ValueError(f"smallest: {self.smallest:g} is above largest ({self.largest:g})")
        return self


class SearchSection(Section):
    """The search of LPES. Its numbers are not published with certainty (docs/inference_methods.md)."""

    strategy: Literal["genetic", "random", "uniform"] = Field(
        "genetic",
        description="random: as many candidates without a choice of parents; uniform: `population` scales, each for "
        "all layers. Both are controls",
    )
    curve: Literal["bezier", "linear", "step"] = Field("bezier", description="of the scale over the layers")
    control_points: int = Field(4, ge=2, le=100, description="of the curve; 4 make a Bezier curve cubic")
    monotone: bool = Field(True, description="scales only rise, or only fall, from layer to layer")
    smallest: Scale = Field(1.0, description="of a candidate's scales")
    largest: Scale = Field(
        2.0,
        description="of a candidate's scales. A small model may answer nothing with scales far above 1 (SmolLM2-135M: "
        "above about 1.4), so that a search in the whole range compares few candidates",
    )
    gamma: float = Field(
        0.25,
        ge=0,
        description="a candidate's fitness is mean - gamma * GAP. Above 1 / slots, scales that break the model (mean "
        "and GAP 0) can be fitter than a model with a large GAP",
    )
    examples: int = Field(200, ge=1, description="training examples that candidates are measured on")
    slots: int = Field(3, ge=2, description="slots of the gold document, spread evenly from first to last")
    generations: int = Field(40, ge=1, le=10_000, description="not of strategy uniform, which has one")
    population: int = Field(
        64, ge=2, le=10_000, description="candidates of the first generation, the unscaled model among them"
    )
    parents: int = Field(32, ge=1, description="fittest candidates so far, of which the next generation is made")
    mutations: int = Field(16, ge=0, le=10_000, description="of a generation")
    crossovers: int = Field(16, ge=0, le=10_000, description="of a generation")
    mutation_rate: float = Field(
        0.3, gt=0, le=1, description="fraction of a candidate's numbers that a mutation changes"
    )
    mutation_step: float = Field(0.01, gt=0, description="standard deviation of a change")

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
        "none", description="; ".join(f"{method.name}: {method.description}" for method in INFERENCE_METHODS.values())
    )
    scales: tuple[Scale, ...] = Field(
        (),
        description="RoPE scales. uniform_scale: one number; lpes: one for each layer, or none to search them",
    )
    search: SearchSection = SearchSection()
    ms_poe: MsPoeSection = MsPoeSection()
    bases: tuple[Scale, ...] = Field(
        (1.0, 1.75, 1.8, 1.9, 2.0, 2.5),
        min_length=2,
        description="attention_buckets: multiples of the model's own RoPE base",
    )

    @model_validator(mode="after")
    def _scales_fit_the_method(self) -> "InferenceSection":
        if self.method == "uniform_scale" and len(self.scales) != 1:
            given = f"{len(self.scales)} numbers" if self.scales else "none"
            raise ValueError(f"scales: 'uniform_scale' needs one number, for example [1.5], got {given}")
        if self.method == "lpes" and len(self.scales) == 1:
            raise ValueError(
                "scales: 'lpes' needs one for each layer; for one scale, set inference.method to uniform_scale"
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
