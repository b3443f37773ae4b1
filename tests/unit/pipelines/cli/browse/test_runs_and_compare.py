import json
import os
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest

from pipelines.results import comparison
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.records import QUESTIONS
from pos2distill.store.lease import hold_lease
from tests.support.commands import Command, run_evaluate, run_study
from tests.support.privileges import respecting_modes
from tests.support.reports import scale_search


def test_runs_are_named_where_their_folder_was_left_out(
    recipe: Recipe, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(recipe.storage, tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    for words in (["inspect", "mine"], ["compare", "mine", "mine"]):
        assert command(*words, code=2) == [f"error: {tmp_path}/mine: no such folder; did you mean 'runs/mine'?"]
    (line,) = command("inspect", "runs", code=2)
    assert line.endswith("is neither the storage of a run nor one of its artifacts; `runs` lists the runs in it")


def test_runs_and_compare(recipe: Recipe, command: Command) -> None:
    (run,) = json.loads(command("runs", str(Path(recipe.storage).parent), "--json")[0])
    assert run["report"] == f"{recipe.storage}/report"
    assert (run["method"], run["dataset"]) == ("r1", "data.jsonl")
    (line,) = command("runs", recipe.storage)
    assert line.startswith(f"{recipe.storage}/report  20")
    assert " r1 on data.jsonl, 4 documents, 4 questions: mean " in line
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
    assert [(each["of"], each["less"]) for each in result["differences"]] == [(1, 0), (2, 0), (2, 1)]
    found = [each["mean_difference"] for each in result["differences"]]
    assert found == pytest.approx([expected, expected, 0])
    lines = command("compare", recipe.storage)
    path = recipe.study.model.path
    assert lines[0].startswith(f"[0] {recipe.storage}/report: base model {path}, 4 documents, 4 ")
    assert lines[1].startswith(f"[1] {recipe.storage}/report: r1 of {path}, 4 documents, 4 ")
    assert lines[-1].startswith("[1] - [0]: mean ")


def test_runs_and_compare_print_gaps_with_interval_and_corrected(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps: dict[str, list[Any]] = {"gap": [0.35, 0.1], "gap_ci95": [[0.25, 0.45], [1e-6, 0.2]]}
    gaps |= {"gap_corrected": [0.33, -0.01], "why_gap_is_meaningless": [None, None]}
    run: dict[str, Any] = {
        "report": "r",
        "name": "n",
        "date": "d",
        "method": "r1",
        "dataset": "jsonl",
        "mean": [0.5, 0.75],
    }
    run |= {"inference": "none", "documents": 20, "questions": 100}
    monkeypatch.setattr(comparison, "list_runs", lambda folder: [run | gaps])
    before, after = "0.350 [0.250, 0.450], corrected 0.330", "0.100 [above 0, 0.200], corrected -0.010"
    assert command("runs") == [
        f"r  d  r1 on jsonl, 20 documents, 100 questions: mean 0.500 to 0.750, GAP {before}; after {after}"
    ]
    entry = {"report": "r", "model": "distilled", "method": "r1", "documents": 3, "questions": 9}
    entry |= {"positions": ["1"], "accuracy": [0.5], "mean": 0.5}
    entries = [entry | {name: values[number] for name, values in gaps.items()} for number in (0, 1)]
    differences = [{"of": 1, "less": 0, "questions": 0}]
    monkeypatch.setattr(comparison, "compare_runs", lambda runs: {"runs": entries, "differences": differences})
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
    assert f"{recipe.study.model.path} with uniform_scale 1.5 on data.jsonl" in line
    lines = command("compare", recipe.storage, str(tmp_path / "scaled"))
    assert f"base model {recipe.study.model.path} with uniform_scale 1.5, 4 documents" in lines[2]
    assert "with uniform_scale" not in "".join(lines[:2])


def test_runs_rejects_what_is_no_folder(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("")
    expected = "expected a folder of runs, or the storage of one run"
    typo, file = tmp_path / "typo", tmp_path / "file"
    assert command("runs", str(typo), code=2) == [f"error: {typo}: no such folder; {expected}"]
    assert command("runs", str(file), code=2) == [f"error: {file}: is a file; {expected}"]
    assert command("runs", str(tmp_path)) == [f"{tmp_path}: no runs"]


def test_runs_takes_the_folder_of_a_report_and_names_a_folder_below(
    recipe: Recipe, command: Command, tmp_path: Path
) -> None:
    (line,) = command("runs", f"{recipe.storage}/report")
    assert line.startswith(f"{recipe.storage}/report  ")
    shutil.copytree(recipe.storage, tmp_path / "all" / "runs" / "mine")
    assert command("runs", f"{tmp_path}/all") == [f"{tmp_path}/all: no runs; did you mean '{tmp_path}/all/runs'?"]


def test_runs_lists_evaluations_that_no_report_shows(
    recipe: Recipe, evaluated: Path, command: Command, tmp_path: Path
) -> None:
    storage = shutil.copytree(recipe.storage, tmp_path / "storage")
    for folder in storage.glob("evaluation*"):
        shutil.rmtree(folder)
    (report,) = command("runs", str(storage))
    shutil.copytree(evaluated / "one" / "evaluation", storage / "evaluation")
    summary = json.loads((storage / "evaluation" / "summary.json").read_text())
    shown = json.loads((storage / "report" / "summary.json").read_text())["artifacts"]
    summary["base"]["fingerprint"] = shown["base"].rpartition("-")[2]
    (storage / "evaluation" / "summary.json").write_text(json.dumps(summary))
    assert command("runs", str(storage)) == [report]
    summary["base"]["fingerprint"] = "0123"
    (storage / "evaluation" / "summary.json").write_text(json.dumps(summary))
    evaluation, again = command("runs", str(storage))
    assert evaluation.startswith(f"{storage}/evaluation  ")
    assert again == report


def test_runs_lists_other_runs_beside_a_corrupt_report(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(recipe.storage, tmp_path / name)
    for folder in tmp_path.glob("*/evaluation*"):  # of other tests
        shutil.rmtree(folder)
    for report in (tmp_path / "b").glob("report*/summary.json"):
        report.write_text("{")
    first, second = command("runs", str(tmp_path))
    assert first.startswith(f"{tmp_path}/a/report  ")
    wrong = f"{tmp_path}/b/report/summary.json: corrupt; expected what `report` writes; run `report` for this run to"
    assert second.startswith(wrong)
    entry = json.loads(command("runs", str(tmp_path), "--json")[0])[1]
    assert entry == {"report": f"{tmp_path}/b/report", "name": None, "error": second}


def test_runs_lists_those_without_a_report_last(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """As while they run, or after they were stopped."""
    shutil.copytree(recipe.storage, tmp_path / "reported")
    unreported = shutil.copytree(recipe.storage, tmp_path / "a")
    for results in (*unreported.glob("report*"), *unreported.glob("evaluation*")):  # other tests evaluate it
        shutil.rmtree(results)
    for pattern in ("checkpoint-*", "distilled-scores-*"):
        for folder in unreported.glob(pattern):
            (folder / "manifest.json").unlink()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text('{"name": "begun"}')
    finished = sorted(path.parent.name for path in unreported.glob("*/manifest.json"))
    assert {folder.rpartition("-")[0] for folder in finished} == {"base-scores", "examples", "samples"}
    reported, *lines = command("runs", str(tmp_path))
    assert reported.startswith(f"{tmp_path}/reported/report  ")
    assert lines == [
        f"{unreported}  {recipe.name}: no results yet; finished: {', '.join(finished)}",
        f"{tmp_path}/b  begun: no results yet; finished: nothing",
    ]
    assert command("runs", str(unreported)) == lines[:1]
    (entry,) = json.loads(command("runs", str(unreported), "--json")[0])
    assert entry == {
        "report": None,
        "storage": str(unreported),
        "name": recipe.name,
        "finished": finished,
        "driver": None,
    }
    with hold_lease(str(unreported)):
        (line,) = command("runs", str(unreported))
    assert f"{recipe.name}: no results yet; its lease names process {os.getpid()} on " in line
    assert line.endswith(f"; finished: {', '.join(finished)}")
    with hold_lease(str(unreported)):
        lease = json.loads((unreported / "driver.json").read_text())
    with subprocess.Popen(["true"]) as ended:
        pass
    (unreported / "driver.json").write_text(json.dumps(lease | {"pid": ended.pid}))  # it was killed
    assert command("runs", str(unreported)) == lines[:1]
    (unreported / "driver.json").unlink()
    (tmp_path / "b" / "run.json").write_text("{}")
    assert command("runs", str(tmp_path))[1:] == [lines[0], lines[1].replace("begun", "(corrupt run.json)")]


def test_runs_names_the_reports_of_a_store_by_urls_that_compare_takes(recipe: Recipe, command: Command) -> None:
    url = f"memory:///{uuid.uuid4().hex}/runs"
    fs = fsspec.filesystem("memory")
    for file in Path(recipe.storage).rglob("*.*"):
        fs.pipe_file(f"{url}/one/{file.relative_to(recipe.storage)}", file.read_bytes())
    fs.pipe_file(f"{url}/two/run.json", b'{"name": "begun"}')
    run, other = json.loads(command("runs", url, "--json")[0])
    assert run["report"] == f"{url}/one/report"
    assert other["storage"] == f"{url}/two"
    assert command("compare", run["report"])
    fs.pipe_file(f"{url}/one/report/summary.json", b"{")
    assert any(f"{url}/one/report" in line for line in command("runs", url))


@pytest.mark.parametrize("words", [("runs",), ("inspect",), ("compare",), ("export", "tasks"), ("push", "me/mine")])
def test_a_run_that_is_empty_or_may_not_be_read_is_rejected(
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


def test_compare_without_a_report_is_rejected(tmp_path: Path, command: Command) -> None:
    assert command("compare", str(tmp_path), code=2) == [
        f"error: {tmp_path}: holds no report and no results of `evaluate`; expected a run's storage, or one of its "
        f"folders report-FINGERPRINT, evaluation-FINGERPRINT, base-scores-FINGERPRINT and distilled-scores-FINGERPRINT"
    ]


def test_runs_lists_evaluated_models(evaluated: Path, recipe: Recipe, command: Command) -> None:
    command("runs", recipe.storage)  # reads what the evaluations have printed
    one, two = json.loads(command("runs", str(evaluated), "--json")[0])
    assert (one["report"], two["report"]) == (f"{evaluated}/one/evaluation", f"{evaluated}/two/evaluation")
    assert (one["method"], one["dataset"], one["model"]) == ("none", "data.jsonl", recipe.study.model.path)
    (study,) = json.loads(command("runs", recipe.storage, "--json")[0])
    assert (one["mean"], one["gap"]) == (study["mean"][:1], study["gap"][:1])
    (line,) = command("runs", str(evaluated / "one"))
    assert line.startswith(f"{evaluated}/one/evaluation  20")
    assert (
        f" {recipe.study.model.path} on data.jsonl, 4 documents, 4 questions: mean {one['mean'][0]:.3f}, GAP " in line
    )


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
    assert result["differences"][1] == of_study | {"of": 2}
    assert command("compare", f"{one}/evaluation")[0].startswith(f"[0] {one}/evaluation: base model ")


def test_compare_shows_a_base_once_however_its_path_was_typed(
    recipe: Recipe, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(recipe.study.model.path)
    monkeypatch.chdir(model.parent)
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    storage = str(tmp_path / "run")
    run_evaluate(load_recipe(path, [f"runtime.storage={storage}", f"model.path=./{model.name}"]))
    command("runs", storage)  # reads what the evaluation has printed
    shown = json.loads(command("compare", storage, recipe.storage, "--json")[0])["runs"]
    assert [(run["model"], run["path"]) for run in shown] == [("base", str(model)), ("distilled", str(model))]


def copy_with_settings(storage: str | Path, copy: Path, folder: str, section: str, **settings: Any) -> Path:
    """A copy of a run, in whose report or evaluation these settings of a section are others."""
    shutil.copytree(storage, copy)
    path = copy / folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["settings"][section] |= settings
    path.write_text(json.dumps(summary))
    return copy


def test_compare_shows_the_base_of_another_run_if_it_is_another(
    recipe: Recipe, command: Command, tmp_path: Path
) -> None:
    """Otherwise what another model gained would be shown as a difference to this one."""
    copy = copy_with_settings(recipe.storage, tmp_path / "copy", "report", "model", path="/models/other")
    result = json.loads(command("compare", recipe.storage, str(copy), "--json")[0])
    assert [(run["model"], run["path"]) for run in result["runs"]] == [
        ("base", recipe.study.model.path),
        ("distilled", recipe.study.model.path),
        ("base", "/models/other"),
        ("distilled", "/models/other"),
    ]
    assert [(each["of"], each["less"]) for each in result["differences"]] == [(1, 0), (2, 0), (3, 2), (3, 1)]
    own, _, other, students = (each["mean_difference"] for each in result["differences"])
    assert own == other
    assert students == 0


@pytest.mark.parametrize(
    ("scales", "search", "shown"),
    [
        ([1.1], None, "1.1"),
        ([1.0, 1.5, 1.25], None, "1 to 1.5"),
        (scale_search()["scales"], scale_search(), "(genetic search)"),
    ],
)
def test_runs_and_compare_show_the_scales_that_were_given_or_how_they_were_searched(
    evaluated: Path,
    command: Command,
    tmp_path: Path,
    scales: list[float],
    search: dict[str, Any] | None,
    shown: str,
) -> None:
    """The settings of a summary hold the scales in both cases."""
    copy = copy_with_settings(
        evaluated / "one", tmp_path / "copy", "evaluation", "inference", method="lpes", scales=scales
    )
    path = copy / "evaluation" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"search": search}))
    assert f" with lpes {shown} on " in command("runs", str(copy))[0]
    assert f" with lpes {shown}, " in command("compare", str(copy))[0]


def test_runs_and_compare_name_the_search_of_a_run_that_searched(
    recipe: Recipe, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    search = "inference.search={strategy: uniform, population: 2, examples: 2}"
    words = [f"runtime.storage={tmp_path}/searched", "data.eval_examples=2", "inference.method=lpes", search]
    run_evaluate(load_recipe(path, words))
    capsys.readouterr()
    summary = json.loads((tmp_path / "searched" / "evaluation" / "summary.json").read_text())
    assert summary["settings"]["inference"]["scales"] == summary["search"]["scales"]
    (run,) = json.loads(command("runs", f"{tmp_path}/searched", "--json")[0])
    assert (run["inference"], run["scales"], run["search"]) == ("lpes", [], "uniform")
    assert " with lpes (uniform search), " in command("compare", f"{tmp_path}/searched")[0]


def test_compare_gives_no_gap_of_a_model_without_a_correct_answer(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {
        "report": "r",
        "model": "base",
        "method": "none",
        "path": "m",
        "documents": 3,
        "questions": 9,
        "positions": ["1"],
    }
    entry |= {"accuracy": [0.5], "mean": 0.5, "gap": 0.25, "gap_ci95": [0.125, 0.5], "gap_corrected": 0.25}
    entry["why_gap_is_meaningless"] = None
    nothing = entry | {"accuracy": [0.01], "mean": 0.01, "why_gap_is_meaningless": "hardly any answer is correct"}
    difference = {"of": 1, "less": 0, "questions": 9, "mean_difference": -0.5, "ci95": [-0.75, -0.25]}
    difference |= {"gap_change": -0.25, "gap_change_ci95": [-0.5, -0.125]}
    result = {"runs": [entry, nothing], "differences": [difference]}
    monkeypatch.setattr(comparison, "compare_runs", lambda runs: result)
    assert command("compare", "r", "r")[-3:] == [
        "[0]: GAP 0.250 [0.125, 0.500], corrected 0.250",
        "[1]: GAP means nothing (hardly any answer is correct)",
        "[1] - [0]: mean -0.500 [-0.750, -0.250] (paired over 9 questions, 95 % intervals)",
    ]


def test_compare_pairs_no_answers_to_other_documents(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """The same questions in the same slots, but with easier documents around them."""
    copy = copy_with_settings(recipe.storage, tmp_path / "copy", "report", "data", distractors="random")
    result = json.loads(command("compare", recipe.storage, str(copy), "--json")[0])
    assert [run["model"] for run in result["runs"]] == ["base", "distilled"] * 2
    pairs = {(each["of"], each["less"]): each["questions"] for each in result["differences"]}
    assert pairs == {(1, 0): 4, (2, 0): 0, (3, 2): 4, (3, 1): 0}
    lines = command("compare", recipe.storage, str(copy))
    assert "[2] - [0]: other questions, positions, documents or metric, so there is no paired difference" in lines


def test_compare_pairs_no_answers_to_other_questions_with_the_same_ids(
    evaluated: Path, recipe: Recipe, command: Command, tmp_path: Path
) -> None:
    """A test set that was filled anew under the same ids."""
    records = [json.loads(line) for line in Path(recipe.study.data.path).read_text().splitlines()]
    other = tmp_path / "data.jsonl"
    other.write_text("".join(json.dumps(each | {"question": f"Not {each['question']}"}) + "\n" for each in records))
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    run_evaluate(load_recipe(path, [f"data.path={other}", f"runtime.storage={tmp_path / 'run'}"]))
    result = json.loads(command("compare", str(evaluated / "one"), str(tmp_path / "run"), "--json")[-1])
    assert [run["questions"] for run in result["runs"]] == [4, 4]
    assert [each["questions"] for each in result["differences"]] == [0]


def test_compare_keeps_the_base_of_a_run_with_other_questions(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """Its base model answered alike, but a distilled model is compared with its own."""
    copy = shutil.copytree(recipe.storage, tmp_path / "copy")
    for file in copy.glob("*-scores-*/predictions.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.replace_schema_metadata({**table.schema.metadata, QUESTIONS: "others"}), file)
    result = json.loads(command("compare", recipe.storage, str(copy), "--json")[0])
    assert [run["model"] for run in result["runs"]] == ["base", "distilled"] * 2
    pairs = {(each["of"], each["less"]): each["questions"] for each in result["differences"]}
    assert pairs == {(1, 0): 4, (2, 0): 0, (3, 2): 4, (3, 1): 0}


def test_compare_rejects_evaluations_that_cannot_be_read(evaluated: Path, command: Command, tmp_path: Path) -> None:
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


def test_report_of_a_copied_or_damaged_storage_is_written_again(
    recipe: Recipe, command: Command, tmp_path: Path
) -> None:
    """The page of a copy would name the checkpoint of the original. The runtime that it shows is that of training."""
    storage = shutil.copytree(recipe.storage, tmp_path / "copy")
    settings = [f"runtime.storage={storage}", "runtime.trainers.micro_batch_tokens=99"]
    copy = load_recipe(str(Path(recipe.study.data.path).parent / "recipe.yaml"), settings)
    page = storage / "report" / "index.html"
    run_study(copy)
    summary = json.loads((storage / "report" / "summary.json").read_text())
    assert summary["checkpoint"].startswith(f"{storage}/checkpoint-")
    trained_with = recipe.runtime.trainers.micro_batch_tokens
    assert summary["settings"]["runtime"]["micro_batch_tokens"] == trained_with != 99
    page.unlink()
    run_study(copy)
    assert page.exists()
    written = page.stat().st_mtime_ns
    run_study(copy)
    assert page.stat().st_mtime_ns == written
    command("runs", str(storage))  # reads what the studies have printed


def test_another_study_keeps_the_first_report(recipe: Recipe, command: Command) -> None:
    summary = json.loads((Path(recipe.storage) / "report" / "summary.json").read_text())
    other = load_recipe(str(Path(recipe.study.data.path).parent / "recipe.yaml"), ["evaluation.bootstrap_samples=150"])
    run_study(other)
    command("runs", recipe.storage)  # reads what the study has printed
    kept = Path(recipe.storage) / f"report-{summary['fingerprint']}"
    assert json.loads((kept / "summary.json").read_text()) == summary
    assert (kept / "index.html").exists()
    # The same artifacts, so their difference to the same base model is the same.
    first, second, between = json.loads(command("compare", str(kept), recipe.storage, "--json")[0])["differences"]
    assert first["mean_difference"] == second["mean_difference"]
    assert between["mean_difference"] == 0
    assert len(command("runs", recipe.storage)) == 2
    run_study(recipe)  # back to the first, whose kept report is not duplicated
    assert not kept.exists()
    command("runs", recipe.storage)


def test_reports_and_artifacts_of_earlier_versions(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    storage = shutil.copytree(recipe.storage, tmp_path / "old")
    for path in storage.glob("*/provenance.json"):
        path.unlink()
    for folder in (*storage.glob("report-*"), *storage.glob("evaluation*")):  # of other tests
        shutil.rmtree(folder)
    (storage / "report" / "summary.json").write_text('{"name": "old", "base": {}}')
    assert command("runs", str(storage)) == [f"{storage}/report  old: of an earlier version"]
    trained = {"before": {"mean": {"value": 0.5}, "gap": {"value": 0.25}, "gap_corrected": 0.125}}
    trained["after"] = {"mean": {"value": 0.75}, "gap": {"value": 0.125}, "gap_corrected": 0.0}
    row = {"label": "method.name=sft", "seeds": 2, "tasks": {"as trained": trained}}
    sweep = {"name": "rates", "date": "2026-05-04", "cells": [{}, {}], "estimates": [row]}
    (storage / "report" / "summary.json").write_text(json.dumps(sweep))
    assert command("runs", str(storage)) == [
        f"{storage}/report  2026-05-04  rates: a sweep of 2 studies",
        "    method.name=sft, 2 seeds: mean 0.500 to 0.750, GAP 0.250 to 0.125, corrected 0.125 to 0.000",
    ]
    (line,) = command("compare", str(storage), code=2)
    assert line.endswith(
        ": is the report of a sweep; expected that of one study: run `report` with the recipe, 'sweep={}' and the "
        "study's settings"
    )
    (storage / "report" / "summary.json").write_text(json.dumps({**sweep, "estimates": [{"label": "x"}]}))
    assert command("runs", str(storage), code=2) == [
        f"error: {storage}/report/summary.json: corrupt; make it again with `report`"
    ]
    (storage / "report" / "summary.json").write_text('{"name": "old", "base": {}}')
    assert command("compare", str(storage), code=2) == [
        f"error: {storage}: is a report of an earlier version; make it again with `report`"
    ]
    # Without the record of their tasks, all answers look alike.
    (note, line) = command("inspect", str(storage), code=2)
    assert ": the newest finished one of 2 in " in note
    assert line.endswith("how it was made is not recorded; make it again")
