import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipelines.plan import make_plan
from pipelines.provenance import UNFINISHED_FILE, read_provenance
from pipelines.results.artifact_lookup import list_artifacts
from pos2distill.config import Recipe
from pos2distill.store.checkpoint_layout import STATE_FOLDER
from tests.support.commands import run_evaluate, run_study


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


def test_evaluate_names_the_tasks_that_it_leaves_out(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    run_evaluate(recipe)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "evaluation.also_evaluate: short: evaluated by `study`, not by `evaluate`"


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
