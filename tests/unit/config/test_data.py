from collections.abc import Callable

import pytest

from pos2distill.config import (
    Recipe,
)
from pos2distill.errors import UserError


@pytest.mark.parametrize(
    ("prompt", "metric"),
    [("qa", "sub_em"), ("plain", "sub_em"), ("kv", "substring"), ("coc", "em"), ("reasoning", "em")],
)
def test_metric_is_the_prompts_own(load: Callable[..., Recipe], prompt: str, metric: str) -> None:
    assert load(f"data.prompt={prompt}").study.data.metric == metric


@pytest.mark.parametrize(("form", "prompt"), [("kv", "kv"), ("nq", "qa"), ("jsonl", "qa")])
def test_prompt_is_the_formats_own(load: Callable[..., Recipe], form: str, prompt: str) -> None:
    assert load(f"data={{format: {form}, path: x}}").study.data.prompt == prompt
    assert load(f"data={{format: {form}, path: x, prompt: plain}}").study.data.prompt == "plain"
    assert (
        load(f"data={{format: {form}, path: x, template: {{user: '{{documents}} {{question}}'}}}}").study.data.prompt
        == "template"
    )


def test_metric_must_fit_the_prompt(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"data.metric: 'sub_em', but prompt 'coc' asks for 'The answer is:'; set data"):
        load("data.prompt=coc", "data.metric=sub_em")


def test_study_several_numbers_of_hops_require_pairs(load: Callable[..., Recipe]) -> None:
    mixed = ("data.format=musique", "data.hops=[2, 3]")
    assert load(*mixed).study.data.hops == (2, 3)
    with pytest.raises(UserError, match=r"evaluation.slots: of several numbers of hops .* only 'pairs' are possible"):
        load(*mixed, "evaluation.slots=3")
    with pytest.raises(UserError, match=r"method.advantageous_slot: 'auto' requires one number of hops"):
        load(*mixed, "method.advantageous_slot=auto")
    with pytest.raises(UserError, match=r"inference.method: 'reorder' requires one number of hops \(data.hops\)"):
        load(*mixed, "inference.method=reorder")
