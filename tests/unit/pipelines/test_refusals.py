"""Evaluations of a model whose server refuses some prompts for their content, or fails on one of them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.cli import command_line
from tests.support.endpoint import FakeServer, serve
from tests.support.tiny import write_examples

FILTERED = (400, {"error": {"code": "content_filter", "param": "prompt", "message": "violence: medium"}})
BROKEN = (500, {"error": {"message": "broken"}})
QUESTIONS = 40
SLOTS = 4
PROMPTS = QUESTIONS * SLOTS

Command = Callable[..., list[str]]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """Answers with the code in the first document. The working directory has 40 questions in `questions.jsonl`."""
    write_examples(tmp_path / "questions.jsonl", QUESTIONS, 6)
    monkeypatch.chdir(tmp_path)
    with serve(FakeServer(answer=lambda prompt: str(prompt).partition("is ")[2].partition(".")[0])) as started:
        yield started


@pytest.fixture
def evaluate(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> Command:
    """`evaluate(word, …, code=0, storage="run")`: the lines on stderr of an evaluation of all questions."""

    def run(*words: str, code: int = 0, storage: str = "run") -> list[str]:
        named = ["evaluate", "--model", "tiny", "--data", "questions.jsonl", "--base-url", server.url]
        settings = ["data.prompt=plain", "data.documents=4", f"runtime.storage={storage}"]
        settings += ["runtime.endpoint.max_retries=0", "--slots", "all", "--examples", str(QUESTIONS)]
        capsys.readouterr()
        assert command_line.main([*named, *settings, *words]) == code
        return capsys.readouterr().err.splitlines()

    return run


def about(*foxes: int, position: int | None = None) -> Callable[[Any], bool]:
    """Whether a prompt asks for one of these foxes, with its document at this position, from 1; None: at any."""

    def is_about(prompt: str) -> bool:
        documents, _, question = prompt.rpartition("Question: ")
        titles = [part.split("\n")[0] for part in documents.split("Title: ")[1:]]
        names = [f"Fox{fox:04d}" for fox in foxes if f"Fox{fox:04d}?" in question]
        return bool(names) and (position is None or (len(titles) > 1 and titles.index(names[0]) + 1 == position))

    return is_about


def answer_instead(server: FakeServer, selects: Callable[[Any], bool], reply: tuple[int, Any] = FILTERED) -> None:
    """Answer some prompts otherwise."""
    server.instead = lambda prompt: reply if selects(prompt) else None


def folder_of(storage: str = "run") -> Path:
    (folder,) = Path(storage).glob("base-scores-*")
    return folder


def counts_of(storage: str = "run") -> dict[str, int]:
    counts: dict[str, int] = json.loads((folder_of(storage) / "manifest.json").read_text())["counts"]
    return counts


def predictions_of(storage: str = "run") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder_of(storage) / "predictions.parquet").to_pylist()
    return rows


def test_evaluate_stores_the_answers_that_came_with_a_failure(server: FakeServer, evaluate: Command) -> None:
    answer_instead(server, about(3, position=2), BROKEN)
    reason = "InternalServerError: Error code: 500 - broken"
    for _ in range(2):  # the second time the one prompt alone is asked, and fails again
        lines = evaluate("runtime.samplers.batch_size=200", code=2)
        assert lines == [f"error: example fox-0003: the engine gave no answer ({reason})"]
    assert len(server.bodies) == PROMPTS + 1
    server.instead = lambda prompt: None
    assert evaluate() == []
    assert len(server.bodies) == PROMPTS + 2
    assert set(server.answered.values()) == {1}
    assert evaluate(storage="whole") == []
    assert predictions_of() == predictions_of("whole")
    assert not list(folder_of().glob("*parts"))


def test_evaluate_asks_again_what_failed_at_every_prompt_length(server: FakeServer, evaluate: Command) -> None:
    words = ["evaluation.other_documents=[3]", "evaluation.reference_prompts=true", "evaluation.distractor_orders=2"]
    answer_instead(server, about(5, position=3), BROKEN)  # prompts of 4 documents in 2 orders, and of 3 documents
    evaluate(*words, "runtime.samplers.batch_size=1000", code=2)
    asked = len(server.bodies)
    server.instead = lambda prompt: None
    evaluate(*words)
    assert asked == QUESTIONS * (SLOTS * 2 + 3 * 2 + 2)
    assert len(server.bodies) == asked + 4
    assert counts_of()["prompts"] == asked


def test_evaluate_leaves_a_refused_question_out_at_every_position(
    server: FakeServer, evaluate: Command, tmp_path: Path
) -> None:
    answer_instead(server, about(3, 17, position=2))
    lines = evaluate()
    warning = (
        "evaluate base: 2 of 40 questions are left out at every position, since the server refused one of their "
        "prompts for its content; refused.parquet beside the answers has its reasons"
    )
    assert lines == [f"warning: {warning}"]
    counts = counts_of()
    assert (counts["examples"], counts["refused"], counts["prompts"]) == (40, 2, 38 * SLOTS)
    assert counts["correct"] + counts["wrong"] == counts["prompts"]
    refused = pq.read_table(folder_of() / "refused.parquet").to_pylist()
    assert [(row["example_id"], row["documents"], row["slots"]) for row in refused] == [
        ("fox-0003", 4, [1]),
        ("fox-0017", 4, [1]),
    ]
    assert "violence: medium" in refused[0]["error"]
    summary = json.loads(Path("run/evaluation/summary.json").read_text())["base"]
    assert summary["curves"][0]["examples"] == 38
    assert summary["counts"]["refused"] == 2
    page = Path("run/evaluation/index.html").read_text()
    assert f"<b>Warning:</b> {warning}." in page
    assert '<th scope="row">refused</th><td>2</td>' in page
    # Neither the refused nor any other prompt is asked again.
    assert evaluate() == lines
    assert len(server.bodies) == PROMPTS
    # The other questions have the answers, and the folder the fingerprint, of an evaluation without refusals.
    server.instead = lambda prompt: None
    evaluate(storage="whole")
    assert "refused" not in counts_of("whole")
    assert not (folder_of("whole") / "refused.parquet").exists()
    assert folder_of().name == folder_of("whole").name
    foxes = {"fox-0003", "fox-0017"}
    assert predictions_of() == [row for row in predictions_of("whole") if row["example_id"] not in foxes]


def test_evaluate_leaves_a_question_out_for_a_prompt_of_any_kind(server: FakeServer, evaluate: Command) -> None:
    """A prompt without documents, and one of the other prompt length. An answer that is filtered counts as well."""
    of_three = about(8, position=3)

    def selects(prompt: str) -> bool:
        without_documents = prompt == "Question: Which code has Fox0030?"
        return without_documents or (of_three(prompt) and prompt.count("Title: ") == 3)

    answer_instead(server, selects, (200, {"choices": [{"finish_reason": "content_filter", "message": {}}]}))
    words = ["evaluation.other_documents=[3]", "evaluation.reference_prompts=true", "evaluation.distractor_orders=2"]
    evaluate(*words)
    counts = counts_of()
    assert counts["refused"] == 2
    assert counts["prompts"] == 38 * (SLOTS * 2 + 3 * 2 + 2)
    summary = json.loads(Path("run/evaluation/summary.json").read_text())["base"]
    assert [curve["examples"] for curve in summary["curves"]] == [38, 38]


def test_evaluate_does_not_depend_on_the_order_of_refusals(server: FakeServer, evaluate: Command) -> None:
    """In one batch; in many; and with a failure in between, after which some prompts of a question are asked later."""
    refused, broken = about(3, 17, position=2), about(3, 20, position=4)
    answer_instead(server, refused)
    evaluate("runtime.samplers.batch_size=200", storage="one")
    evaluate("runtime.samplers.batch_size=1", "runtime.endpoint.concurrency=1", storage="many")
    server.instead = lambda prompt: BROKEN if broken(prompt) else FILTERED if refused(prompt) else None
    evaluate("runtime.samplers.batch_size=200", code=2, storage="resumed")
    answer_instead(server, refused)
    asked = len(server.bodies)
    evaluate(storage="resumed")
    assert len(server.bodies) == asked + 1  # not the other prompt of a question that is left out
    assert predictions_of("one") == predictions_of("many") == predictions_of("resumed")
    tables = [pq.read_table(folder_of(storage) / "refused.parquet") for storage in ("one", "many", "resumed")]
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


def test_evaluate_ends_if_too_many_questions_are_refused(server: FakeServer, evaluate: Command) -> None:
    answer_instead(server, about(3, 17, 21, position=2))
    (line,) = evaluate("runtime.samplers.batch_size=200", code=2)
    parts = f"run/{folder_of().name}/refused-parts"
    assert line.startswith(
        "error: the server refuses a prompt of 3 of 40 questions for its content (more than "
        "runtime.max_failed_fraction=0.05; with a larger one they are left out); to ask these again, delete "
    )
    assert f"{parts}; the first is example fox-0003: BadRequestError: Error code: 400 - " in line
    assert len(server.bodies) == PROMPTS
    assert evaluate(code=2) == [line]
    evaluate("runtime.max_failed_fraction=0.1")
    assert len(server.bodies) == PROMPTS
    assert counts_of()["refused"] == 3


def test_evaluate_asks_again_once_the_refusals_are_deleted(server: FakeServer, evaluate: Command) -> None:
    answer_instead(server, about(3, 17, 21, position=2))
    evaluate("runtime.samplers.batch_size=200", code=2)
    (folder_of() / "refused-parts" / "part-000000.parquet").unlink()
    server.instead = lambda prompt: None
    evaluate()
    assert len(server.bodies) == PROMPTS + 3
    assert counts_of()["prompts"] == PROMPTS


def test_evaluate_measures_nothing_if_all_questions_are_refused(server: FakeServer, evaluate: Command) -> None:
    answer_instead(server, lambda prompt: True)
    (line,) = evaluate("runtime.max_failed_fraction=1", code=2)
    assert "refuses a prompt of 40 of 40 questions for its content (so nothing is measured); " in line
    (line,) = evaluate("runtime.samplers.batch_size=1", code=2, storage="other")
    assert "refuses a prompt of 3 of 40 questions for its content (more than " in line


def test_choose_slot_leaves_refused_questions_out(server: FakeServer, evaluate: Command) -> None:
    """Reordered documents: the slots are chosen by training questions, of which one is refused."""
    words = ["inference.method=reorder", "data.eval_fraction=0.5", "data.train_examples=10"]
    words.append("method.auto_examples=10")
    answer_instead(server, about(*range(QUESTIONS), position=3))
    (line,) = evaluate(*words, "--examples", "10", code=2)
    assert "refuses a prompt of" in line
    (folder,) = Path("run").glob("slot-scores-*")
    train = pq.read_table(next(Path("run").glob("examples-*")) / "train.parquet")["example_id"].to_pylist()
    (folder / "refused-parts" / "part-000000.parquet").unlink()
    answer_instead(server, about(int(train[0][4:]), position=3))
    lines = evaluate(*words, "--examples", "10", "runtime.max_failed_fraction=0.1")
    assert lines[0].startswith("warning: choose slot: 1 of 10 questions are left out at every position, ")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["counts"]["refused"], manifest["counts"]["prompts"]) == (1, 9 * SLOTS)
    assert manifest["details"]["curve"]["examples"] == 9


def test_inspect_shows_refused_prompts(
    server: FakeServer, evaluate: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    answer_instead(server, about(3, 17, position=2))
    evaluate()
    assert command_line.main(["inspect", "run", "--outcome", "refused", "--prompts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--- fox-0003, questions.jsonl, line 4"
    assert lines[3] == "position  2 of 4: refused"
    assert lines[4] == "prompt"
    assert "    Question: Which code has Fox0003?" in lines
    assert "violence: medium" in lines[-1]
    assert lines[-1].startswith("error     BadRequestError: ")
    assert command_line.main(["inspect", "run", "--limit", "0", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 38 * SLOTS + 2
    assert [row["example_id"] for row in rows if "error" in row] == ["fox-0003", "fox-0017"]


def test_compare_and_the_gate_take_the_questions_that_both_have(
    server: FakeServer, evaluate: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    answer_instead(server, about(3, 17, position=2))
    evaluate(storage="one")
    answer_instead(server, about(17, 21))
    evaluate(storage="two")
    assert command_line.main(["compare", "one", "two"]) == 0
    shown = capsys.readouterr().out
    assert "38 questions" in shown
    assert "(paired over 37 questions, 95 % intervals)" in shown
    assert command_line.main(["compare", "one", "two", "--json"]) == 0
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    assert (difference["questions"], difference["mean_difference"]) == (37, 0)
    for baseline in (folder_of("one"), folder_of("one") / "predictions.parquet"):
        evaluate("--fail-if-drop-above", "1", "--baseline", str(baseline), storage="two")
    Path(folder_of("one") / "refused.parquet").unlink()
    lines = evaluate("--fail-if-drop-above", "1", "--baseline", str(folder_of("one")), storage="two", code=2)
    assert "--baseline: other questions, slots or prompt lengths than this evaluation" in lines[-1]


def test_export_leaves_refused_questions_out(server: FakeServer, evaluate: Command, tiny_model_path: str) -> None:
    words = [f"--model={tiny_model_path}", "model.api=completions", "runtime.endpoint.served_model=tiny"]
    answer_instead(server, lambda prompt: bool(prompt == server.bodies[0]["prompt"]))
    evaluate(*words)
    assert counts_of()["refused"] == 1
    assert command_line.main(["export", "run", "tasks"]) == 0
    tasks = sorted(Path("tasks").glob("*.jsonl"))
    assert [len(path.read_text().splitlines()) for path in tasks] == [39] * SLOTS
