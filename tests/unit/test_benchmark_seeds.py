"""`benchmarks.real.seeds`: changes over seeds, by hand."""

import math
import re
from typing import Any

import pytest

from benchmarks.real import combine_seeds
from benchmarks.real.combine_seeds import combine
from benchmarks.real.seeds import compare, main
from pos2distill.errors import UserError
from tests.support.predictions import predictions


def test_compare_has_the_mean_over_seeds_and_each_seed() -> None:
    """Two questions at two slots: the base is right in one of four answers, the seeds in two and in four."""
    before = predictions(3, [[1, 0], [0, 0]])
    task = compare(before, [predictions(3, [[1, 0], [1, 0]]), predictions(3, [[1, 1], [1, 1]])])
    (row,) = task["changes"]
    assert (row["documents"], row["mean"], row["by_seed"]) == (3, 0.5, [0.25, 0.75])
    assert row["mean_ci95"][0] < 0.5 < row["mean_ci95"][1]
    assert [curve["mean"] for seed in task["distilled"] for curve in seed["curves"]] == [0.5, 1.0]
    assert task["base"]["answers"] == [["10", "00"]]
    assert [seed["answers"] for seed in task["distilled"]] == [[["10", "10"]], [["11", "11"]]]


def test_compare_rejects_an_evaluation_of_other_questions() -> None:
    with pytest.raises(UserError, match="the evaluations have different questions or slots"):
        compare(predictions(3, [[1, 0], [0, 0]]), [predictions(3, [[1, 0]])])


def report(task: str, documents: int, base: float, seeds: list[float], margin: float) -> dict[str, Any]:
    """As `benchmarks.real.seeds` writes it, of one task at one prompt length."""

    def curve(value: float) -> dict[str, Any]:
        return {"mean": value, "gap_corrected": -value}

    mean = sum(seeds) / len(seeds) - base
    change = {
        "documents": documents,
        "mean_ci95": [mean - margin, mean + margin],
        "gap_corrected_ci95": [-mean - 2 * margin, -mean + 2 * margin],
    }
    compared = {
        "base": {"curves": [curve(base)]},
        "distilled": [{"curves": [curve(seed)]} for seed in seeds],
        "changes": [change],
    }
    return {"tasks": {task: compared}}


def test_combine_has_both_margins_of_the_seeds_of_all_reports() -> None:
    """Changes of .1, .3 and .2: a deviation of .1 over seeds, 4.303 of Student's, and weights of two to one."""
    two, one = report("nq", 5, 0.2, [0.3, 0.5], 0.03), report("nq, other lengths", 5, 0.1, [0.3], 0.06)
    (row,) = combine([two, one], "nq")
    assert (row["documents"], row["base"]) == (5, [0.2, 0.1])
    assert row["mean"]["by_seed"] == pytest.approx([0.1, 0.3, 0.2])
    assert row["mean"]["change"] == pytest.approx(0.2)
    over_seeds, over_questions = 4.303 * 0.1 / math.sqrt(3), (2 * 0.03 + 0.06) / 3
    assert row["mean"]["margin_over_seeds"] == pytest.approx(over_seeds)
    assert row["mean"]["margin_over_questions"] == pytest.approx(over_questions)
    margin = math.hypot(over_seeds, over_questions)
    assert row["mean"]["ci95"] == pytest.approx([0.2 - margin, 0.2 + margin])
    assert row["gap_corrected"]["change"] == pytest.approx(-0.2)
    assert row["gap_corrected"]["margin_over_questions"] == pytest.approx(2 * over_questions)


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([report("nq", 5, 0, [1, 2], 0.1), report("nq", 10, 0, [1], 0.1)], "no prompt length of it in common"),
        ([report("nq", 5, 0, [1], 0.1)], "one seed in all"),
        ([{"tasks": {f"nq {i}": report("nq", 5, 0, [1, 2], 0.1)["tasks"]["nq"] for i in (1, 2)}}], "5 documents twice"),
    ],
)
def test_combine_rejects_what_it_cannot_combine(reports: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        combine(reports, "nq")


def test_combine_seeds_rejects_reports_of_other_scripts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("nope", "nq_smollm2_seed_2"):
        monkeypatch.setattr("sys.argv", ["combine_seeds", name, "--task", "nq", "--name", "combined"])
        assert combine_seeds.main() == 2
        assert capsys.readouterr().err.endswith(f"{name}.json: expected a report of benchmarks.real.seeds\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "nope"], r"--name: .*nope\.json: no such report to draw; give --task to write it"),
        (["--name", "nq_seeds_gpu", "--stages", "folder"], "--stages: needs --task"),
    ],
)
def test_wrong_arguments_are_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["seeds", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert re.search(message, capsys.readouterr().err)
