"""Which stages run again: finished samples of which a part is corrupt, where nothing else makes them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.dry_run import describe
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.errors import MachineError
from tests.support.commands import run_distill, run_sample, run_study
from tests.support.results import counts_of, flip_bit

Make = Callable[..., Recipe]


def corrupt_a_part(recipe: Recipe, column: str = "sample_id") -> Path:
    part = sorted((Path(make_plan(recipe).first_sample.artifact.path) / "parts").iterdir())[0]
    flip_bit(part, column)
    return part


def sample_state(recipe: Recipe, command: str) -> str:
    (line,) = (line for line in describe(recipe, command).splitlines() if line.split()[-2:-1] == ["sample"])
    return line.removeprefix("#").partition(" sample ")[0].strip()


@pytest.mark.parametrize(
    ("command", "mode", "state"),
    [
        ("sample", "staged", "to run"),
        ("sample", "streamed", "to run"),
        ("study", "staged", "to run"),
        ("study", "streamed", "cached"),  # training makes them
    ],
)
def test_corrupt_samples_are_made_by_the_stage_that_can(make_recipe: Make, command: str, mode: str, state: str) -> None:
    recipe = make_recipe(runtime={"executor": "local", "mode": mode})
    run_sample(recipe)
    part = corrupt_a_part(recipe)
    assert sample_state(recipe, command) == state
    assert part.exists()  # --dry-run moves nothing


@pytest.mark.parametrize("column", ["sample_id", "response_ids"])
def test_staged_training_never_samples(make_recipe: Make, column: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There may be one GPU, which the trainer has. A column that only training reads is found corrupt by it."""
    recipe = make_recipe(runtime={"executor": "local", "mode": "staged"})
    run_sample(recipe)
    first = counts_of(recipe, "sample")
    corrupt_a_part(recipe, column)
    capsys.readouterr()
    if column == "response_ids":
        url = make_plan(recipe).first_sample.artifact.url
        message = rf"^{url}: 8 samples are corrupt or cannot be read from here; run the same command again"
        with pytest.raises(MachineError, match=message):
            run_distill(recipe)
        assert "sample    " in capsys.readouterr().out
    run_distill(recipe)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("sample "))
    assert "cached" not in line
    assert counts_of(recipe, "sample") == first


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_finished_checkpoint_needs_no_samples(
    make_recipe: Make, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(runtime={"executor": "local", "mode": mode})
    run_study(recipe)
    corrupt_a_part(recipe)
    assert sample_state(recipe, "study") == "cached"
    samples = Path(make_plan(recipe).first_sample.artifact.path)
    shutil.rmtree(samples)
    for command, run in (("study", run_study), ("distill", run_distill)):
        assert sample_state(recipe, command) == "unneeded"
        assert "# work" not in describe(recipe, command)
        capsys.readouterr()
        run(recipe)
        assert f"{'distill':<18}  cached" in capsys.readouterr().out
    assert not samples.exists()
    assert sample_state(recipe, "sample") == "to run"


def test_a_finished_checkpoint_of_an_earlier_round_needs_no_samples(make_recipe: Make) -> None:
    recipe = make_recipe(runtime={"executor": "local", "mode": "staged"}, method={"name": "r1-on-policy"})
    run_study(recipe)
    plan = make_plan(recipe)
    first, last = plan.rounds
    shutil.rmtree(first.sample.artifact.path)
    for stage in (plan.evaluate_distilled, last.distill):
        shutil.rmtree(stage.artifact.path)
    assert sample_state(recipe, "distill") == "unneeded"
    run_distill(recipe)
    assert last.distill.artifact.is_finished
    assert not Path(first.sample.artifact.path).exists()


def test_a_study_of_a_sweep_needs_no_samples_of_its_own_once_it_is_finished(make_recipe: Make) -> None:
    """In the sweep it trains on the samples that a study with a teacher has made, too."""
    sweep = make_recipe(runtime={"executor": "local", "mode": "staged"}, sweep={"method.name": ["seqkd", "r1"]})
    run_study(sweep)
    alone = make_recipe(runtime={"executor": "local", "mode": "staged"}, method={"name": "seqkd"})
    assert sample_state(alone, "study") == "unneeded"
