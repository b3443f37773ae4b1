import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.cli import command_line
from pipelines.plan import make_plan
from pipelines.results.inspection.questions import QuestionFilter, iter_questions
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.errors import UserError
from tests.support.commands import Command, run_evaluate, run_study


def test_inspect_shows_answers_before_and_after(recipe: Recipe, command: Command) -> None:
    rows = [json.loads(line) for line in command("inspect", recipe.storage, "--limit", "0", "--json")]
    assert len(rows) == 4 * 4  # questions at every slot
    assert {row["position"] for row in rows} == {"1", "2", "3", "4"}
    data = Path(recipe.study.data.path).read_text().splitlines()
    for row in rows:
        file, line = row["location"].split(", line ")
        assert file == "data.jsonl"
        assert json.loads(data[int(line) - 1])["id"] == row["example_id"]
        assert row["before"].keys() >= {"text", "correct", "cut"}
        assert row["prompt_tokens"] > 100
        assert set(row["outcomes"]) & {"correct", "wrong"}
    predictions = make_plan(recipe).evaluate_distilled.artifact.read_table("predictions.parquet").to_pylist()
    texts = {(each["example_id"], each["slots"][0] + 1): each["text"] for each in predictions}
    assert {(row["example_id"], int(row["position"])): row["after"]["text"] for row in rows} == texts


def test_inspect_filters_and_limits(recipe: Recipe, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = command("inspect", recipe.storage, "--json", "--limit", "1")
    one = json.loads(line)
    assert len(command("inspect", recipe.storage, "--json", "--limit", "3")) == 3
    of_one = command("inspect", recipe.storage, "--json", "--limit", "0", "--example", one["example_id"].upper())
    assert len(of_one) == 4
    at_two = command("inspect", recipe.storage, "--json", "--example", one["example_id"], "--position", "2")
    assert [json.loads(line)["position"] for line in at_two] == ["2"]
    assert command_line.main(["inspect", recipe.storage, "--json", "--limit", "16"]) == 0
    assert capsys.readouterr().err == ""  # these are all
    assert command_line.main(["inspect", recipe.storage, "--json", "--limit", "15"]) == 0
    captured = capsys.readouterr()
    assert (captured.out.count("\n"), captured.err) == (15, "the first 15; --limit 0 shows all\n")
    wrong = command("inspect", recipe.storage, "--json", "--limit", "0", "--outcome", "wrong")
    assert all("wrong" in json.loads(line)["outcomes"] for line in wrong)
    assert command("inspect", recipe.storage, "--example", "nobody") == ["no question matches"]


def test_inspect_rejects_a_position_that_was_not_evaluated(recipe: Recipe) -> None:
    selection = QuestionFilter(position="9")
    with pytest.raises(UserError, match=r"^--position: 9: expected one of those evaluated: 1, 2, 3, 4$"):
        list(iter_questions(recipe.storage, selection, samples=False, prompts=False))


def test_inspect_of_one_prompt_length(recipe: Recipe, command: Command) -> None:
    lines = command("inspect", recipe.storage, "--json", "--limit", "0", "--documents", "4")
    assert {json.loads(line)["documents"] for line in lines} == {4}
    assert command("inspect", recipe.storage, "--documents", "9", code=2) == [
        "error: --documents: 9: expected one of those evaluated: 4"
    ]


def test_inspect_of_one_of_several_prompt_lengths(
    tmp_path: Path,
    make_shared_recipe: Callable[..., Recipe],
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"slots": "all", "other_documents": [3], "other_slots": "all"}
    recipe = make_shared_recipe(tmp_path, data={"eval_examples": 2}, evaluation=settings, runtime={"executor": "local"})
    run_evaluate(recipe)
    capsys.readouterr()
    for options, lengths in (((), {3, 4}), (("--documents", "3"), {3}), (("--position", "4"), {4})):
        lines = command("inspect", recipe.storage, "--json", "--limit", "0", *options)
        assert {json.loads(line)["documents"] for line in lines} == lengths
    assert command("inspect", recipe.storage, "--documents", "3", "--position", "4", code=2) == [
        "error: --position: 4: expected one of those evaluated: 1, 2, 3"
    ]


def test_inspect_shows_the_prompt_that_was_asked(recipe: Recipe, command: Command) -> None:
    (line,) = command("inspect", recipe.storage, "--json", "--prompts", "--position", "3", "--limit", "1")
    row = json.loads(line)
    shown = row["prompt"]
    assert shown.startswith("<s><|user|>Title: ")
    assert shown.endswith(f"Question: {row['question']}<|end|><|assistant|>")
    titles = [part.split("\n")[0] for part in shown.split("Title: ")[1:]]
    assert len(titles) == 4
    assert titles[2] in row["question"]  # the gold document is the third one
    text = command("inspect", recipe.storage, "--prompts", "--position", "3", "--limit", "1")
    assert text[0].startswith(f"--- {row['example_id']}, data.jsonl, line ")
    assert f"question  {row['question']}" in text
    assert any(line.startswith("before    ") for line in text)


def test_inspect_shows_a_question_once_above_its_answers(recipe: Recipe, command: Command) -> None:
    (first, *_) = (json.loads(line) for line in command("inspect", recipe.storage, "--json", "--limit", "1"))
    text = command("inspect", recipe.storage, "--limit", "0", "--example", first["example_id"])
    assert [line for line in text if line.startswith("question")] == [f"question  {first['question']}"]
    positions = [line.split(",")[0] for line in text if line.startswith("position")]
    assert positions == [f"position  {number} of 4" for number in range(1, 5)]


def test_inspect_of_the_base_model_alone_has_no_answer_after(recipe: Recipe, command: Command) -> None:
    folder = make_plan(recipe).evaluate_base.artifact.path
    (line,) = command("inspect", folder, "--json", "--limit", "1")
    assert "before" in json.loads(line)
    labels = [line.partition(" ")[0] for line in command("inspect", folder, "--limit", "1")]
    assert labels == ["---", "question", "answers", "position", "answer"]
    assert "after" not in json.loads(line)


def test_inspect_shows_the_questions_of_another_task(recipe: Recipe, command: Command) -> None:
    words = ["inspect", recipe.storage, "--task", "short", "--json", "--limit", "0", "--prompts"]
    rows = [json.loads(line) for line in command(*words)]
    assert len(rows) == 2 * 3  # questions at every slot
    for row in rows:
        assert {row["documents"], row["prompt"].count("Title: ")} == {3}
        assert row.keys() >= {"before", "after"}
    (task,) = make_plan(recipe).other_tasks.values()
    (line,) = command("inspect", task.evaluate_base.artifact.path, "--json", "--limit", "1")
    assert "after" not in json.loads(line)
    assert command("inspect", recipe.storage, "--task", "long", code=2) == [
        f"error: {recipe.storage}: holds no finished distilled-scores or base-scores or samples of the task 'long' "
        f"(evaluation.also_evaluate)"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "-1"], "--limit: -1: expected 1 or more, or 0 for all"),
        (["--limit", "1"], "is neither the storage of a run nor one of its artifacts"),
    ],
)
def test_inspect_rejects(tmp_path: Path, command: Command, words: list[str], message: str) -> None:
    (line,) = command("inspect", str(tmp_path), *words, code=2)
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--outcome", "corect"],
            "expected one of correct, wrong, gained, lost, flipped, cut, refused; did you mean 'correct'?",
        ),
        (["--outcome", "kept"], "--outcome: kept: is of samples; give --samples too"),
        (["--samples", "--outcome", "correct"], "--outcome: correct: is of answers; leave out --samples"),
        (["--samples", "--outcome", "keep"], "--outcome: keep: expected one of kept, wrong, empty, failed, cut; did"),
    ],
)
def test_inspect_rejects_an_outcome_that_nothing_has(
    recipe: Recipe, command: Command, words: list[str], message: str
) -> None:
    *_, line = command("inspect", recipe.storage, *words, code=2)
    assert message in line


def test_inspect_rejects_a_change_where_one_model_answered(recipe: Recipe, command: Command) -> None:
    base = make_plan(recipe).evaluate_base.artifact.url
    (line,) = command("inspect", base, "--outcome", "gained", code=2)
    assert line == f"error: --outcome: gained: {base} has answers before training alone"


def test_inspect_names_the_run_of_a_report(recipe: Recipe, command: Command) -> None:
    """`runs` shows the folders of reports."""
    (line,) = command("inspect", f"{recipe.storage}/report", code=2)
    assert line.endswith(f"is neither the storage of a run nor one of its artifacts; its run is {recipe.storage}")


def test_inspect_names_a_folder_that_is_not_there(tmp_path: Path, command: Command) -> None:
    typo = tmp_path / "quickstrat"
    assert command("inspect", str(typo), code=2) == [f"error: {typo}: no such folder"]


def test_the_newest_answers_of_a_run_are_shown(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the base model too, after a study has evaluated a distilled one."""
    storage = tmp_path / "storage"
    shutil.copytree(recipe.storage, storage)
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    scaled = ["inference.method=uniform_scale", "inference.scales=[1.5]"]
    run_evaluate(load_recipe(path, [f"runtime.storage={storage}", *scaled]))
    printed = capsys.readouterr().out
    assert "base with uniform_scale: 4 documents" in printed
    assert "no checkpoint of these settings; the storage has one of others" in printed
    assert command_line.main(["inspect", str(storage), "--limit", "1"]) == 0
    shown = capsys.readouterr()
    assert "answer    " in shown.out
    assert "after" not in shown.out
    assert "inference.method=uniform_scale" in shown.err


@pytest.mark.parametrize("digest", ["another digest", ""])
def test_inspect_pairs_answers_to_the_same_prompts_only(
    recipe: Recipe, command: Command, tmp_path: Path, digest: str
) -> None:
    """The answers of another base model lie in the same storage; an earlier version has recorded no digest."""
    storage = copy_with_base(recipe, tmp_path, "another model", digest)
    (line,) = command("inspect", str(storage), "--json", "--limit", "1")
    assert "after" in json.loads(line)
    assert "before" not in json.loads(line)
    *_, error = command("inspect", str(storage), "--outcome", "lost", code=2)
    assert error == (
        f"error: --outcome: lost: {storage}/{make_plan(recipe).evaluate_distilled.artifact.folder} has answers after "
        f"training alone; its storage holds no answers of its base model to the same prompts, which `study` makes"
    )


def test_inspect_finds_the_answers_that_a_study_shares_with_another_one(
    recipe: Recipe, command: Command, tmp_path: Path
) -> None:
    """It trains on other examples, and is evaluated on the same ones, which only one of them has answered before."""
    storage = shutil.copytree(recipe.storage, tmp_path / "shared")
    settings = [f"runtime.storage={storage}", "data.train_examples=4", "evaluation.also_evaluate=[]"]
    run_study(load_recipe(str(Path(recipe.study.data.path).parent / "recipe.yaml"), settings))
    assert len(list(storage.glob("distilled-scores-*"))) == 1 + len(
        list(Path(recipe.storage).glob("distilled-scores-*"))
    )
    command("runs", str(storage))  # reads what the study has printed
    rows = [json.loads(line) for line in command("inspect", str(storage), "--json")]
    assert rows
    assert all({"before", "after"} <= row.keys() for row in rows)


def test_inspect_finds_the_answers_of_a_model_that_was_moved(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """They are cached, so that their record keeps the path from before."""
    model = shutil.copytree(recipe.study.model.path, tmp_path / "moved")
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    storage = tmp_path / "storage"
    settings = [f"runtime.storage={storage}", "evaluation.also_evaluate=[]"]
    run_evaluate(load_recipe(path, settings))
    run_study(load_recipe(path, [*settings, f"model.path={model}"]))
    command("runs", str(storage))  # reads what these commands have printed
    rows = [json.loads(line) for line in command("inspect", str(storage), "--json", "--limit", "0")]
    assert all({"before", "after"} <= row.keys() for row in rows)
    assert len(list(storage.glob("base-scores-*"))) == 1
    command("inspect", str(storage), "--outcome", "lost")


@pytest.mark.parametrize(("digest", "is_found"), [("", True), ("another digest", False)])
def test_inspect_knows_the_base_model_of_an_earlier_version_by_its_path(
    recipe: Recipe, command: Command, tmp_path: Path, digest: str, is_found: bool
) -> None:
    storage = copy_with_base(recipe, tmp_path, recipe.study.model.path, digest)
    (line,) = command("inspect", str(storage), "--json", "--limit", "1")
    assert ("before" in json.loads(line)) is is_found


def copy_with_base(recipe: Recipe, folder: Path, path: str, digest: str) -> Path:
    """A copy of a run in which the answers before training are of a model with this path and digest."""
    storage = shutil.copytree(recipe.storage, folder / "storage")
    record = storage / make_plan(recipe).evaluate_base.artifact.folder / "provenance.json"
    provenance = json.loads(record.read_text())
    provenance["settings"]["model"]["path"] = path
    record.write_text(json.dumps(provenance | {"model_digest": digest}))
    return storage
