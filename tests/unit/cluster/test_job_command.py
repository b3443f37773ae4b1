"""The command that a job runs, and what is read of it."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.command import run_cluster
from cluster.entrypoint import make_entrypoint
from cluster.job_command import load_job
from cluster.names import STORAGE_ANNOTATION
from cluster.render import render
from cluster.spec import load_cluster
from pos2distill.config import Recipe
from pos2distill.config.gate import Gate
from pos2distill.config.load import load_recipe
from pos2distill.config.read import RECIPES
from pos2distill.errors import UserError
from tests.support.paths import PROJECT


def test_load_job_reads_the_recipe_with_its_overrides() -> None:
    job = load_job("quickstart", ["training.epochs=1"], command="evaluate", gate=Gate(gap_above=5))
    assert job.recipe == load_recipe("quickstart", ["training.epochs=1"])
    assert (job.command, job.recipe_in_pod, job.overrides) == ("evaluate", "quickstart", ("training.epochs=1",))
    assert job.gate.words() == ["--fail-if-gap-above=5"]
    assert job.own_recipe is None


def test_load_job_names_the_users_recipe_by_its_path_in_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)
    mine = tmp_path / "mine.yaml"
    mine.write_text((RECIPES / "quickstart.yaml").read_text())
    job = load_job(str(mine))
    assert job.own_recipe is not None
    assert job.recipe_in_pod == job.own_recipe.path


@pytest.mark.parametrize(
    "overrides",
    [
        ["runtime.storage=s3://b/first", "training.epochs=1", " runtime.storage = s3://b/last"],
        ['runtime.storage="s3://b/last"'],
        ["runtime.storage='s3://b/last'"],
        ["runtime={storage: s3://b/last}"],
    ],
)
def test_load_job_has_the_storage_that_the_overrides_set(overrides: list[str]) -> None:
    job = load_job("quickstart", overrides)
    assert job.storage == job.recipe.storage == "s3://b/last"
    spec = load_cluster("kind", ["network.egress=[{cidr: 0.0.0.0/0}]"])
    assert make_entrypoint(spec, job).endswith(shlex.join(["quickstart", *overrides]))


def test_load_job_has_the_storage_of_the_recipe(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    recipe = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    recipe.setdefault("runtime", {})["storage"] = "gs://bucket/mine"
    mine.write_text(yaml.safe_dump(recipe))
    job = load_job(str(mine))
    assert job.storage == "gs://bucket/mine"
    spec = load_cluster("kind", ["network.egress=[{cidr: 0.0.0.0/0}]"])
    assert "runtime.storage" not in make_entrypoint(spec, job)
    assert render(spec, job)[-1]["metadata"]["annotations"][STORAGE_ANNOTATION] == "gs://bucket/mine"


def test_load_job_has_no_storage_where_nothing_sets_it() -> None:
    assert load_job("quickstart", ["training.epochs=1", "runtime={executor: ray}"]).storage is None


def test_load_job_has_the_recipe_of_each_study_of_its_sweep() -> None:
    job = load_job("quickstart", ["sweep={seed: [3, 4]}"])
    assert [cell.study.seed for cell in job.cells] == [3, 4]
    alone = load_job("quickstart")
    assert alone.cells == (alone.recipe,)


def test_load_job_rejects_a_sweep_that_cannot_be_used() -> None:
    with pytest.raises(UserError, match=r"^sweep: seed: expected at least one value$"):
        load_job("quickstart", ["sweep={seed: []}"])


@pytest.mark.parametrize(
    ("command", "trains"),
    [("study", True), ("distill", True), ("sample", False), ("evaluate", False), ("analyze", False)],
)
def test_job_command_trains(command: str, *, trains: bool) -> None:
    assert load_job("quickstart", command=command).facts.trains is trains


RESIDENT = "method.teacher=resident"


@pytest.mark.parametrize(
    ("command", "overrides", "pools"),
    [
        ("study", [], {"samplers", "teachers", "trainers"}),
        ("study", [RESIDENT], {"samplers", "trainers"}),
        ("study", [RESIDENT, "analysis={}"], {"samplers", "teachers", "trainers"}),
        ("distill", [RESIDENT], {"samplers", "trainers"}),
        ("sample", [], {"samplers", "teachers"}),
        ("evaluate", [], {"samplers"}),
        ("analyze", [RESIDENT], {"samplers", "teachers"}),
        ("report", [], set()),
    ],
)
def test_job_command_names_the_pools_that_it_starts(command: str, overrides: list[str], pools: set[str]) -> None:
    job = load_job("quickstart", overrides, command=command)
    assert job.pools(job.recipe.study) == pools


def test_run_cluster_loads_the_recipe_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loaded: list[Recipe] = []

    def counted(*arguments: Any, **options: Any) -> Recipe:
        loaded.append(load_recipe(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr("cluster.job_command.load_recipe", counted)
    assert run_cluster("render", "kind", ["quickstart"]).exit_code == 0
    assert "kind: RayJob" in capsys.readouterr().out
    assert len(loaded) == 1
