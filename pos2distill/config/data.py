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

    format: FormatName = Field(description="see docs/data.md")
    path: str = Field(
        description="a path or fsspec URL of a file, plain or compressed, or a pattern of several (docs/data.md)"
    )
    # Before `prompt`, whose default follows from it. Left out of dumps, and so of fingerprints, where there is none.
    template: TemplateSection | None = Field(None, exclude_if=lambda section: section is None)
    prompt: PromptStyle = Field(
        default_factory=_default_prompt,
        description="wording: qa and kv are the benchmarks' own (Liu et al. 2024); reasoning: a chain of thought as in "
        "the paper's R2; coc: one with a source for every claim; plain: documents, then the question; template: that "
        "of data.template. Default: template if there is that section, kv for format kv, else qa",
    )
    metric: Metric = Field(
        default_factory=_default_metric,
        description="sub_em: the first line contains an answer, after SQuAD's normalization; substring: the whole text "
        "contains an answer, in lower case, as the key-value benchmark judges; em: the text after 'The answer is:' "
        "equals an answer. Default: substring for prompt kv, em for reasoning, coc and a template that asks for 'The "
        "answer is', else sub_em",
    )
    hops: tuple[int, ...] = Field(
        (1,), description="gold documents of an example; for files that mix numbers of hops, the numbers to use"
    )
    documents: int = Field(20, ge=2, description="documents in a prompt")
    distractors: Literal["given", "random"] = Field(
        "given",
        description="given: those of the record, and a record with too few is refused; random: the missing ones are "
        "drawn from other examples. Random distractors are easier than retrieved ones, so results are named after them",
    )
    train_examples: int = Field(
        300,
        ge=0,
        description="examples to train on: sampling continues until as many answers are kept (sampling.keep); 0: only "
        "evaluate",
    )
    train_candidates: int = Field(
        default_factory=lambda settings: 4 * settings.get("train_examples", 300),
        description="the most examples to sample for them; all if the file has fewer. Default: four times as many",
    )
    eval_examples: int = Field(500, ge=1, description="other examples, evaluated at every slot")
    eval_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="fraction of all questions that is for evaluation, by a hash of the question; 1: only evaluate",
    )
    answer_in_gold: bool = Field(
        True, description="refuse a record of one hop whose gold document contains none of the answers"
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
