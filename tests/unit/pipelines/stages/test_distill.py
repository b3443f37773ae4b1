"""What training refuses to continue, and to publish."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.dry_run import describe
from pipelines.plan import make_plan
from pipelines.stages.distill import count_trained
from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.store.artifacts import Artifact
from tests.support.commands import run_distill, run_study

Make = Callable[..., Recipe]

# Relative to the artifact: the lists of training states that the executors keep, here of one before the first step.
STATES = {
    "local": ("training/local/latest.json", json.dumps(["00000000-abcd"])),
    "ray": (
        "training/checkpoint_manager_snapshot.json",
        json.dumps(
            {
                "checkpoint_results": [{"checkpoint_dir_name": "checkpoint_1", "metrics": {"step": 0}}],
                "checkpoint_report_indices": [0],
            }
        ),
    ),
}


def save_states(recipe: Recipe, *executors: str) -> str:
    """As if these executors had saved training states. Returns the folder of the checkpoint."""
    artifact = make_plan(recipe).distill.artifact
    for executor in executors:
        name, content = STATES[executor]
        path = Path(artifact.path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        (path.parent / ("00000000-abcd" if executor == "local" else "checkpoint_1")).mkdir()
    (Path(recipe.storage) / "run.json").write_text(json.dumps({"name": recipe.name}))
    return artifact.url


@pytest.mark.parametrize(("executor", "other"), [("ray", "local"), ("local", "ray")])
@pytest.mark.parametrize("command", [run_study, run_distill, describe])
def test_training_is_not_continued_by_the_other_executor(
    make_recipe: Make,
    command: Callable[[Recipe], object],
    executor: str,
    other: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would begin again, and remove the records of the steps that the other one has made."""
    recipe = make_recipe(runtime={"executor": executor})
    url = save_states(recipe, other)
    with pytest.raises(UserError) as caught:
        command(recipe)
    assert str(caught.value) == (
        f"runtime.executor: {executor}, but executor {other} has begun the training in {url}; set "
        f"runtime.executor={other} to continue it, or delete that folder to train again from the samples"
    )
    assert capsys.readouterr().out == ""  # no stage was run


@pytest.mark.parametrize("executor", ["ray", "local"])
def test_training_that_both_executors_began_is_not_continued(make_recipe: Make, executor: str) -> None:
    """As earlier versions allowed: which of the step records are left is unknown."""
    recipe = make_recipe(runtime={"executor": executor})
    url = save_states(recipe, "local", "ray")
    with pytest.raises(UserError, match=rf" has begun the training in {url}; delete that folder to train again from"):
        run_study(recipe)


@pytest.mark.parametrize("executor", ["ray", "local"])
def test_training_is_continued_by_its_own_executor(make_recipe: Make, executor: str) -> None:
    recipe = make_recipe(runtime={"executor": executor})
    save_states(recipe, executor)
    assert "to run" in describe(recipe)


def test_evaluation_does_not_ask_who_trained(make_recipe: Make) -> None:
    recipe = make_recipe(runtime={"executor": "ray"})
    save_states(recipe, "local")
    assert "to run" in describe(recipe, "evaluate")


@pytest.mark.parametrize(
    ("steps", "expected", "found"),
    [([0, 1, 4, 5], 2, 4), ([1, 2], 0, 1), ([0, 1, 1, 2], 2, 1)],
)
def test_count_trained_rejects_a_log_with_gaps(tmp_path: Path, steps: list[int], expected: int, found: int) -> None:
    """Otherwise a report would publish wrong numbers of steps, rows and examples."""
    checkpoint = write_steps(tmp_path, steps)
    with pytest.raises(UserError) as caught:
        count_trained(checkpoint)
    assert str(caught.value) == (
        f"{checkpoint.url}/steps: expected the record of step {expected}, found that of step {found}; delete "
        f"{checkpoint.url} to train again from the samples"
    )


def test_count_trained_counts_the_first_epoch(tmp_path: Path) -> None:
    counts = count_trained(write_steps(tmp_path, [0, 1, 2, 3]))
    assert counts == {"examples": 2, "rows": 8, "epochs": 2, "steps": 4}


def write_steps(folder: Path, steps: list[int]) -> Artifact:
    """A log of these steps, two of them an epoch with an example each."""
    checkpoint = Artifact(str(folder), "checkpoint", "feed")
    lines = []
    for step in steps:
        record = {"step": step, "epoch": step // 2, "examples": [f"e{step % 2}"], "fraction": 1.0, "rows": 4}
        record |= {"loss": 0.5, "loss_trivial": 0.5, "loss_anchor": None, "weight_by_slot": {}}
        record |= {"grad_norm": 1.0, "learning_rate": 1e-6}
        lines.append(json.dumps(record))
    path = Path(checkpoint.path) / "steps" / "00000000.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + "\n")
    return checkpoint
