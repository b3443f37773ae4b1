"""What a study refuses before its first stage."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from pipelines.commands import run_study
from pos2distill.config import Recipe
from pos2distill.errors import UserError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"method": {"teacher": "topk", "teacher_topk": 301}},
            r"^method.teacher_topk: 301, but .+ has 300 tokens in all$",
        ),
        (
            {"training": {"lora": {"targets": ["q_prj"]}}},
            r"^training.lora.targets: q_prj: not a linear layer of .+; did you mean 'q_proj'\?$",
        ),
    ],
)
def test_what_only_the_model_can_refuse_is_refused_first(
    make_recipe: Callable[..., Recipe], overrides: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=message):
        run_study(make_recipe(**overrides))
    assert capsys.readouterr().out == ""  # no stage was run


def test_a_tracker_that_is_not_installed_is_told_first(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"^runtime.trackers: wandb is not installed"):
        run_study(make_recipe(runtime={"trackers": ["wandb"]}))
    assert capsys.readouterr().out == ""
