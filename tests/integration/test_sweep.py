"""A sweep of two methods on the two-hop toy, with a measured advantageous slot and another task."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from pipelines.cli import command_line
from pipelines.commands import plan_command, run_report
from pipelines.plan import make_plan
from pipelines.stages.resolve import resolve_auto_settings
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.config.sweep import sweep_cells
from pos2distill.records import Slots
from tests.support.commands import run_study
from tests.support.results import artifact_of
from tests.support.toy import LOCAL

pytestmark = pytest.mark.xdist_group("compute")

SMALL_TWO_HOPS = [
    "data.documents=10",
    "data.train_examples=16",
    "data.eval_examples=4",
    "method.advantageous_slot=auto",
    "method.auto_slots=3",
    "method.auto_examples=6",
    "training.epochs=1",
    "evaluation.bootstrap_samples=200",
]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("swept")
    toy = load_recipe("quickstart").study
    probe = folder / "probe.yaml"
    probe.write_text(
        yaml.safe_dump(
            {
                "name": "probe",
                "description": "One hop.",
                "model": {"path": toy.model.path},
                "data": {"format": "jsonl", "path": toy.data.path, "prompt": "plain"}
                | {"documents": 10, "eval_examples": 4, "eval_fraction": 0.25},
                "evaluation": {"slots": 2, "max_new_tokens": 16},
            }
        )
    )
    overrides = [*SMALL_TWO_HOPS, LOCAL, f"evaluation.also_evaluate=[{probe}]", "sweep={method.name: [seqkd, r2]}"]
    recipe = load_recipe("quickstart_r2", [*overrides, f"runtime.storage={folder / 'run'}"])
    run_study(recipe)
    return recipe


def one_method(recipe: Recipe, name: str) -> Recipe:
    return next(cell for settings, cell in sweep_cells(recipe) if settings["method.name"] == name)


def test_sweep_shares_what_its_settings_do_not_change(swept: Recipe) -> None:
    folders = [path.name.rsplit("-", 1)[0] for path in Path(swept.storage).iterdir() if path.is_dir()]
    # The two methods distill the same samples, and one base is measured on each of two tasks.
    assert {name: folders.count(name) for name in ("samples", "slot-scores", "checkpoint")} == {
        "samples": 1,
        "slot-scores": 1,
        "checkpoint": 2,
    }
    assert (folders.count("examples"), folders.count("base-scores"), folders.count("distilled-scores")) == (2, 2, 4)


def test_choose_slot_takes_the_best_measured_slot(swept: Recipe) -> None:
    cell = one_method(swept, "r2")
    manifest = artifact_of(cell, "choose slot").manifest()
    assert manifest is not None
    details = manifest.details
    assert details["curve"]["slots"] == [list(range(start, start + 2)) for start in (0, 4, 8)]
    best: Slots = tuple(details["slots"])
    assert details["accuracy"] == max(details["curve"]["accuracy_by_slot"])
    assert details["ci95"][0] <= details["accuracy"] <= details["ci95"][1]
    plan = make_plan(cell)
    assert plan.choose_slot is not None
    assert resolve_auto_settings(plan.study, plan.training_inputs).fixed_advantageous_slots(2) == best
    sampled = pq.read_table(f"{artifact_of(cell, 'sample').path}/parts", columns=["slots"])["slots"].to_pylist()
    assert {tuple(slots) for slots in sampled} == {best}


def test_choose_slot_measures_on_training_examples(swept: Recipe) -> None:
    cell = one_method(swept, "r2")
    measured = set(artifact_of(cell, "choose slot").read_table("predictions.parquet")["example_id"].to_pylist())
    evaluated = set(artifact_of(cell, "prepare").read_table("evaluation.parquet")["example_id"].to_pylist())
    assert len(measured) == 6
    assert not measured & evaluated


def test_sweep_report_is_one_page_over_all_cells(swept: Recipe) -> None:
    report = Path(swept.storage) / "report"
    files = ["curves.csv", "curves.png", "index.html", "summary.json", "sweep.csv", "sweep.png"]
    assert sorted(path.name for path in report.iterdir()) == files
    cells = json.loads((report / "summary.json").read_text())["cells"]
    assert [cell["settings"] for cell in cells] == [{"method.name": "seqkd"}, {"method.name": "r2"}]
    for cell in cells:
        assert list(cell["tasks"]) == ["as trained", "probe"]
        assert set(cell["tasks"]["as trained"]["base"]["by_group"]) == {"connected", "disconnected", "reversed"}
        assert len(cell["tasks"]["probe"]["distilled"]["accuracy_by_slot"]) == 2
    assert cells[0]["tasks"]["probe"]["base"] == cells[1]["tasks"]["probe"]["base"]


def test_report_of_a_sweep_prints_every_setting_and_checkpoint(
    swept: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    run_report(swept, plan_command(swept, "report"))
    lines = capsys.readouterr().out.splitlines()
    head = lines.index("setting  mean before  after  difference               GAP before  after")
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["seqkd", "r2"]
    checkpoints = [line for line in lines if line.startswith("checkpoint  ")]
    assert [line.rpartition(", ")[2] for line in checkpoints] == ["method.name=seqkd", "method.name=r2"]
    assert all(Path(line.split()[1].rstrip(","), "config.json").exists() for line in checkpoints)
    assert lines[-1] == f"report      {swept.storage}/report/index.html"


def test_evaluate_of_one_cell_finds_what_the_sweep_made(swept: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*SMALL_TWO_HOPS, LOCAL, f"evaluation.also_evaluate={list(swept.study.evaluation.also_evaluate)}"]
    storage = f"runtime.storage={swept.storage}"
    assert command_line.main(["evaluate", "quickstart_r2", *overrides, storage, "--fail-if-gap-above", "100"]) == 0
    assert capsys.readouterr().out.count("cached") == 3


def test_commands_for_one_study_reject_a_sweep(swept: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quickstart_r2", "sweep={seed: [0, 1]}", f"runtime.storage={swept.storage}"]
    for command in ("evaluate", "sample", "distill"):
        assert command_line.main([command, *arguments]) == 2
        assert "is a sweep of several studies; this command takes one study" in capsys.readouterr().err
