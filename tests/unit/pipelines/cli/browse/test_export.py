import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.cli import command_line
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.models.rope.curves import CONFIG_KEY
from tests.support.commands import Command, run_evaluate


def write_logs(tasks: Path, output: Path, scores: dict[tuple[str, str], bool], date: str) -> None:
    """Logs of samples as lm-eval 0.4.13 names and writes them. scores: by example and position.

    The answer has a line separator of Unicode, which lm-eval does not escape.
    """
    output.mkdir(parents=True, exist_ok=True)
    for data in tasks.glob("*.jsonl"):
        samples = []
        for number, line in enumerate(data.read_text().splitlines()):
            doc = json.loads(line)
            right = float(scores[doc["id"], doc["position"]])
            samples.append(
                {
                    "doc_id": number,
                    "doc": doc,
                    "resps": [["\u2028"]],
                    "filter": "none",
                    "accuracy": right,
                    "f1": right,
                }
            )
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        (output / f"samples_{data.stem}_2026-11-{date}T10-00-00.000001.jsonl").write_text(text)


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
        # This search keeps a scale of 1: the random model answers nothing with any.
        (["inference.method=lpes", "inference.search={strategy: uniform, population: 2, examples: 2}"], ""),
        (
            ["inference.method=attention_buckets"],
            "the run used inference.method attention_buckets, which lm_eval cannot",
        ),
        (["inference.method=reorder", "method.auto_examples=2"], ""),
    ],
    ids=["uniform_scale", "lpes", "attention_buckets", "reorder"],
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


def test_export_warns_of_scales_that_were_searched_or_are_in_the_config_of_the_model(
    recipe: Recipe, tiny_model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No settings name them."""
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    few = ["data.eval_examples=2", "evaluation.slots=[0]"]
    tasks = tmp_path / "tasks"

    def warns(storage: Path) -> bool:
        assert command_line.main(["export", str(storage), str(tasks)]) == 0
        shutil.rmtree(tasks)
        return "the model had RoPE scales by layer: serve MODEL" in capsys.readouterr().err

    searched = tmp_path / "searched"
    search = ["inference.method=lpes", "inference.search={strategy: uniform, population: 2, examples: 2}"]
    run_evaluate(load_recipe(path, [f"runtime.storage={searched}", *few, *search]))
    assert not warns(searched)
    (manifest,) = searched.glob("rope-scales-*/manifest.json")
    stored = json.loads(manifest.read_text())
    scales = stored["details"].pop("scales")
    manifest.write_text(json.dumps(stored))
    assert command_line.main(["export", str(searched), str(tasks)]) == 2
    assert "expected 'scales' in details" in capsys.readouterr().err
    assert not tasks.exists()
    stored["details"]["scales"] = [*scales[:-1], 1.5]
    manifest.write_text(json.dumps(stored))
    assert warns(searched)
    shutil.rmtree(manifest.parent)
    assert warns(searched)

    model = shutil.copytree(tiny_model_path, tmp_path / "model")
    config = model / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, CONFIG_KEY: [1.0] * (raw["num_hidden_layers"] - 1) + [1.5]}))
    run_evaluate(load_recipe(path, [f"runtime.storage={tmp_path / 'stored'}", *few, f"model.path={model}"]))
    assert warns(tmp_path / "stored")


def test_export_names_what_compare_takes(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    storage = shutil.copytree(recipe.storage, tmp_path / "storage")
    answers = storage / make_plan(recipe).evaluate_distilled.artifact.folder
    lines = command("export", str(answers), str(tmp_path / "tasks"))
    assert lines[-1] == f"python run.py compare {storage}/report answers"
    base = storage / make_plan(recipe).evaluate_base.artifact.folder
    both = command("compare", str(base), str(answers))
    assert both == command("compare", f"{storage}/report")
    (alone,) = json.loads(command("compare", str(base), "--json")[0])["runs"]
    assert alone["model"] == "base"
    # As the folder of results that were kept, and as in a sweep, whose report has no single study.
    (storage / "report").rename(storage / "report-0123")
    assert (
        command("export", str(answers), str(tmp_path / "more"))[-1]
        == f"python run.py compare {storage}/report-0123 answers"
    )
    for report in storage.glob("report*"):
        shutil.rmtree(report)
    assert command("export", str(answers), str(tmp_path / "last"))[-1] == (
        "compare needs a report of this study alone: run `report` with its recipe, 'sweep={}' and its settings"
    )
    assert command("compare", str(answers), code=2) == [
        f"error: {answers}: is in no report and no results of `evaluate` by itself; run `report` with its settings "
        f"first (of a study of a sweep, with 'sweep={{}}')"
    ]


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
    right = {(row["example_id"], row["documents"], row["position"]): row["after"]["correct"] for row in rows}
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


def test_compare_reads_the_logs_of_lm_eval(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """The distilled model's own scores as the harness logs them: the differences are the report's."""
    command("export", recipe.storage, str(tmp_path / "tasks"))
    rows = [json.loads(row) for row in command("inspect", recipe.storage, "--limit", "0", "--json")]
    scores = {(row["example_id"], row["position"]): bool(row["after"]["correct"]) for row in rows}
    write_logs(tmp_path / "tasks", tmp_path / "answers" / "a__model", dict.fromkeys(scores, False), "20")
    write_logs(tmp_path / "tasks", tmp_path / "answers" / "a__model", scores, "21")  # run again, later
    result = json.loads(command("compare", recipe.storage, str(tmp_path / "answers"), "--json")[0])
    _, distilled, logged = result["runs"]
    for name in ("documents", "questions", "positions", "accuracy", "accuracy_ci95", "mean", "gap", "gap_ci95"):
        assert logged[name] == distilled[name]
    of_distilled, of_logged, between = result["differences"]
    assert of_logged == of_distilled | {"of": 2}
    assert (between["of"], between["less"], between["mean_difference"]) == (2, 1, 0)
    (alone,) = json.loads(command("compare", str(tmp_path / "answers"), "--json")[0])["runs"]
    assert alone == logged
    shown = command("compare", recipe.storage, str(tmp_path / "answers"))
    assert shown[2] == f"[2] {tmp_path / 'answers'}: answers of lm-eval, 4 documents, 4 questions"


def test_compare_takes_the_logs_of_several_prompt_lengths_in_any_order(
    recipe: Recipe, command: Command, tmp_path: Path
) -> None:
    path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
    storage, answers = str(tmp_path / "run"), str(tmp_path / "answers")
    words = [f"runtime.storage={storage}", "evaluation.other_documents=[3]", "evaluation.other_slots=all"]
    run_evaluate(load_recipe(path, [*words, "evaluation.bootstrap_samples=150"]))
    command("export", storage, str(tmp_path / "tasks"))
    rows = [json.loads(row) for row in command("inspect", storage, "--limit", "0", "--json")]
    scores = {(row["example_id"], row["position"]): True for row in rows}
    write_logs(tmp_path / "tasks", tmp_path / "answers", scores, "21")
    first, second = (
        json.loads(command("compare", *runs, "--json")[0]) for runs in ((storage, answers), (answers, storage))
    )
    assert second["runs"] == first["runs"][::-1]
    assert [run["documents"] for run in first["runs"]] == [4, 4]
    (difference,), (opposite,) = first["differences"], second["differences"]
    assert difference["questions"] == opposite["questions"] == 4
    assert difference["mean_difference"] == -opposite["mean_difference"]
    # Of logs alone, at the shortest length that all have.
    longer = tmp_path / "longer"
    longer.mkdir()
    for log in (tmp_path / "answers").glob("*_4_documents_*"):
        shutil.copy(log, longer)
    for runs in ((answers, str(longer)), (str(longer), answers)):
        result = json.loads(command("compare", *runs, "--json")[0])
        assert [run["documents"] for run in result["runs"]] == [4, 4]
        assert [each["questions"] for each in result["differences"]] == [4]


def test_compare_rejects_other_logs(recipe: Recipe, command: Command, tmp_path: Path) -> None:
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


def test_export_rejects(recipe: Recipe, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("")
    assert command("export", recipe.storage, str(tmp_path), code=2) == [
        f"error: {tmp_path}: expected a new or empty folder"
    ]
    (line,) = command("export", recipe.storage, "s3://bucket/tasks", code=2)
    assert line.endswith("bucket/tasks: expected a folder on this machine, since lm-eval reads no other")
    monkeypatch.setattr("pipelines.results.inspection.prompt_text.PromptText.__call__", lambda *_: "another prompt")
    (line,) = command("export", recipe.storage, "/proc/x", code=2)
    assert line.startswith("error: /proc/x: cannot be used (No such file or directory) (FOLDER)")
    (line,) = command("export", recipe.storage, str(tmp_path / "new"), code=2)
    assert "another program would ask another prompt, so nothing is exported" in line
    assert not (tmp_path / "new").exists()
