"""Files of the data set and of the model that are replaced while a command runs."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.commands import plan_command, run_evaluate, run_study
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.store.artifacts import Artifact
from tests.support import commands

Make = Callable[..., Recipe]

LOCAL = {"executor": "local"}


def replace_questions(path: str) -> None:
    data = Path(path)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for record in records:
        record["question"] = f"Now: {record['question']}"
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def test_data_that_changed_after_planning_are_not_stored_as_those_of_the_fingerprint(make_recipe: Make) -> None:
    recipe = make_recipe(runtime=LOCAL)
    studies = plan_command(recipe, "evaluate")
    replace_questions(recipe.study.data.path)
    with pytest.raises(UserError) as caught:
        run_evaluate(recipe, studies)
    assert str(caught.value) == f"{recipe.study.data.path}: changed since this command began; run it again (data.path)"
    assert not Path(studies[0].plan.prepare.artifact.path).exists()
    commands.run_evaluate(recipe)
    questions = make_plan(recipe).prepare.artifact.read_table("evaluation.parquet", ["question"])["question"]
    assert all(question.startswith("Now: ") for question in questions.to_pylist())


def test_data_of_another_task_that_changed_are_named_with_it(make_recipe: Make, tmp_path: Path) -> None:
    make_recipe(name="other", data={"documents": 3, "eval_examples": 2}, method={"k": 2})
    path = tmp_path / "recipe.yaml"
    other = path.rename(tmp_path / "other.yaml")
    data = tmp_path / "other.jsonl"
    shutil.copy(make_recipe().study.data.path, data)
    other.write_text(other.read_text().replace(make_recipe().study.data.path, str(data)))
    recipe = make_recipe(runtime=LOCAL, evaluation={"also_evaluate": [str(other)]})
    studies = plan_command(recipe, "study")
    replace_questions(str(data))
    with pytest.raises(UserError, match=rf"^evaluation.also_evaluate: other: {data}: changed since this command began"):
        run_study(recipe, studies)


@pytest.fixture
def copied_model(tiny_model_path: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_path, tmp_path / "model"))


def test_a_model_that_was_replaced_between_two_stages_is_rejected(
    make_recipe: Make, copied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copied_model
    recipe = make_recipe(runtime=LOCAL, model={"path": str(model)})
    studies = plan_command(recipe, "study")
    plan = studies[0].plan
    publish = Artifact.publish

    def publish_and_replace(artifact: Artifact, **contents: Any) -> Any:
        manifest = publish(artifact, **contents)
        if artifact.name == plan.evaluate_base.artifact.name:
            (model / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
        return manifest

    monkeypatch.setattr(Artifact, "publish", publish_and_replace)
    with pytest.raises(UserError) as caught:
        run_study(recipe, studies)
    assert str(caught.value) == f"{model}: changed since this command began; run it again (model.path)"
    assert plan.evaluate_base.artifact.is_finished
    assert not Path(plan.first_sample.artifact.path).exists()


def test_a_model_that_cannot_be_read_any_more_is_named(
    make_recipe: Make, copied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a file system as users have it; root may read everything."""
    recipe = make_recipe(runtime=LOCAL, model={"path": str(copied_model)})
    studies = plan_command(recipe, "evaluate")

    def refuse(*_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(copied_model / "config.json"))

    monkeypatch.setattr("pipelines.stage_runner.model_digest", refuse)
    with pytest.raises(UserError, match=rf"^{copied_model}: .*Permission denied.*model.path"):
        run_evaluate(recipe, studies)
