"""Accuracy with plain transformers: what is measured, and what is refused before a model is loaded."""

from pathlib import Path

import pytest

from examples.smollm2 import measure
from examples.smollm2.facts import make_record, write_records


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("facts") / "facts.jsonl.gz"
    write_records((make_record(0, index, 4) for index in range(6)), path)
    return path


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr("sys.argv", ["measure", *map(str, arguments)])
    return measure.main()


def test_main_prints_a_line_for_each_slot(
    tiny_model_path: str, facts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The random model is never right."""
    assert run_main(monkeypatch, tiny_model_path, facts, "--documents", "0", "--examples", "6") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("0 documents, slot 1: 0 of 6 right (0.00), ")
    words = ("--documents", "3", "--slots", "1", "3", "--examples", "2", "--max-new-tokens", "2")
    assert run_main(monkeypatch, tiny_model_path, facts, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["3 documents, slot 1", "3 documents, slot 3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--documents", "12", "--examples", "3"], "facts.jsonl.gz, line 1: has 4 documents; expected 12"),
        (["--documents", "4", "--examples", "7"], "facts.jsonl.gz: has 6 usable records; expected 7 (--examples)"),
    ],
)
def test_main_refuses_data_that_is_too_little(
    words: list[str], message: str, facts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "/nowhere/model", facts, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_main_refuses_missing_files(
    tiny_model_path: str, facts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, tiny_model_path, "/nowhere/facts.jsonl") == 2
    assert capsys.readouterr().err.startswith("error: /nowhere/facts.jsonl: no such file")
    assert run_main(monkeypatch, "/nowhere/model", facts, "--examples", "2") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: /nowhere/model")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", "5", "--documents", "4"], "--slots must be 1 to --documents (4), got [5]"),
        (["--documents", "-1"], "--documents must be 0 (closed-book) or more, got -1"),
        (["--examples", "0"], "--examples must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    ],
)
def test_main_refuses_impossible_numbers(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, "model", "data.jsonl", *words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
