"""Results of a model that is trained again, or of a slot that is measured again, are not taken for current ones."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines import commands
from pipelines.commands import plan_command, run_report
from pipelines.dry_run import describe
from pipelines.plan import Plan, make_plan
from pipelines.results.artifact_lookup import open_artifact
from pipelines.results.comparison import compare_runs
from pipelines.results.report import report_inputs
from pipelines.stage_runner import driver_lease
from pipelines.stages.made_from import changed_input, is_current
from pipelines.stages.stage import Stage
from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.store.artifacts import Artifact
from pos2distill.store.lease import Lease
from tests.support.commands import run_analyze, run_distill, run_evaluate, run_sample, run_study

Make = Callable[..., Recipe]

LOCAL = {"executor": "local"}


def folder_of(stage: Stage) -> Path:
    return Path(stage.artifact.path)


def manifest_of(stage: Stage) -> dict[str, Any]:
    return json.loads((folder_of(stage) / "manifest.json").read_text())


def write_manifest(stage: Stage, manifest: dict[str, Any]) -> None:
    (folder_of(stage) / "manifest.json").write_text(json.dumps(manifest))


def states(recipe: Recipe) -> dict[str, str]:
    """What --dry-run says of each stage, and of the report."""
    found = {}
    for line in describe(recipe).splitlines():
        for state in ("cached", "to run", "to write"):
            if line.startswith(f"#   {state} "):
                found[line.removeprefix(f"#   {state}")[:22].strip()] = state
    return found


def summary_of(recipe: Recipe) -> dict[str, Any]:
    return json.loads((Path(recipe.storage) / "report" / "summary.json").read_text())


def test_a_checkpoint_that_is_trained_again_is_evaluated_again(
    make_recipe: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(runtime=LOCAL)
    run_study(recipe)
    assert set(states(recipe).values()) == {"cached"}
    plan = make_plan(recipe)
    before = {stage.name: manifest_of(stage) for stage in plan.stages}
    first_report = summary_of(recipe)

    shutil.rmtree(folder_of(plan.distill))
    shown = states(recipe)
    assert [name for name, state in shown.items() if state != "cached"] == ["distill", "evaluate distilled", "report"]
    capsys.readouterr()
    run_study(recipe)
    output = capsys.readouterr().out
    assert f"evaluate distilled  made again, as {plan.distill.artifact.folder} was\n" in output
    changed = [stage.name for stage in plan.stages if manifest_of(stage) != before[stage.name]]
    assert changed == ["distill", "evaluate distilled"]
    assert (folder_of(plan.distill) / "model" / "README.md").is_file()  # the model card
    assert summary_of(recipe)["fingerprint"] == first_report["fingerprint"]
    assert summary_of(recipe)["results"] != first_report["results"]
    assert set(states(recipe).values()) == {"cached"}


def test_answers_of_an_unfinished_evaluation_are_not_mixed_with_those_of_another_checkpoint(
    make_recipe: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(runtime=LOCAL)
    run_study(recipe)
    plan = make_plan(recipe)
    evaluation = folder_of(plan.evaluate_distilled)
    (evaluation / "manifest.json").unlink()
    (evaluation / "left-from-the-first").touch()
    retrain(plan)
    run_evaluate(recipe)
    assert "evaluate distilled  made again, as checkpoint-" in capsys.readouterr().out
    assert not (evaluation / "left-from-the-first").exists()
    assert is_current(plan.evaluate_distilled)


def retrain(plan: Plan) -> None:
    """As if the checkpoint had been trained again."""
    manifest = manifest_of(plan.distill)
    manifest["details"]["id"] = "0" * 32
    write_manifest(plan.distill, manifest)


def test_results_of_an_earlier_checkpoint_are_not_shown_beside_new_ones(make_recipe: Make, tmp_path: Path) -> None:
    make_recipe(name="small", data={"documents": 3, "eval_examples": 2}, method={"k": 2})
    other = (tmp_path / "recipe.yaml").rename(tmp_path / "small.yaml")
    recipe = make_recipe(
        runtime=LOCAL, analysis={"examples": 2}, evaluation={"slots": "all", "also_evaluate": [str(other)]}
    )
    run_study(recipe)
    retrain(make_plan(recipe))
    run_evaluate(recipe)
    inputs = report_inputs(recipe, make_plan(recipe))
    assert list(inputs.analyses) == ["base"]
    assert inputs.other_tasks == {}
    run_study(recipe)
    inputs = report_inputs(recipe, make_plan(recipe))
    assert (list(inputs.analyses), list(inputs.other_tasks)) == (["base", "distilled"], ["small"])


def test_a_checkpoint_of_an_earlier_version_is_another_one_than_that_which_is_trained_again(make_recipe: Make) -> None:
    """It has no id."""
    recipe = make_recipe(runtime=LOCAL)
    run_distill(recipe)
    plan = make_plan(recipe)
    write_manifest(plan.distill, {**manifest_of(plan.distill), "details": {}})
    run_evaluate(recipe)
    assert is_current(plan.evaluate_distilled)
    shutil.rmtree(folder_of(plan.distill))
    run_distill(recipe)
    assert not is_current(plan.evaluate_distilled)


def test_evaluate_leaves_out_the_answers_of_a_checkpoint_that_was_deleted(
    make_recipe: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(runtime=LOCAL)
    run_study(recipe)
    plan = make_plan(recipe)
    shutil.rmtree(folder_of(plan.distill))
    assert len(run_evaluate(recipe)) == 1
    with pytest.raises(UserError, match=r"stage `distill` has not finished"):
        run_report(recipe, plan_command(recipe, "report"))
    run_distill(recipe)
    with pytest.raises(UserError, match=r"`evaluate distilled` was made from an earlier result, which has been del"):
        run_report(recipe, plan_command(recipe, "report"))


def test_compare_rejects_a_report_of_earlier_answers(make_recipe: Make) -> None:
    recipe = make_recipe(runtime=LOCAL)
    run_study(recipe)
    path = Path(recipe.storage) / "report" / "summary.json"
    summary = json.loads(path.read_text())
    summary["distilled"]["accuracy_by_slot"] = [0.75] * len(summary["distilled"]["accuracy_by_slot"])
    path.write_text(json.dumps(summary))
    folder = make_plan(recipe).evaluate_distilled.artifact.folder
    with pytest.raises(UserError) as caught:
        compare_runs([recipe.storage])
    assert str(caught.value) == (
        f"{recipe.storage}/report: shows earlier answers than those of {folder}, which have been made again since; run "
        f"`study` for this run again"
    )


def test_reordered_answers_stay_while_the_order_of_the_slots_is_the_same(make_recipe: Make) -> None:
    settings = {"inference": {"method": "reorder"}, "method": {"auto_examples": 2, "auto_slots": 2}}
    recipe = make_recipe(runtime=LOCAL, **settings)
    run_evaluate(recipe)
    plan = make_plan(recipe)
    assert plan.choose_slot is not None
    measured = manifest_of(plan.choose_slot)
    measured["details"]["curve"] |= {"f1": 0.25, "accuracy_by_slot": [0.5, 0.25]}
    write_manifest(plan.choose_slot, measured)
    first = changed_input(plan.evaluate_base)
    measured["details"]["curve"] |= {"f1": 0.75, "accuracy_by_slot": [0.25, 0.5]}
    write_manifest(plan.choose_slot, measured)
    second = changed_input(plan.evaluate_base)
    # One of the two orders is that of the evaluation, whatever the random model has measured.
    assert [first, second].count(None) == 1


def chosen(make_recipe: Make) -> tuple[Recipe, Plan]:
    recipe = make_recipe(runtime=LOCAL, method={"advantageous_slot": "auto", "auto_examples": 2, "auto_slots": 2})
    run_sample(recipe)
    return recipe, make_plan(recipe)


def test_samples_stay_where_the_slot_is_measured_again_with_the_same_result(make_recipe: Make) -> None:
    recipe, plan = chosen(make_recipe)
    assert plan.choose_slot is not None
    before = manifest_of(plan.first_sample)
    shutil.rmtree(folder_of(plan.choose_slot))
    assert is_current(plan.first_sample)  # the slot is likely to be the same
    run_sample(recipe)
    assert manifest_of(plan.first_sample) == before


@pytest.mark.parametrize("command", [run_sample, run_study, describe])
def test_samples_of_another_slot_are_rejected(make_recipe: Make, command: Callable[[Recipe], object]) -> None:
    recipe, plan = chosen(make_recipe)
    assert plan.choose_slot is not None
    measured = manifest_of(plan.choose_slot)
    measured["details"]["slots"] = [1 - measured["details"]["slots"][0]]
    write_manifest(plan.choose_slot, measured)
    with pytest.raises(UserError) as caught:
        command(recipe)
    url, folder = plan.first_sample.artifact.url, plan.choose_slot.artifact.folder
    assert str(caught.value) == (
        f"{url}: made from an earlier {folder}, which has been deleted or replaced; delete this too, and run again to "
        f"make it again"
    )
    assert plan.first_sample.artifact.is_finished  # it is left to the user


def test_samples_of_a_later_round_are_rejected_before_the_earlier_one_is_trained_again(make_recipe: Make) -> None:
    recipe = make_recipe(runtime=LOCAL, method={"name": "r1-on-policy", "rounds": 2})
    run_study(recipe)
    plan = make_plan(recipe)
    first, second = plan.rounds
    shutil.rmtree(folder_of(first.distill))
    with pytest.raises(UserError, match=rf"^{second.sample.artifact.url}: made from an earlier checkpoint-"):
        run_study(recipe)
    assert not folder_of(first.distill).exists()


def test_a_corrupt_record_is_named(make_recipe: Make) -> None:
    recipe = make_recipe(runtime=LOCAL)
    run_study(recipe)
    evaluation = make_plan(recipe).evaluate_distilled.artifact
    (Path(evaluation.path) / "made_from.json").write_text("[]")
    with pytest.raises(UserError) as caught:
        run_study(recipe)
    assert str(caught.value) == (
        f"{evaluation.url}/made_from.json: corrupt; delete {evaluation.url} and run again to make it again"
    )


def test_a_corrupt_record_of_samples_is_deleted_alone(make_recipe: Make) -> None:
    _, plan = chosen(make_recipe)
    samples = plan.first_sample.artifact
    (Path(samples.path) / "made_from.json").write_text("[]")
    with pytest.raises(UserError) as caught:
        is_current(plan.first_sample)
    assert str(caught.value) == f"{samples.url}/made_from.json: corrupt; delete this file and run again"
    (Path(samples.path) / "made_from.json").unlink()
    assert is_current(plan.first_sample)


def test_an_empty_folder_is_of_no_earlier_checkpoint(make_recipe: Make) -> None:
    """As of a run that was killed when it had made the folder."""
    recipe = make_recipe(runtime=LOCAL, method={"name": "r1-on-policy", "rounds": 2})
    plan = make_plan(recipe)
    folder = folder_of(plan.rounds[1].sample)
    folder.mkdir(parents=True)
    assert changed_input(plan.rounds[1].sample) is None
    (folder / "made_from.json.1f2e.partial").touch()  # killed a little later
    assert changed_input(plan.rounds[1].sample) is None


def test_answers_without_a_record_are_of_a_checkpoint_without_an_id(make_recipe: Make) -> None:
    """Versions that recorded nothing gave checkpoints no id."""
    recipe = make_recipe(runtime=LOCAL)
    run_study(recipe)
    plan = make_plan(recipe)
    (folder_of(plan.evaluate_distilled) / "made_from.json").unlink()
    assert not is_current(plan.evaluate_distilled)
    write_manifest(plan.distill, {**manifest_of(plan.distill), "details": {}})
    assert changed_input(plan.evaluate_distilled) is None
    assert is_current(plan.evaluate_distilled)


def test_inspect_warns_of_answers_of_an_earlier_checkpoint(
    make_recipe: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(runtime=LOCAL)
    run_study(recipe)
    plan = make_plan(recipe)
    answers = plan.evaluate_distilled.artifact
    capsys.readouterr()
    for run in (recipe.storage, answers.url):
        open_artifact(run, [[answers.name]])
    assert capsys.readouterr().err == ""
    retrain(plan)
    warning = (
        f"warning: {answers.url}: is of an earlier {plan.distill.artifact.folder}, which has been trained again since; "
        f"run `evaluate` again\n"
    )
    for run in (recipe.storage, answers.url):
        open_artifact(run, [[answers.name]])
        assert capsys.readouterr().err == warning
    # A corrupt record keeps nobody from looking at the answers.
    (Path(answers.path) / "made_from.json").write_text("[]")
    open_artifact(answers.url, [[answers.name]])
    assert capsys.readouterr().err == ""


def test_inspect_says_which_command_answers_another_task_again(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_recipe(name="small", data={"documents": 3, "eval_examples": 2}, method={"k": 2})
    other = (tmp_path / "recipe.yaml").rename(tmp_path / "small.yaml")
    recipe = make_recipe(runtime=LOCAL, evaluation={"also_evaluate": [str(other)]})
    run_study(recipe)
    plan = make_plan(recipe)
    retrain(plan)
    capsys.readouterr()
    answers = plan.other_tasks["small"].evaluate_distilled.artifact
    open_artifact(recipe.storage, [[answers.name]], "small")
    assert capsys.readouterr().err.endswith("which has been trained again since; run `study` again\n")


@pytest.mark.parametrize("command", [run_evaluate, run_analyze])
def test_a_checkpoint_of_another_slot_is_not_evaluated(make_recipe: Make, command: Callable[[Recipe], object]) -> None:
    method = {"advantageous_slot": "auto", "auto_examples": 2, "auto_slots": 2}
    recipe = make_recipe(runtime=LOCAL, method=method, analysis={"examples": 2})
    run_distill(recipe)
    plan = make_plan(recipe)
    assert plan.choose_slot is not None
    measured = manifest_of(plan.choose_slot)
    measured["details"]["slots"] = [1 - measured["details"]["slots"][0]]
    write_manifest(plan.choose_slot, measured)
    with pytest.raises(
        UserError, match=rf"^{plan.distill.artifact.url}: made from an earlier slot-.*, and run `study`"
    ):
        command(recipe)
    assert not folder_of(plan.evaluate_base).exists()


def test_a_slot_that_is_missing_is_measured_again_by_the_command_that_needs_it(make_recipe: Make) -> None:
    method = {"advantageous_slot": "auto", "auto_examples": 2, "auto_slots": 2}
    recipe = make_recipe(runtime=LOCAL, method=method, analysis={"examples": 2})
    run_distill(recipe)
    plan = make_plan(recipe)
    assert plan.choose_slot is not None
    shutil.rmtree(folder_of(plan.choose_slot))
    with pytest.raises(UserError) as caught:
        run_evaluate(recipe)
    assert str(caught.value) == (
        f"{plan.choose_slot.artifact.url}: missing, but {plan.distill.artifact.folder} was trained with it; run "
        f"`study` to measure it again"
    )
    run_analyze(recipe)
    assert plan.choose_slot.artifact.is_finished
    assert len(run_evaluate(recipe)) == 2


def test_a_checkpoint_of_another_slot_than_is_measured_now_is_not_analyzed(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself measures it again. What was made with the earlier slot stays."""
    method = {"advantageous_slot": "auto", "auto_examples": 2, "auto_slots": 2}
    recipe = make_recipe(runtime=LOCAL, method=method, analysis={"examples": 2})
    run_study(recipe)
    plan = make_plan(recipe)
    assert plan.choose_slot is not None
    assert plan.analyze_base is not None
    assert plan.analyze_distilled is not None
    (trained_with,) = manifest_of(plan.choose_slot)["details"]["slots"]
    shutil.rmtree(folder_of(plan.choose_slot))
    publish = Artifact.publish

    def publish_another(artifact: Artifact, *, details: Any = None, **contents: Any) -> Any:
        if artifact.name == "slot-scores":
            details = {**details, "slots": [1 - trained_with]}
        return publish(artifact, details=details, **contents)

    monkeypatch.setattr(Artifact, "publish", publish_another)
    with pytest.raises(
        UserError, match=rf"^{plan.distill.artifact.url}: made from an earlier slot-.*, and run `study`"
    ):
        run_analyze(recipe)
    assert plan.analyze_base.artifact.is_finished
    assert plan.analyze_distilled.artifact.is_finished


def test_evaluate_needs_no_checkpoint_of_an_earlier_round(make_recipe: Make) -> None:
    recipe = make_recipe(runtime=LOCAL, method={"name": "r1-on-policy", "rounds": 2})
    run_study(recipe)
    first, _ = make_plan(recipe).rounds
    shutil.rmtree(folder_of(first.distill))
    assert len(run_evaluate(recipe)) == 2


def test_evaluate_checks_a_checkpoint_that_the_driver_before_has_finished(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for; without the checkpoint, the stage that loads it was not there to be checked."""
    recipe = make_recipe(runtime=LOCAL)
    run_study(recipe)
    plan = make_plan(recipe)
    shutil.rmtree(folder_of(plan.evaluate_distilled))
    checkpoint = folder_of(plan.distill)
    (checkpoint / "model" / "config.json").write_text("{")
    checkpoint.rename(checkpoint.parent / "elsewhere")

    @contextmanager
    def waited(recipe: Recipe) -> Iterator[Lease]:
        (checkpoint.parent / "elsewhere").rename(checkpoint)
        with driver_lease(recipe) as lease:
            yield lease

    monkeypatch.setattr(commands, "driver_lease", waited)
    with pytest.raises(UserError, match=rf"^{plan.distill.artifact.url}/model: corrupt \("):
        run_evaluate(recipe)
