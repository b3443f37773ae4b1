"""The commands that look at results, on a study of 4 questions that the tiny random model answered, in one process."""

import json
import re
import shutil
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from pipelines.api import Checkpoint
from pipelines.cli import command_line
from pipelines.plan import make_plan
from pipelines.provenance import UNFINISHED_FILE, Provenance, read_provenance, record_provenance
from pipelines.results import comparison
from pipelines.results.artifact_lookup import list_artifacts
from pipelines.results.inspection.questions import QuestionFilter, iter_questions
from pipelines.stages.sample import sample_ids_of
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.errors import UserError
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import STATE_FOLDER
from pos2distill.store.samples import SampleStore
from tests.support.commands import run_evaluate, run_sample, run_study
from tests.support.hub_server import hub_server, use_hub
from tests.support.paths import ODD_NAME
from tests.support.privileges import respecting_modes


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, make_shared_recipe: Callable[..., Recipe]) -> Recipe:
    folder = tmp_path_factory.mktemp("browse")
    make_shared_recipe(folder, data={"documents": 3, "eval_examples": 2}, method={"k": 2}, evaluation={"slots": "all"})
    other = folder / "short.yaml"
    (folder / "recipe.yaml").rename(other)
    recipe = make_shared_recipe(
        folder,
        runtime={"executor": "local", "storage": str(folder / ODD_NAME)},
        evaluation={"slots": "all", "other_documents": [], "also_evaluate": [str(other)]},
    )
    run_study(recipe)
    return recipe


Command = Callable[..., list[str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str, code: int = 0) -> list[str]:
        assert command_line.main(list(words)) == code
        captured = capsys.readouterr()
        return (captured.err if code else captured.out).splitlines()

    return run


def test_inspect_shows_answers_before_and_after(recipe: Recipe, command: Command) -> None:
    rows = [json.loads(line) for line in command("inspect", recipe.storage, "--limit", "0", "--json")]
    assert len(rows) == 4 * 4  # questions at every slot
    assert {row["position"] for row in rows} == {"1", "2", "3", "4"}
    data = Path(recipe.study.data.path).read_text().splitlines()
    for row in rows:
        file, line = row["location"].split(", line ")
        assert file == "data.jsonl"
        assert json.loads(data[int(line) - 1])["id"] == row["example_id"]
        assert row["before"].keys() >= {"text", "right", "cut"}
        assert row["prompt_tokens"] > 100
        assert set(row["outcomes"]) & {"right", "wrong"}
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


def test_inspect_refuses_a_position_that_was_not_evaluated(recipe: Recipe) -> None:
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


def test_inspect_samples_shows_what_was_kept(recipe: Recipe, command: Command) -> None:
    rows = [json.loads(line) for line in command("inspect", recipe.storage, "--samples", "--json", "--limit", "0")]
    assert len(rows) == 8
    assert all(row["outcomes"][0] == "kept" for row in rows)  # sampling.keep=all
    (line,) = command("inspect", recipe.storage, "--samples", "--json", "--prompts", "--limit", "1")
    first = json.loads(line)
    assert first["prompt"].startswith("<s><|user|>Title: ")
    assert first["position"] == "1"
    # The folder of the samples says what it is.
    folder = make_plan(recipe).first_sample.artifact.path
    assert len(command("inspect", folder, "--json", "--limit", "0")) == 8


def test_inspect_samples_leaves_a_corrupt_part(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """A command that reads does not change the run."""
    storage = shutil.copytree(recipe.storage, tmp_path / ODD_NAME)
    (part,) = storage.glob("samples-*/parts/*.parquet")
    part.write_bytes(b"garbage")
    (line,) = command("inspect", str(storage), "--samples", code=2)
    assert line.startswith(f"error: {part}: corrupt (")
    assert part.read_bytes() == b"garbage"
    assert not list(storage.glob("samples-*/quarantine"))


def test_list_artifacts_has_finished_ones_first_and_each_once(tmp_path: Path, recipe: Recipe) -> None:
    made = read_provenance(make_plan(recipe).first_sample.artifact)
    assert made is not None
    for folder, date, files in (
        ("samples-old", "2026-01-01", ("manifest.json", "provenance.json")),
        ("samples-new", "2026-01-02", ("manifest.json", "provenance.json", UNFINISHED_FILE)),
        ("samples-unfinished", "2026-01-03", (UNFINISHED_FILE,)),
        ("samples-later", "2026-01-04", (UNFINISHED_FILE,)),
    ):
        (tmp_path / folder).mkdir()
        for file in files:
            (tmp_path / folder / file).write_text(json.dumps(asdict(replace(made, date=date))))
    listed = [each.fingerprint for each in list_artifacts(str(tmp_path), ["samples"], unfinished=True)]
    assert listed == ["new", "old", "later", "unfinished"]
    assert [each.fingerprint for each in list_artifacts(str(tmp_path), ["samples"])] == ["new", "old"]


def test_inspect_samples_of_an_evaluation_refuses(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """Answers of an evaluation are no samples."""
    storage = tmp_path / "evaluated"
    shutil.copytree(recipe.storage, storage, ignore=shutil.ignore_patterns("samples-*"))
    assert command("inspect", str(storage), "--samples", code=2) == [f"error: {storage}: holds no finished samples"]


def test_runs_are_named_where_their_folder_was_left_out(
    recipe: Recipe, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(recipe.storage, tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    for words in (["inspect", "mine"], ["compare", "mine", "mine"]):
        assert command(*words, code=2) == [f"error: {tmp_path}/mine: no such folder; did you mean 'runs/mine'?"]
    (line,) = command("inspect", "runs", code=2)
    assert line.endswith("is neither the storage of a run nor one of its artifacts; `runs` lists the runs in it")


def test_inspect_samples_shows_the_teachers_entropy(recipe: Recipe, command: Command) -> None:
    """Against transformers' own forward pass over prompt and response."""
    lines = command("inspect", recipe.storage, "--samples", "--entropy", "--json", "--limit", "2")
    shown = [json.loads(line)["entropy"] for line in lines]
    model = AutoModelForCausalLM.from_pretrained(recipe.study.model.path, dtype=torch.float32)
    store = SampleStore(make_plan(recipe).first_sample.artifact)
    ids = sample_ids_of(make_plan(recipe).first_sample)
    samples = store.load(store.index(ids), np.arange(2), ["prompt_ids", "response_ids"]).to_pylist()
    for sample, entropy in zip(samples, shown, strict=True):
        response = sample["response_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*sample["prompt_ids"], *response]])).logits[0, -len(response) - 1 : -1]
        logs = logits.log_softmax(-1)
        expected = -(logs.exp() * logs).sum(-1)
        assert [nats for _, nats in entropy["tokens"]] == pytest.approx(expected.tolist(), rel=1e-4)
        assert entropy["mean"] == pytest.approx(expected.mean().item(), rel=1e-4)
    text = command("inspect", recipe.storage, "--samples", "--entropy", "--limit", "1")
    (line,) = (line for line in text if line.startswith("entropy   mean "))
    assert line.count(".") == len(shown[0]["tokens"]) + 1


def test_inspect_refuses_the_entropy_of_answers(recipe: Recipe, command: Command) -> None:
    assert command("inspect", recipe.storage, "--entropy", code=2) == [
        "error: --entropy: is of samples; give --samples too"
    ]


def test_inspect_refuses_the_entropy_of_a_teacher_that_was_not_stored(
    make_shared_recipe: Callable[..., Recipe], command: Command, tmp_path: Path
) -> None:
    recipe = make_shared_recipe(tmp_path, method={"teacher": "resident"}, runtime={"executor": "local"})
    run_sample(recipe)
    command("runs", recipe.storage)  # reads what the command has printed
    (line,) = command("inspect", recipe.storage, "--samples", "--entropy", code=2)
    assert line.endswith("holds no teacher states, which method.teacher=cached stores (here resident)")


def test_inspect_of_the_base_model_alone_has_no_answer_after(recipe: Recipe, command: Command) -> None:
    folder = make_plan(recipe).evaluate_base.artifact.path
    (line,) = command("inspect", folder, "--json", "--limit", "1")
    assert "before" in json.loads(line)
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


def test_evaluate_names_the_tasks_that_it_leaves_out(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    run_evaluate(recipe)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "evaluation.also_evaluate: short: evaluated by `study`, not by `evaluate`"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "-1"], "--limit: -1: expected 1 or more, or 0 for all"),
        (["--limit", "1"], "is neither the storage of a run nor one of its artifacts"),
    ],
)
def test_inspect_refuses(tmp_path: Path, command: Command, words: list[str], message: str) -> None:
    (line,) = command("inspect", str(tmp_path), *words, code=2)
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--outcome", "rigth"],
            "expected one of right, wrong, gained, lost, flipped, cut, refused; did you mean 'right'?",
        ),
        (["--outcome", "kept"], "--outcome: kept: is of samples; give --samples too"),
        (["--samples", "--outcome", "right"], "--outcome: right: is of answers; leave out --samples"),
        (["--samples", "--outcome", "keep"], "--outcome: keep: expected one of kept, wrong, empty, failed, cut; did"),
    ],
)
def test_inspect_refuses_an_outcome_that_nothing_has(
    recipe: Recipe, command: Command, words: list[str], message: str
) -> None:
    *_, line = command("inspect", recipe.storage, *words, code=2)
    assert message in line


def test_inspect_refuses_a_change_where_one_model_answered(recipe: Recipe, command: Command) -> None:
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


def test_runs_and_compare(recipe: Recipe, command: Command) -> None:
    (run,) = json.loads(command("runs", str(Path(recipe.storage).parent), "--json")[0])
    assert run["report"] == f"{recipe.storage}/report"
    assert (run["method"], run["dataset"]) == ("r1", "data.jsonl")
    (line,) = command("runs", recipe.storage)
    assert line.startswith(f"{recipe.storage}/report  20")
    assert " r1 on data.jsonl: mean " in line
    summary = json.loads((Path(recipe.storage) / "report" / "summary.json").read_text())
    curves = [summary[model] for model in ("base", "distilled")]
    for name in ("gap", "gap_ci95", "gap_corrected"):
        assert run[name] == [curve[name] for curve in curves]

    result = json.loads(command("compare", recipe.storage, recipe.storage, "--json")[0])
    base, first, second = result["runs"]
    assert (base["model"], first["model"]) == ("base", "distilled")
    assert first == second
    assert first["positions"] == ["1", "2", "3", "4"]
    expected = first["mean"] - base["mean"]
    assert [each["mean_difference"] for each in result["differences"]] == pytest.approx([expected, expected])
    lines = command("compare", recipe.storage)
    assert lines[0].startswith(f"[0] {recipe.storage}/report: base model {recipe.study.model.path}, 4 documents, 4 ")
    assert lines[-1].startswith("[1] - [0]: mean ")


def test_runs_and_compare_print_gaps_with_interval_and_corrected(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps: dict[str, list[Any]] = {"gap": [0.35, 0.1], "gap_ci95": [[0.25, 0.45], [1e-6, 0.2]]}
    gaps["gap_corrected"] = [0.33, -0.01]
    run = {"report": "r", "name": "n", "date": "d", "method": "r1", "dataset": "jsonl", "mean": [0.5, 0.75]}
    run["inference"] = "none"
    monkeypatch.setattr(comparison, "list_runs", lambda folder: [run | gaps])
    before, after = "0.350 [0.250, 0.450], corrected 0.330", "0.100 [above 0, 0.200], corrected -0.010"
    assert command("runs") == [f"r  d  r1 on jsonl: mean 0.500 to 0.750, GAP {before}; after {after}"]
    entry = {"report": "r", "model": "distilled", "method": "r1", "documents": 3, "questions": 9}
    entry |= {"positions": ["1"], "accuracy": [0.5], "mean": 0.5}
    entries = [entry | {name: values[number] for name, values in gaps.items()} for number in (0, 1)]
    monkeypatch.setattr(comparison, "compare_runs", lambda runs: {"runs": entries, "differences": [None]})
    lines = command("compare", "r", "r")
    assert lines[lines.index("    mean   0.500   0.500") :][1:4] == ["", f"[0]: GAP {before}", f"[1]: GAP {after}"]


def test_runs_and_compare_name_the_inference_method(
    recipe: Recipe, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    words = [f"runtime.storage={tmp_path}/scaled", "inference.method=uniform_scale", "inference.scales=[1.5]"]
    run_evaluate(load_recipe(path, words))
    page = (tmp_path / "scaled" / "evaluation" / "index.html").read_text()
    assert "accuracy by position with uniform_scale</title>" in page
    capsys.readouterr()
    (line,) = command("runs", str(tmp_path / "scaled"))
    assert f"{recipe.study.model.path} with uniform_scale on data.jsonl" in line
    lines = command("compare", recipe.storage, str(tmp_path / "scaled"))
    assert f"base model {recipe.study.model.path} with uniform_scale, 4 documents" in lines[2]
    assert "with uniform_scale" not in "".join(lines[:2])


def test_runs_refuses_what_is_no_folder(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("")
    expected = "expected a folder of runs, or the storage of one run"
    typo, file = tmp_path / "typo", tmp_path / "file"
    assert command("runs", str(typo), code=2) == [f"error: {typo}: no such folder; {expected}"]
    assert command("runs", str(file), code=2) == [f"error: {file}: is a file; {expected}"]
    assert command("runs", str(tmp_path)) == [f"{tmp_path}: no report and no results of evaluate"]


@pytest.mark.parametrize("words", [("runs",), ("inspect",), ("compare",), ("export", "tasks"), ("push", "me/mine")])
def test_a_run_that_is_empty_or_may_not_be_read_is_refused(
    words: tuple[str, ...], tmp_path: Path, command: Command
) -> None:
    """An empty name is not the working directory, and a folder that may not be read is not an empty one."""
    name, *others = words
    argument = "FOLDER" if name == "runs" else "RUN"
    for empty in ("", "  "):
        assert command(name, empty, *others, code=2) == [f"error: {argument}: is empty; expected a folder"]
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    for run in (closed, closed / "inside"):
        with respecting_modes():
            (line,) = command(name, str(run), *others, code=2)
        assert line.startswith(f"error: {run}: cannot be used (Permission denied")
        assert line.endswith(f"({argument}); check the permissions of the file and of its folder")


def test_compare_without_a_report_is_refused(tmp_path: Path, command: Command) -> None:
    assert command("compare", str(tmp_path), code=2) == [
        f"error: {tmp_path}: holds no report and no results of `evaluate`; expected a run's storage or a folder "
        f"report-FINGERPRINT"
    ]


@pytest.fixture(scope="module")
def evaluated(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs that were evaluated only: the base model as it is, and with shorter answers."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name, words in (("one", []), ("two", ["evaluation.max_new_tokens=2"])):
        path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
        run_evaluate(load_recipe(path, [f"runtime.storage={folder / name}", *words]))
    return folder


def test_runs_lists_evaluated_models(evaluated: Path, recipe: Recipe, command: Command) -> None:
    command("runs", recipe.storage)  # reads what the evaluations have printed
    one, two = json.loads(command("runs", str(evaluated), "--json")[0])
    assert (one["report"], two["report"]) == (f"{evaluated}/one/evaluation", f"{evaluated}/two/evaluation")
    assert (one["method"], one["dataset"], one["model"]) == ("none", "data.jsonl", recipe.study.model.path)
    (study,) = json.loads(command("runs", recipe.storage, "--json")[0])
    assert (one["mean"], one["gap"]) == (study["mean"][:1], study["gap"][:1])
    (line,) = command("runs", str(evaluated / "one"))
    assert line.startswith(f"{evaluated}/one/evaluation  20")
    assert f" {recipe.study.model.path} on data.jsonl: mean {one['mean'][0]:.3f}, GAP " in line


def test_runs_lists_a_reported_run_once(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    shutil.copytree(recipe.storage, storage)
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    run_evaluate(load_recipe(path, [f"runtime.storage={storage}"]))
    command("inspect", str(storage))  # reads what the evaluation has printed
    (line,) = command("runs", str(storage))
    assert line.startswith(f"{storage}/report  ")
    shutil.rmtree(storage / "report")
    for report in storage.glob("report-*"):
        shutil.rmtree(report)
    base, distilled = json.loads(command("compare", str(storage), "--json")[0])["runs"]
    assert (base["method"], distilled["method"]) == ("none", "r1")
    shown = json.loads(command("compare", recipe.storage, "--json")[0])["runs"]
    assert [base["accuracy"], distilled["accuracy"]] == [each["accuracy"] for each in shown]


def test_compare_takes_evaluated_models(evaluated: Path, recipe: Recipe, command: Command) -> None:
    one, two = str(evaluated / "one"), str(evaluated / "two")
    result = json.loads(command("compare", one, two, recipe.storage, "--json")[0])
    assert [(run["report"], run["model"]) for run in result["runs"]] == [
        (f"{one}/evaluation", "base"),
        (f"{two}/evaluation", "base"),
        (f"{recipe.storage}/report", "distilled"),
    ]
    means = [run["mean"] for run in result["runs"]]
    differences = [each["mean_difference"] for each in result["differences"]]
    assert differences == pytest.approx([means[1] - means[0], means[2] - means[0]])
    (of_study,) = json.loads(command("compare", recipe.storage, "--json")[0])["differences"]
    assert result["differences"][1] == of_study
    assert command("compare", f"{one}/evaluation")[0].startswith(f"[0] {one}/evaluation: base model ")


def test_compare_refuses_evaluations_that_cannot_be_read(evaluated: Path, command: Command, tmp_path: Path) -> None:
    storage = shutil.copytree(evaluated / "one", tmp_path / "storage")
    path = storage / "evaluation" / "summary.json"
    summary = json.loads(path.read_text())
    del summary["made_with"]
    path.write_text(json.dumps(summary))
    assert command("compare", str(storage), code=2) == [
        f"error: {storage}: is an evaluation of an earlier version; make it again with `evaluate`"
    ]
    summary |= {"made_with": {}, "base": summary["base"] | {"curves": []}}
    path.write_text(json.dumps(summary))
    assert command("compare", str(storage), code=2) == [
        f"error: {path}: corrupt; expected what `evaluate` writes; run `evaluate` for this run to make it again, or "
        f"delete {path.parent}"
    ]


def test_another_study_keeps_the_first_report(recipe: Recipe, command: Command) -> None:
    summary = json.loads((Path(recipe.storage) / "report" / "summary.json").read_text())
    other = load_recipe(str(Path(recipe.study.data.path).parent / "recipe.yaml"), ["evaluation.bootstrap_samples=150"])
    run_study(other)
    command("runs", recipe.storage)  # reads what the study has printed
    kept = Path(recipe.storage) / f"report-{summary['fingerprint']}"
    assert json.loads((kept / "summary.json").read_text()) == summary
    assert (kept / "index.html").exists()
    # The same artifacts, so their difference to the same base model is the same.
    first, second = json.loads(command("compare", str(kept), recipe.storage, "--json")[0])["differences"]
    assert first == second
    assert len(command("runs", recipe.storage)) == 2
    run_study(recipe)  # back to the first, whose kept report is not duplicated
    assert not kept.exists()
    command("runs", recipe.storage)


def test_artifacts_say_what_they_were_made_from(recipe: Recipe) -> None:
    plan = make_plan(recipe)
    provenance = read_provenance(plan.evaluate_distilled.artifact)
    assert provenance is not None
    assert provenance.stage == "evaluate distilled"
    assert provenance.inputs == {
        "examples": f"examples-{plan.prepare.fingerprint}",
        "checkpoint": f"checkpoint-{plan.distill.fingerprint}",
    }


def test_study_removes_a_training_state_that_a_killed_run_left(recipe: Recipe) -> None:
    """It was killed between the publication of the checkpoint and the removal."""
    state = Path(make_plan(recipe).distill.artifact.path, STATE_FOLDER)
    state.mkdir()
    (state / "weights").write_bytes(b"0")
    run_study(recipe)
    assert not state.exists()


def test_reports_and_artifacts_of_earlier_versions(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    storage = shutil.copytree(recipe.storage, tmp_path / "old")
    for path in storage.glob("*/provenance.json"):
        path.unlink()
    for folder in storage.glob("report-*"):  # of the test before
        shutil.rmtree(folder)
    (storage / "report" / "summary.json").write_text('{"name": "old", "base": {}}')
    assert command("runs", str(storage)) == [f"{storage}/report  old: of an earlier version"]
    (storage / "report" / "summary.json").write_text('{"name": "rates", "cells": [{}, {}]}')
    assert command("runs", str(storage)) == [f"{storage}/report  rates: a sweep of 2 studies"]
    (line,) = command("compare", str(storage), code=2)
    assert line.endswith(": is the report of a sweep; expected that of one study (`report` with its settings)")
    (storage / "report" / "summary.json").write_text('{"name": "old", "base": {}}')
    assert command("compare", str(storage), code=2) == [
        f"error: {storage}: is a report of an earlier version; make it again with `report`"
    ]
    # Without the record of their tasks, all answers look alike.
    (note, line) = command("inspect", str(storage), code=2)
    assert ": the newest finished one of 2 in " in note
    assert line.endswith("does not say how it was made; it is of an earlier version, make it again")


def test_export_writes_a_task_for_each_position(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    (line,) = command("export", recipe.storage, str(folder), "--json")
    ((group, tasks),) = json.loads(line)["groups"].items()
    assert group == "pos2distill_" + re.sub(r"\W+", "_", Path(recipe.storage).name) + "_4_documents"
    assert tasks == [f"{group}_position_{position}" for position in (1, 2, 3, 4)]
    assert yaml.safe_load((folder / f"{group}.yaml").read_text())["task"] == tasks
    rows = [json.loads(row) for row in command("inspect", recipe.storage, "--prompts", "--limit", "0", "--json")]
    for position, task in enumerate(tasks, start=1):
        text = (folder / f"{task}.yaml").read_text()
        assert text.endswith("process_results: !function scoring.process_results\n")
        settings = yaml.safe_load(text.replace("!function ", ""))
        data = Path(settings["dataset_kwargs"]["data_files"]["test"]).read_text()
        docs = [json.loads(doc) for doc in data.splitlines()]
        asked = [row for row in rows if row["position"] == str(position)]
        assert [(doc["id"], doc["prompt"]) for doc in docs] == [(row["example_id"], row["prompt"]) for row in asked]
    scoring: dict[str, Any] = {}
    exec((folder / "scoring.py").read_text(), scoring)
    doc = {"metric": "sub_em", "answers": ["Paris", "the Seine"], "prompt": "Where?"}
    assert scoring["process_results"](doc, ["It is paris.\nNo."]) == {"accuracy": 1.0, "f1": pytest.approx(0.5)}
    assert scoring["process_results"](doc, ["Rome"]) == {"accuracy": 0.0, "f1": 0.0}
    # Without its end, what follows is a thought and no answer.
    assert scoring["process_results"](doc | {"prompt": "Where?<think>\n"}, ["Paris"]) == {"accuracy": 0.0, "f1": 0.0}
    shown = command("export", recipe.storage, str(tmp_path / "again"))
    assert shown[0] == f"{tmp_path / 'again'}: group {group}, 4 tasks"
    assert shown[1].startswith(f"lm_eval --include_path {tmp_path / 'again'} --tasks {group} --model hf ")


@pytest.mark.parametrize(
    ("inference", "warning"),
    [
        (
            ["inference.method=uniform_scale", "inference.scales=[1.5]"],
            "the model had RoPE scales by layer: serve MODEL",
        ),
        (
            ["inference.method=attention_buckets"],
            "the run used inference.method attention_buckets, which lm_eval cannot",
        ),
        (["inference.method=reorder", "method.auto_examples=2"], ""),
    ],
    ids=["uniform_scale", "attention_buckets", "reorder"],
)
def test_export_warns_of_methods_that_lm_eval_does_not_have(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], inference: list[str], warning: str
) -> None:
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    settings = ["data.eval_examples=2", "evaluation.slots=[0]"]
    run_evaluate(load_recipe(path, [f"runtime.storage={tmp_path / 'run'}", *settings, *inference]))
    capsys.readouterr()
    assert command_line.main(["export", str(tmp_path / "run"), str(tmp_path / "tasks")]) == 0
    printed = capsys.readouterr()
    assert "1 tasks" in printed.out
    # `inspect` says which answers it shows, too.
    assert command_line.main(["inspect", str(tmp_path / "run")]) == 0
    method = inference[0]
    assert capsys.readouterr().err.splitlines()[0].endswith(f": {method}")
    assert f"warning: {warning}" in printed.err if warning else "warning" not in printed.err


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
    assert "before" in shown.out
    assert "after" not in shown.out
    assert "inference.method=uniform_scale" in shown.err


def test_export_writes_a_group_for_each_prompt_length(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """The mean of each, as lm-eval takes it, is the one that `evaluate` shows for this length."""
    storage = tmp_path / "storage"
    shutil.copytree(recipe.storage, storage)
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    words = [f"runtime.storage={storage}", "evaluation.other_documents=[3]", "evaluation.other_slots=all"]
    # These prompts have no position, so they are no tasks.
    words.append("evaluation.reference_prompts=true")
    evaluation = run_evaluate(load_recipe(path, words))[-1]
    command("runs", str(storage))  # reads what the evaluation has printed
    (line,) = command("export", str(storage), str(tmp_path / "tasks"), "--json")
    groups = json.loads(line)["groups"]
    assert list(groups) == [f"pos2distill_storage_{documents}_documents" for documents in (3, 4)]
    rows = [json.loads(row) for row in command("inspect", str(storage), "--limit", "0", "--json")]
    asked = Counter((row["documents"], row["position"]) for row in rows if row["documents"] < 3)
    assert asked == {(0, "none"): 4, (1, "1"): 4}
    right = {(row["example_id"], row["documents"], row["position"]): row["after"]["right"] for row in rows}
    for (group, tasks), curve in zip(groups.items(), reversed(evaluation.curves), strict=True):
        settings = yaml.safe_load((tmp_path / "tasks" / f"{group}.yaml").read_text())
        assert settings["task"] == tasks
        assert [metric["weight_by_size"] for metric in settings["aggregate_metric_list"]] == [True, True]
        docs = []
        for task in tasks:
            lines = (tmp_path / "tasks" / f"{task}.jsonl").read_text().splitlines()
            docs += [json.loads(line) for line in lines]
        scores = [right[doc["id"], doc["documents"], doc["position"]] for doc in docs]
        assert sum(scores) / len(scores) == pytest.approx(curve.mean)
        assert {doc["documents"] for doc in docs} == {curve.documents}


def write_logs(tasks: Path, output: Path, scores: dict[tuple[str, str], bool], date: str) -> None:
    """Logs of samples as lm-eval 0.4.13 names and writes them. scores: by example and position."""
    output.mkdir(parents=True, exist_ok=True)
    for data in tasks.glob("*.jsonl"):
        samples = []
        for number, line in enumerate(data.read_text().splitlines()):
            doc = json.loads(line)
            right = float(scores[doc["id"], doc["position"]])
            samples.append(
                {"doc_id": number, "doc": doc, "resps": [["text"]], "filter": "none", "accuracy": right, "f1": right}
            )
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        (output / f"samples_{data.stem}_2026-11-{date}T10-00-00.000001.jsonl").write_text(text)


def test_compare_reads_the_logs_of_lm_eval(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """The distilled model's own scores as the harness logs them: the differences are the report's."""
    command("export", recipe.storage, str(tmp_path / "tasks"))
    rows = [json.loads(row) for row in command("inspect", recipe.storage, "--limit", "0", "--json")]
    scores = {(row["example_id"], row["position"]): bool(row["after"]["right"]) for row in rows}
    write_logs(tmp_path / "tasks", tmp_path / "answers" / "a__model", dict.fromkeys(scores, False), "20")
    write_logs(tmp_path / "tasks", tmp_path / "answers" / "a__model", scores, "21")  # run again, later
    result = json.loads(command("compare", recipe.storage, str(tmp_path / "answers"), "--json")[0])
    _, distilled, logged = result["runs"]
    for name in ("documents", "questions", "positions", "accuracy", "accuracy_ci95", "mean", "gap", "gap_ci95"):
        assert logged[name] == distilled[name]
    assert result["differences"][0] == result["differences"][1]
    (alone,) = json.loads(command("compare", str(tmp_path / "answers"), "--json")[0])["runs"]
    assert alone == logged
    shown = command("compare", recipe.storage, str(tmp_path / "answers"))
    assert shown[2] == f"[2] {tmp_path / 'answers'}: answers of lm-eval, 4 documents, 4 questions"


def test_compare_refuses_other_logs(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    command("export", recipe.storage, str(tmp_path / "tasks"))
    rows = [json.loads(row) for row in command("inspect", recipe.storage, "--limit", "0", "--json")]
    scores = {(row["example_id"], row["position"]): True for row in rows}
    answers = tmp_path / "answers"
    for model in ("one", "two"):
        write_logs(tmp_path / "tasks", answers / model, scores, "21")
    assert command("compare", str(answers), code=2) == [
        f"error: {answers}: holds logs of samples of 2 models; expected the folder of one (one, two)"
    ]
    log, *others = sorted((answers / "one").iterdir())
    log.write_text(log.read_text().partition("\n")[2])
    assert command("compare", str(answers / "one"), code=2) == [
        f"error: {answers / 'one'}: expected an answer to each question at every position; run all tasks of an "
        f"exported group"
    ]
    for each in (log, *others):
        each.write_text("")
    assert command("compare", str(answers / "one"), code=2) == [
        f"error: {answers / 'one'}: its logs of samples are empty"
    ]
    log.write_text('{"doc": {"question": "of another task"}, "acc": 1.0}\n')
    assert command("compare", str(answers / "one"), code=2) == [
        f"error: {log}, line 1: expected an answer to a question that `export` of this version wrote, as logged by "
        f"lm_eval with --log_samples"
    ]


def test_export_refuses(recipe: Recipe, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("")
    assert command("export", recipe.storage, str(tmp_path), code=2) == [
        f"error: {tmp_path}: expected a new or empty folder"
    ]
    monkeypatch.setattr("pipelines.results.inspection.prompt_text.PromptText.__call__", lambda *_: "another prompt")
    (line,) = command("export", recipe.storage, "/proc/x", code=2)
    assert line.startswith("error: /proc/x: cannot be used (No such file or directory) (FOLDER)")
    (line,) = command("export", recipe.storage, str(tmp_path / "new"), code=2)
    assert "another program would ask another prompt, so nothing is exported" in line
    assert not (tmp_path / "new").exists()


def test_push_uploads_the_checkpoint_with_its_card(
    recipe: Recipe, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_plan(recipe).distill.artifact
    folder = Path(checkpoint.path) / "model"
    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        assert command("push", recipe.storage, "me/a-model", "--private") == [f"{hub.address}/me/a-model"]
        assert hub.private == {"me/a-model": True}
        assert hub.files["me/a-model"] == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert b"## How it was made" in hub.files["me/a-model"]["README.md"]
        assert command("push", checkpoint.url, "me/again", "--json") == [json.dumps({"url": f"{hub.address}/me/again"})]
        assert hub.private["me/again"] is False
        result = Checkpoint(f"{checkpoint.url}/model", []).push_to_hub("me/by-api")
        assert (result, hub.files["me/by-api"]) == (f"{hub.address}/me/by-api", hub.files["me/a-model"])
        assert command("push", recipe.storage, "me/a-model") == [f"{hub.address}/me/a-model"]  # it exists
        assert command("push", recipe.storage, "me/again", "--private", code=2) == [
            "error: me/again: is public already; make it private on the hub, or choose another name"
        ]
        monkeypatch.setenv("HF_TOKEN", "another")
        assert command("push", recipe.storage, "me/a-model", code=2) == [
            f"error: {hub.address}: refuses this token, or it may not write there (401); set HF_TOKEN, or log in with "
            f"`hf auth login`"
        ]


def test_several_checkpoints_of_a_storage_are_told_apart(
    recipe: Recipe, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of a sweep: `push` takes none without its folder, the others say which one they show."""
    storage = shutil.copytree(recipe.storage, tmp_path / ODD_NAME)
    for kind in ("checkpoint", "distilled-scores"):
        (folder,) = (path for path in storage.glob(f"{kind}-*") if read_task(path) is None)
        shutil.copytree(folder, storage / f"{kind}-0123")
    (checkpoint,) = (path for path in storage.glob("checkpoint-*") if path.name != "checkpoint-0123")
    (refused,) = command("push", str(storage), "me/a-model", code=2)
    assert refused.startswith(
        f"error: {storage}: expected the folder of one checkpoint, found 2 in it, the newest first: checkpoint-"
    )
    assert checkpoint.name in refused
    assert "checkpoint-0123" in refused
    assert command_line.main(["inspect", str(storage), "--limit", "1"]) == 0
    (note, _) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"{re.escape(str(storage))}/distilled-scores-\w+: the newest finished one of 2 in .+; name a folder .+", note
    )
    # A checkpoint that a later round of an on-policy method began with is no second one, unless it is reported too.
    later = checkpoint / "provenance.json"
    made = json.loads(later.read_text())
    made["inputs"]["student"] = "checkpoint-0123"
    later.write_text(json.dumps(made))
    assert command("push", str(storage), "me/a-model", code=2) == [refused]
    for folder in storage.glob("checkpoint-*"):
        (folder / "model" / "README.md").unlink()
    (line,) = command("push", str(storage), "me/a-model", code=2)
    assert line == f"error: {checkpoint}: has no model card yet; run `report` with its recipe first"


def read_task(folder: Path) -> str | None:
    """The other task that an artifact is of."""
    task: str | None = json.loads((folder / "provenance.json").read_text())["settings"].get("task")
    return task


def test_push_uploads_from_another_storage(
    recipe: Recipe, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_plan(recipe).distill.artifact
    url = f"memory://runs/{tmp_path.name}/{ODD_NAME}/checkpoint-{checkpoint.fingerprint}"
    fs, path = fsspec.url_to_fs(url)
    for file in Path(checkpoint.path).rglob("*.*"):
        fs.pipe_file(f"{path}/{file.relative_to(checkpoint.path)}", file.read_bytes())
    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        command("push", url, "me/a-model")
    folder = Path(checkpoint.path) / "model"
    assert hub.files["me/a-model"] == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_push_uploads_the_adapter_that_lora_trained_too(
    make_recipe: Callable[..., Recipe], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(training={"lora": {"rank": 2}}, runtime={"executor": "local"})
    run_study(recipe)
    checkpoint = make_plan(recipe).distill.artifact
    url = f"memory://runs/{tmp_path.name}/checkpoint-{checkpoint.fingerprint}"
    fs, path = fsspec.url_to_fs(url)
    fs.put(f"{checkpoint.path}/", f"{path}/", recursive=True)
    model, adapter = (Path(checkpoint.path) / name for name in ("model", "adapter"))
    expected = {file.name: file.read_bytes() for file in model.iterdir()}
    expected |= {f"adapter/{file.name}": file.read_bytes() for file in adapter.iterdir()}
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} < expected.keys()
    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        command("push", recipe.storage, "me/a-model")
        command("push", url, "me/from-a-url")
        assert hub.files == {"me/a-model": expected, "me/from-a-url": expected}
        # A model without an adapter takes its place.
        shutil.rmtree(adapter)
        command("push", recipe.storage, "me/a-model")
        assert not any(path.startswith("adapter/") for path in hub.files["me/a-model"])
    assert "in the folder `adapter`, as a LoRA adapter of rank 2" in expected["README.md"].decode()


def test_push_refuses(recipe: Recipe, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("push", str(tmp_path), "me/a-model", code=2) == [
        f"error: {tmp_path}: is neither the storage of a run nor one of its artifacts"
    ]
    (line,) = command("push", recipe.storage, "a model", code=2)
    assert line.startswith("error: a model: expected OWNER/NAME on the hub (")
    checkpoint = make_plan(recipe).distill.artifact
    copy = tmp_path / f"checkpoint-{checkpoint.fingerprint}"
    shutil.copytree(checkpoint.path, copy)
    (copy / "model" / "README.md").unlink()
    assert command("push", str(copy), "me/a-model", code=2) == [
        f"error: {copy}: has no model card yet; run `report` with its recipe first"
    ]
    with socket.socket() as closed:  # bound, but it does not listen
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        use_hub(monkeypatch, address, tmp_path / "cache")
        (line,) = command("push", recipe.storage, "me/a-model", code=2)
    assert line.startswith(f"error: {address}: cannot be used (")
    assert "(HF_ENDPOINT); check the network" in line


def test_inspect_pairs_answers_to_the_same_prompts_only(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """The answers of another base model lie in the same storage."""
    storage = tmp_path / "storage"
    shutil.copytree(recipe.storage, storage)
    path = storage / Path(make_plan(recipe).evaluate_base.artifact.path).name / "provenance.json"
    provenance = json.loads(path.read_text())
    provenance["settings"]["model"]["path"] = "another model"
    path.write_text(json.dumps(provenance))
    (line,) = command("inspect", str(storage), "--json", "--limit", "1")
    assert "after" in json.loads(line)
    assert "before" not in json.loads(line)


@pytest.mark.parametrize(
    ("method", "responses"),
    [
        ({"name": "r1-on-policy", "rounds": 1, "k": 1}, 2),
        ({"name": "r1", "teacher_slot": "random", "advantageous_slot": 1}, 1),
    ],
)
def test_inspect_samples_shows_the_answered_prompts_not_the_teachers(
    make_shared_recipe: Callable[..., Recipe],
    command: Command,
    tmp_path: Path,
    method: dict[str, Any],
    responses: int,
) -> None:
    recipe = make_shared_recipe(tmp_path, method=method, runtime={"executor": "local"})
    run_sample(recipe)
    lines = command("inspect", recipe.storage, "--samples", "--json", "--limit", "0", "--prompts")
    rows = [json.loads(line) for line in lines if line.startswith("{")]  # the run's own lines come before
    assert len(rows) == 8 * responses
    assert all(row["question"] and row["location"] for row in rows)
    assert len({row["sample_id"] for row in rows}) == len(rows)
    assert len({row["example_id"] for row in rows}) == 8
    last = command("inspect", recipe.storage, "--samples", "--json", "--example", rows[-1]["sample_id"])
    assert [json.loads(line)["sample_id"] for line in last] == [rows[-1]["sample_id"]]
    # The gold document is at the position of each.
    for row in rows:
        answer, position = row["answers"][0], int(row["position"])
        documents = row["prompt"].split("Title: ")[1:]
        assert len(documents) == row["documents"] == 4
        assert [answer in text.partition("Question: ")[0] for text in documents].index(True) + 1 == position
    assert (len({row["position"] for row in rows}) > 1) == (responses > 1)


def test_inspect_samples_of_a_policy_shows_those_that_failed(
    make_shared_recipe: Callable[..., Recipe], command: Command, tmp_path: Path
) -> None:
    """Their prompts are too long to be built, so there are none to show."""
    recipe = make_shared_recipe(
        tmp_path,
        method={"name": "r1-on-policy", "rounds": 1, "k": 1},
        runtime={"executor": "local", "max_failed_fraction": 1},
    )
    data = tmp_path / "data.jsonl"
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for record in records[::3]:
        record["question"] += " please" * 80
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run_sample(recipe)
    lines = command("inspect", recipe.storage, "--samples", "--json", "--limit", "0", "--prompts")
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(rows) == 8 * 2
    failed = [row for row in rows if row["outcomes"] == ["failed"]]
    assert 0 < len(failed) < len(rows)
    assert all(row["prompt"] == "" and row["error"] for row in failed)


def test_inspect_samples_shows_those_of_which_none_was_kept(
    make_recipe: Callable[..., Recipe], tmp_path: Path, command: Command
) -> None:
    """The error names the command that shows them; once some are kept, the samples are as any others."""
    make_recipe(runtime={"executor": "local", "mode": "staged"}, sampling={"max_new_tokens": 4, "keep": "correct"})
    recipe = str(tmp_path / "recipe.yaml")
    (*_, line) = command("sample", recipe, code=2)
    found = re.search(r"none of 8 samples was kept \((\d) wrong, (\d) empty, 0 failed\); `inspect (.*)` shows", line)
    assert found
    shown = command("inspect", *found[3].split(), "--json", "--limit", "0")
    rows = [json.loads(row) for row in shown]
    assert len(rows) == max(int(found[1]), int(found[2]))
    assert {row["outcomes"][0] for row in rows} <= {"wrong", "empty"}
    (folder,) = (tmp_path / "storage").glob("samples-*")
    assert command_line.main(["inspect", str(folder), "--limit", "1"]) == 0
    # Nothing that needs finished samples takes them for such.
    (said, more, line) = command("push", str(tmp_path / "storage"), "me/mine", code=2)
    assert said == f"{folder}: not finished; what is stored so far is shown"
    assert more == "the first 1; --limit 0 shows all"
    assert "holds no finished checkpoint" in line


def test_record_provenance_of_samples_that_are_finished_later(tmp_path: Path, recipe: Recipe) -> None:
    samples, scores = (Artifact(str(tmp_path), name, "0123") for name in ("samples", "base-scores"))
    first, second = Provenance.now(recipe), replace(Provenance.now(recipe), date="later")
    record_provenance(samples, first, "sample", {})
    assert read_provenance(samples) is None  # nothing was stored
    for artifact in (samples, scores):
        Path(artifact.path).mkdir()
        record_provenance(artifact, first, "stage", {})
    assert read_provenance(scores) is None
    assert read_provenance(samples) == replace(first, stage="stage")
    samples.publish(counts={}, seconds={})
    record_provenance(samples, second, "stage", {})
    assert read_provenance(samples) == replace(second, stage="stage")
    assert sorted(path.name for path in Path(samples.path).iterdir()) == ["manifest.json", "provenance.json"]
