"""The questions of a study."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from pos2distill.config.base import Section
from pos2distill.config.formats import FORMATS, Format, FormatName
from pos2distill.config.template import TemplateSection

PromptStyle = Literal["qa", "kv", "plain", "coc", "reasoning", "template"]
Metric = Literal["sub_em", "substring", "em"]

_METRICS: dict[str, Metric] = {"kv": "substring", "reasoning": "em", "coc": "em"}
"""The metric by prompt, where it is not sub_em."""


def _default_prompt(settings: Mapping[str, Any]) -> PromptStyle:
    if settings.get("template"):
        return "template"
    return "kv" if settings.get("format") == "kv" else "qa"


def _default_metric(settings: Mapping[str, Any]) -> Metric:
    template: TemplateSection | None = settings.get("template")
    if template is not None and template.asks_for_conclusion:
        return "em"
    return _METRICS.get(settings.get("prompt", ""), "sub_em")


class DataSection(Section):
    """The questions, and how prompts show them."""

    format: FormatName = Field(description="Format of the data (docs/data.md).")
    path: str = Field(
        description="Path or fsspec URL of a data file, plain or compressed, or a pattern that matches several files "
        "(docs/data.md)."
    )
    # Before `prompt`, whose default follows from it. Left out of dumps, and so of fingerprints, where there is none.
    template: TemplateSection | None = Field(
        None,
        exclude_if=lambda section: section is None,
        description="Custom prompt template instead of a built-in prompt.",
    )
    prompt: PromptStyle = Field(
        default_factory=_default_prompt,
        description="Wording of prompts. `qa`, `kv`: the benchmarks' own (Liu et al. 2024); `reasoning`: a chain of "
        "thought as in the paper's R2; `coc`: one with a source for every claim; `plain`: documents, then "
        "the question; `template`: data.template. Default: `template` if that section is set, `kv` for "
        "format kv, else `qa`.",
    )
    metric: Metric = Field(
        default_factory=_default_metric,
        description="When an answer is correct. `sub_em`: its first line contains a reference answer, after SQuAD's "
        "normalization; `substring`: its whole text contains one in lower case, as in the key-value "
        "benchmark; `em`: the text after 'The answer is:' equals one. Default: `substring` for prompt kv, "
        "`em` for reasoning, coc and templates that ask for 'The answer is', else `sub_em`.",
    )
    hops: tuple[int, ...] = Field(
        (1,), description="Gold documents per example. For files that mix numbers of hops, the numbers to use."
    )
    documents: int = Field(20, ge=2, le=100_000, description="Documents in each prompt, including the gold documents.")
    distractors: Literal["given", "random"] = Field(
        "given",
        description="Where distractors come from. `given`: the record; one with too few is skipped, or in format "
        "`jsonl` rejected; `random`: missing ones are drawn from other examples; they are easier than retrieved ones, "
        "so results are named after them.",
    )
    train_examples: int = Field(
        300,
        ge=0,
        description="Examples to train on: sampling continues until this many answers are kept (sampling.keep). 0: "
        "only evaluate.",
    )
    train_candidates: int = Field(
        default_factory=lambda settings: 4 * settings.get("train_examples", 300),
        description="Maximum number of examples to sample to obtain train_examples. Default: four times "
        "train_examples.",
    )
    eval_examples: int = Field(
        500,
        ge=1,
        description="Examples for evaluation, each evaluated at the slots of `evaluation.slots`. None is trained on.",
    )
    eval_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Fraction of all questions that is reserved for evaluation, by a hash of the question. 1: only "
        "evaluate.",
    )
    answer_in_gold: bool = Field(
        True, description="Reject records of one hop whose gold document contains none of the answers."
    )

    @property
    def spec(self) -> Format:
        """The format's entry in the table."""
        return FORMATS[self.format]

    @property
    def wording(self) -> TemplateSection | PromptStyle:
        """The template, or the name of a built-in one."""
        return self.template or self.prompt

    @model_validator(mode="after")
    def _one_wording(self) -> "DataSection":
        if self.template is not None and self.prompt != "template":
            raise ValueError(
                f"prompt: '{self.prompt}', but data.template is the prompt; leave data.prompt out or set it to template"
            )
        if self.template is None and self.prompt == "template":
            raise ValueError("prompt: 'template' needs the section data.template")
        return self

    @model_validator(mode="after")
    def _hops_fit_the_format(self) -> "DataSection":
        # No published data set that is supported has more than four hops.
        if not self.hops or len(set(self.hops)) != len(self.hops) or min(self.hops) < 1 or max(self.hops) > 4:
            raise ValueError("hops: expected numbers of gold documents from 1 to 4, each of them once")
        if self.spec.hops == "one" and self.hops != (1,):
            raise ValueError(f"hops: records of format '{self.format}' have one gold document; set [1]")
        if self.spec.hops == "several" and 1 in self.hops:
            raise ValueError(f"hops: records of format '{self.format}' have several gold documents; set [2]")
        if 1 in self.hops and len(self.hops) > 1:
            raise ValueError("hops: one hop and several cannot be mixed; they are scored and placed differently")
        if max(self.hops) >= self.documents:
            raise ValueError(f"hops: {max(self.hops)} gold documents leave no distractor among {self.documents}")
        return self

    @model_validator(mode="after")
    def _metric_fits_the_prompt(self) -> "DataSection":
        # `plain` does not ask for a form of the answer: the model may have learned either. So may one with a template.
        is_free = self.prompt in ("plain", "template")
        if (self.metric == "em") != (self.prompt in ("reasoning", "coc")) and not is_free:
            asks = "does not ask" if self.metric == "em" else "asks"
            other = _METRICS.get(self.prompt, "sub_em")
            raise ValueError(
                f"metric: '{self.metric}', but prompt '{self.prompt}' {asks} for 'The answer is:'; "
                f"set data.metric={other} or another data.prompt"
            )
        return self

    @model_validator(mode="after")
    def _candidates_suffice(self) -> "DataSection":
        if self.train_candidates < self.train_examples:
            raise ValueError(
                f"train_candidates: {self.train_candidates} examples cannot give {self.train_examples} to train on "
                f"(data.train_examples)"
            )
        return self
