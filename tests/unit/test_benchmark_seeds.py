"""`benchmarks.real.seeds`: changes over seeds, by hand."""

import re

import pytest

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
