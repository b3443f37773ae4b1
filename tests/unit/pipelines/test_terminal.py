import io
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import command_line
from pipelines.terminal import print_comparison, print_curve, print_evaluation, print_sweep
from pos2distill.config import Recipe
from pos2distill.errors import GateError
from pos2distill.evaluation.sweep import Estimate, ModelEstimates, SweepRow, TaskEstimates
from tests.support.commands import replace_command
from tests.support.reports import evaluation_inputs, report_inputs, with_gaps


@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "█████████·········"), ("ascii", "#########.........")])
def test_print_curve_draws_bars_of_characters_that_the_terminal_has(
    monkeypatch: pytest.MonkeyPatch, encoding: str, bar: str
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    print_curve("base", replace(report_inputs().main.after, slots=(0,), accuracy_by_slot=(0.5,)))
    terminal.seek(0)
    assert f"       1  0.50 {bar}\n" in terminal.readlines()


def test_print_sweep_shows_every_setting_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the task that was trained on, which is the first."""
    rows = []
    for label, after in (("r1", 0.75), ("learning rate 0.001", 0.5)):
        base, trained = (
            ModelEstimates(Estimate(mean, 0, 1), Estimate(0.25, 0, 1), 0.2, None, {}) for mean in (0.5, after)
        )
        change = Estimate(after - 0.5, after - 0.6, after - 0.4)
        task = TaskEstimates(base, trained, change, Estimate(0, 0, 0))
        rows.append(SweepRow(label, 1, {"as trained": task, "40 documents": replace(task, before=trained)}))
    print_sweep(rows)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "setting              mean before  after  difference               GAP before  after",
        "r1                         0.500  0.750  +0.250 [+0.150, +0.350]       0.250  0.250",
        "learning rate 0.001        0.500  0.500  +0.000 [-0.100, +0.100]       0.250  0.250",
        "",
    ]


def test_print_comparison_shows_gaps_with_interval_and_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    main = with_gaps(report_inputs().main)
    intervals: dict[str, Any] = {
        "ci95": (0.25, 0.75),
        "by_group": {"reversed": 0.5},
        "by_group_ci95": {"reversed": (0.25, 0.75)},
    }
    main = replace(main, before=replace(main.before, **intervals), after=replace(main.after, **intervals))
    print_comparison(main)
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("    reversed  0.500 [0.250, 0.750] 0.500 [0.250, 0.750]")
    assert lines[first + 1 : first + 4] == [
        "    mean  0.500 [0.250, 0.750]     0.833 [0.250, 0.750]",
        "     GAP  0.350 [0.250, 0.450]     0.100 [above 0, 0.200]",
        "          corrected 0.330          corrected -0.010",
    ]


def test_print_curve_shows_the_gap_with_interval_and_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    print_curve("base", with_gaps(report_inputs().main).after)
    assert "     GAP  0.100 [above 0, 0.200], corrected -0.010" in capsys.readouterr().out.splitlines()


def test_print_comparison_and_curve_show_no_sign_at_a_corrected_gap_of_0(capsys: pytest.CaptureFixture[str]) -> None:
    main = report_inputs().main
    before, after = (replace(curve, gap_corrected=-0.0004) for curve in (main.before, main.after))
    print_comparison(replace(main, before=before, after=after))
    print_curve("base", after)
    printed = capsys.readouterr().out
    assert printed.count("corrected 0.000") == 3
    assert "-0.000" not in printed


def test_print_evaluation_shows_what_a_retriever_does(capsys: pytest.CaptureFixture[str]) -> None:
    task = report_inputs().tasks[0]
    evaluation = evaluation_inputs(task, 1.0, 1.0).evaluation
    evaluation = replace(evaluation, expected={"accuracy": 0.75, "ci95": (0.5, 0.875)})
    print_evaluation("base", evaluation)
    line = "expected    0.750 [0.500, 0.875] with the gold document ranked as evaluation.retriever_ranks says"
    assert line in capsys.readouterr().out.splitlines()
    print_evaluation("base", evaluation_inputs(task).evaluation)
    assert "expected" not in capsys.readouterr().out


def test_accuracy_without_positions_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = report_inputs()
    base, distilled = ({"accuracy": value, "ci95": (value - 0.25, value + 0.125)} for value in (0.25, 0.75))
    evaluation = evaluation_inputs(inputs.tasks[0]).evaluation
    print_evaluation("base", replace(evaluation, references={"closed_book": base, "gold_alone": distilled}))
    lines = capsys.readouterr().out.splitlines()
    assert "reference   0.250 [0.000, 0.375] without documents" in lines
    assert "reference   0.750 [0.500, 0.875] gold documents alone" in lines
    print_comparison(replace(inputs.main, references={"gold_alone": {"base": base, "distilled": distilled}}))
    line = "          0.250 [0.000, 0.375]     0.750 [0.500, 0.875] gold documents alone"
    assert line in capsys.readouterr().out.splitlines()


def test_print_evaluation_shows_tokens_only_with_both_counts(capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = evaluation_inputs(report_inputs().tasks[0]).evaluation
    print_evaluation("base", replace(evaluation, counts={"prompt_tokens": 480, "answer_tokens": 12}))
    assert "tokens      480 of prompts, 12 of answers" in capsys.readouterr().out.splitlines()
    for name in ("prompt_tokens", "answer_tokens"):
        print_evaluation("base", replace(evaluation, counts={name: 480}))
        assert "tokens " not in capsys.readouterr().out


@pytest.fixture
def recipe_path(make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a study whose stages print a line and make nothing."""
    make_recipe()
    replace_command(monkeypatch, "sample", lambda *_: print("a line for people"))
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
    monkeypatch.setattr("pipelines.progress_bar._quiet", threading.Event())  # restored after the test
    assert command_line.main(["sample", recipe_path, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_json_is_printed_for_a_gate_that_fails_too(
    recipe_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise GateError("too large")

    replace_command(monkeypatch, "evaluate", fail)
    assert command_line.main(["evaluate", recipe_path, "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["curves"] == {}
    assert captured.err == "gate failed: too large\n"
