"""A whole study on real Ray: what it stores, and what a second run skips."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.cli import command_line
from pipelines.dry_run import describe
from pipelines.plan import make_plan
from pipelines.provenance import read_provenance
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.evaluation.page import chart_library
from tests.support.commands import run_study
from tests.support.results import artifact_of
from tests.support.tables import decode_questions
from tests.support.tiny import write_examples
from tests.support.toy import LOCAL, SMALL

pytestmark = pytest.mark.xdist_group("compute")


def summary_of(recipe: Recipe) -> dict[str, Any]:
    return json.loads((Path(recipe.storage) / "report" / "summary.json").read_text())


def modification_times(recipe: Recipe) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(recipe.storage).rglob("*")}


def test_run_study_summary_keeps_its_contract(finished: Recipe) -> None:
    summary = summary_of(finished)
    for model in ("base", "distilled"):
        curve = summary[model]
        assert curve["slots"] == [0, 4, 7, 11]
        assert curve["mean"] == pytest.approx(np.mean(curve["accuracy_by_slot"]))
        assert curve["gap"] == pytest.approx(np.ptp(curve["accuracy_by_slot"]))
        assert curve["ci95"][0] <= curve["mean"] <= curve["ci95"][1]
    paired = summary["paired"]
    assert paired["mean_difference"] == pytest.approx(summary["distilled"]["mean"] - summary["base"]["mean"])
    assert set(summary["other_documents"]) == {"16"}
    assert {"sample", "teacher", "distill", "evaluate"} <= set(summary["seconds"])
    assert summary["peak_memory_gib"].keys() == {"distill"}
    assert 0.1 < summary["peak_memory_gib"]["distill"] < 8  # torch, and a model of half a million parameters
    assert summary["fingerprint"] == make_plan(finished).fingerprint


def test_run_study_counts_add_up_from_the_file_to_the_last_answer(finished: Recipe) -> None:
    counts = summary_of(finished)["counts"]
    examples, sampled = counts["prepare"], counts["sample"]
    assert examples["records"] == sum(value for name, value in examples.items() if name != "records")
    assert sampled["sampled"] == examples["train"] == sampled["kept"] + sampled["wrong"] + sampled["empty"]
    assert counts["distill"]["examples"] == sampled["kept"]
    assert counts["distill"]["rows"] == sampled["kept"] * (finished.study.method.k + 1)
    for stage in ("evaluate base", "evaluate distilled"):
        prompts = examples["eval"] * (4 + 2)
        assert counts[stage]["prompts"] == prompts == counts[stage]["correct"] + counts[stage]["wrong"]


def test_run_study_report_is_one_page_with_everything_inside(finished: Recipe) -> None:
    report = Path(finished.storage) / "report"
    html = (report / "index.html").read_text().replace(str(chart_library()), "")
    # Without the library of the charts, which names addresses that the page never asks for (test_report_page.py).
    assert "http://" not in html
    assert "https://" not in html
    assert summary_of(finished)["verdict"] in html
    assert {path.name for path in report.iterdir()} == {
        *("index.html", "summary.json", "curves.csv", "accuracy.png", "accuracy-16-documents.png"),
        *("loss.png", "weights.png"),
    }
    (encoded,) = re.findall(r'id="questions-data">([^<]+)<', html)
    (task,) = decode_questions(encoded)["tasks"]
    assert [len(view["positions"]) for view in task["views"]] == [4, 2]
    assert len(task["questions"]) == 8
    assert all(question["location"].startswith("data.jsonl.gz, line ") for question in task["questions"])


def test_run_study_records_how_every_artifact_was_made(finished: Recipe) -> None:
    for stage in make_plan(finished).stages:
        provenance = read_provenance(stage.artifact)
        assert provenance is not None, stage.name
        assert provenance.settings["data"]["documents"] == 12
        assert provenance.settings["runtime"]["storage"] == finished.storage
        assert provenance.versions["torch"]
        assert provenance.hardware


def test_study_run_again_only_reports_cached_stages(finished: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    before = modification_times(finished)
    assert command_line.main(["study", "quickstart", *SMALL, f"runtime.storage={finished.storage}"]) == 0
    said = capsys.readouterr().out
    assert said.count("cached") == 6
    assert "accuracy by position of the gold document among 12, 8 examples each" in said
    assert before == modification_times(finished)


def test_study_with_another_training_setting_runs_only_later_stages(
    finished: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = shutil.copytree(finished.storage, tmp_path / "run")
    run_study(load_recipe("quickstart", [*SMALL, f"runtime.storage={storage}", LOCAL, "training.learning_rate=5e-4"]))
    lines = capsys.readouterr().out.splitlines()
    skipped = [line.split("  ")[0] for line in lines if "cached" in line]
    assert skipped == ["prepare", "evaluate base", "sample"]
    # The first study's results are still there, beside the new ones.
    first = make_plan(load_recipe("quickstart", [*SMALL, f"runtime.storage={storage}"]))
    assert all(stage.artifact.manifest() for stage in first.stages)


def test_describe_with_a_changed_data_file_runs_everything(finished: Recipe, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl.gz"
    data.write_bytes(Path(finished.study.data.path).read_bytes())
    overrides = [*SMALL, f"runtime.storage={finished.storage}", f"data.path={data}"]
    # Another path, the same bytes: five stages and the report.
    assert describe(load_recipe("quickstart", overrides)).count("cached") == 6
    lines = gzip.decompress(data.read_bytes()).splitlines(keepends=True)
    data.write_bytes(gzip.compress(b"".join(lines[1:])))
    assert describe(load_recipe("quickstart", overrides)).count("to run") == 5


def test_checkpoint_generates_in_plain_transformers_as_in_evaluation(finished: Recipe) -> None:
    folder = f"{artifact_of(finished, 'distill').path}/model"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    predictions = artifact_of(finished, "evaluate distilled").read_table("predictions.parquet").to_pylist()
    table = artifact_of(finished, "prepare").read_table("evaluation.parquet")
    examples = {row["example_id"]: row for row in table.to_pylist()}
    assert "Sub-EM" in (Path(folder) / "README.md").read_text()
    for prediction in predictions[:: len(predictions) // 12]:
        example = examples[prediction["example_id"]]
        gold, *others = example["documents"]
        shown = others[: prediction["documents"] - 1]
        shown.insert(prediction["slots"][0], gold)
        content = "".join(f"Title: {d['title']}\n{d['text']}\n" for d in shown) + f"Question: {example['question']}"
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
        assert output[0, prompt["input_ids"].shape[1] :].tolist() == prediction["sampled_ids"]


def rejected(command: str, *overrides: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the command says on stderr before it ends with exit code 2."""
    capsys.readouterr()
    assert command_line.main([command, "quickstart", *overrides]) == 2
    return capsys.readouterr().err.splitlines()


def test_distill_without_samples_names_what_is_there(finished: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    other = ("seed=7", "runtime.mode=staged")
    (line,) = rejected("distill", *SMALL, f"runtime.storage={finished.storage}", *other, capsys=capsys)
    held = artifact_of(finished, "sample").fingerprint
    assert "stage `sample` has not finished (fingerprint " in line
    assert f"the storage holds {held}, made with other settings; run `study` first (or `sample`)" in line


def test_study_without_kept_samples_prints_one_line_and_writes_no_checkpoint(
    tmp_path: Path, tiny_model_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_examples(tmp_path / "data.jsonl", 20, 4)
    storage = tmp_path / "run"
    *_, last = rejected(
        "study",
        *(LOCAL, f"model.path={tiny_model_path}", f"data.path={data}", f"runtime.storage={storage}"),
        *("data.documents=2", "data.train_examples=4", "data.train_candidates=4", "data.eval_examples=2"),
        *(
            "data.eval_fraction=0.5",
            "method.k=1",
            "evaluation.slots=all",
            "evaluation.other_documents=[]",
            "runtime.max_failed_fraction=1",
        ),
        capsys=capsys,
    )
    assert last.startswith("error: ")
    assert re.search(r"none of 4 samples was kept \(\d wrong, \d empty, 0 failed\)", last)
    assert "sampling.keep=all" in last
    assert not list(storage.glob("checkpoint-*/manifest.json"))


def test_evaluate_with_a_prompt_longer_than_the_context_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "run"
    *_, last = rejected("evaluate", *SMALL, LOCAL, "model.max_length=150", f"runtime.storage={storage}", capsys=capsys)
    assert last.startswith("error: example ")
    assert "exceed the model's context of 150" in last
    assert not list(storage.glob("base-scores-*"))
