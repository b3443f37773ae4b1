import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import command_line, commands
from pipelines.terminal import _bar
from pos2distill.config import Recipe
from pos2distill.errors import GateError


@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "█████████·········"), ("ascii", "#########.........")])
def test_bar_has_characters_of_the_terminal(monkeypatch: pytest.MonkeyPatch, encoding: str, bar: str) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert _bar(0.5) == bar


@pytest.fixture
def recipe_path(make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a study whose stages print a line and make nothing."""
    make_recipe()
    monkeypatch.setattr(commands, "run_sample", lambda recipe: print("a line for people"))
    monkeypatch.delenv("POS2DISTILL_QUIET", raising=False)
    return str(tmp_path / "recipe.yaml")


def test_json_is_all_that_is_on_stdout(recipe_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["sample", recipe_path, "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["command"] == "sample"
    assert [study["stages"] for study in result["studies"]] == [{}]
    assert captured.err == "a line for people\n"


def test_quiet_prints_nothing(
    recipe_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POS2DISTILL_QUIET", "0")  # restored after the test
    assert command_line.main(["sample", recipe_path, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_json_is_printed_for_a_gate_that_fails_too(
    recipe_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(recipe: Recipe) -> None:
        raise GateError("too large")

    monkeypatch.setattr(commands, "run_evaluate", fail)
    assert command_line.main(["evaluate", recipe_path, "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["curves"] == {}
    assert captured.err == "gate: too large\n"
