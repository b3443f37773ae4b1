"""A recipe of the user's own: a ConfigMap takes it to the head, where the job finds it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.entrypoint import make_entrypoint
from cluster.job_command import load_job
from cluster.recipe_file import MAX_JSON_BYTES, own_recipe
from cluster.render import render, to_yaml
from cluster.spec import load_cluster
from cluster.types import KubeManifest
from cluster.validate import check
from pipelines.cli import command_line
from pos2distill.config.load import load_recipe
from pos2distill.config.read import RECIPES
from pos2distill.errors import UserError
from tests.support.paths import PROJECT

SECRET = "hunter2"  # in the position of a password


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the toy's recipe; the working directory is the project, to which its paths are relative."""
    monkeypatch.chdir(PROJECT)
    path = tmp_path / "my recipe.yaml"
    path.write_text((RECIPES / "quickstart.yaml").read_text() + '# é, "quoted": $HOME\n')
    return path


def recipe_map(manifests: list[KubeManifest]) -> KubeManifest:
    (found,) = (manifest for manifest in manifests if manifest["kind"] == "ConfigMap")
    return found


def pods_with_the_map(job: KubeManifest, name: str) -> list[KubeManifest]:
    """Every pod of a job that has the ConfigMap of this name as a volume."""
    cluster = job["spec"]["rayClusterSpec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    templates.append(job["spec"]["submitterPodTemplate"])
    source = {"name": "recipe", "configMap": {"name": name}}
    return [template["spec"] for template in templates if source in template["spec"]["volumes"]]


def test_render_mounts_the_users_recipe_in_the_head_alone(mine: Path, tmp_path: Path) -> None:
    manifests = render(load_cluster("kind"), load_job(str(mine), ["training.epochs=1"]))
    assert check(manifests) == []
    (name,) = recipe_map(manifests)["data"]
    job = manifests[-1]
    (pod,) = pods_with_the_map(job, recipe_map(manifests)["metadata"]["name"])
    (container,) = pod["containers"]
    assert container["name"] == "ray-head"
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "recipe")
    assert mount["readOnly"]
    assert f" study {mount['mountPath']}/{name} training.epochs=1 " in job["spec"]["entrypoint"]
    # As Kubernetes writes the file.
    written = tmp_path / "written.yaml"
    read = list(yaml.safe_load_all(to_yaml(manifests)))
    written.write_text(recipe_map(read)["data"][name])
    assert written.read_text() == mine.read_text()
    assert load_recipe(str(written)).study == load_recipe(str(mine)).study


def test_render_of_a_recipe_of_the_project_has_no_config_map(mine: Path) -> None:
    by_name = render(load_cluster("kind"), load_job("quickstart"))
    assert not any(manifest["kind"] == "ConfigMap" for manifest in by_name)
    assert "recipe" not in {
        volume["name"]
        for volume in by_name[-1]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    }
    assert render(load_cluster("kind"), load_job("pipelines/recipes/quickstart.yaml")) == by_name


def test_render_gives_the_map_of_another_recipe_another_name(mine: Path) -> None:
    """So that a second `cluster submit` does not replace the recipe that the head of a running job mounts."""
    names = set()
    for text in (mine.read_text(), mine.read_text() + "# changed\n"):
        mine.write_text(text)
        manifests = render(load_cluster("kind"), load_job(str(mine)))
        names.add(recipe_map(manifests)["metadata"]["name"])
        assert recipe_map(manifests)["metadata"]["labels"] == load_cluster("kind").labels  # `delete` selects by them
    assert len(names) == 2
    assert all(name.startswith("try-recipe-") for name in names)


def test_make_entrypoint_names_a_built_in_recipe_by_its_name(tmp_path: Path) -> None:
    """The image has the file, but not at the path that was typed."""
    link = tmp_path / "mine.yaml"
    link.symlink_to(RECIPES / "quickstart.yaml")
    spec = load_cluster("kind")
    assert make_entrypoint(spec, load_job(str(link))) == make_entrypoint(spec, load_job("quickstart"))


def test_make_entrypoint_changes_with_the_content_of_the_recipe(mine: Path) -> None:
    """So that a running job of an earlier content is not followed."""
    spec = load_cluster("kind")
    first = make_entrypoint(spec, load_job(str(mine)))
    assert make_entrypoint(spec, load_job(str(mine))) == first
    mine.write_text(f"{mine.read_text()}# changed\n")
    assert make_entrypoint(spec, load_job(str(mine))) != first


@pytest.mark.parametrize(("line", "fits"), [("# plain\n", True), ('# "<>&"\n', False)])
def test_own_recipe_is_as_large_as_json_makes_it(mine: Path, line: str, fits: bool) -> None:
    """200 KB of text; each quote, line break, < and & takes two to six bytes in the annotation of `apply`."""
    mine.write_text(mine.read_text() + line * (200_000 // len(line)))
    if fits:
        assert own_recipe(str(mine)) is not None
        return
    with pytest.raises(UserError, match=r" bytes as JSON; a recipe of a job has at most 245760, since a ConfigMap"):
        own_recipe(str(mine))


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path: path.write_text(path.read_text() + "#" * MAX_JSON_BYTES),
            " bytes as JSON; a recipe of a job has at most 245760, since a ConfigMap holds it; shorten it, or copy",
        ),
        (
            lambda path: path.write_text(path.read_text() + f"# s3://key:{SECRET}@bucket/x\n"),
            " contains what looks like a secret, which a ConfigMap does not protect; use pods.secrets instead",
        ),
        (
            lambda path: changed(path, "examples/toy/data.jsonl.gz", "data.jsonl.gz"),
            "quickstart: data.path: PROJECT/data.jsonl.gz does not exist in the pods; set a URL, or a folder below ",
        ),
        (
            lambda path: changed(path, "examples/toy/base", f"{PROJECT}/examples/toy/base"),
            ", or the path relative to the project, examples/toy/base",
        ),
        (
            lambda path: changed(path, "examples/toy/base", "examples/../../toy/base"),
            "quickstart: model.path: examples/../../toy/base does not exist in the pods; set a URL",
        ),
    ],
    ids=["large", "secret", "data", "absolute", "outside"],
)
def test_render_rejects_a_recipe_that_pods_cannot_use_in_one_line(
    mine: Path, change: Callable[[Path], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(mine)
    assert command_line.main(["cluster", "render", "kind", str(mine)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message.replace("PROJECT", str(PROJECT)) in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert SECRET not in printed.err


def test_make_entrypoint_reads_paths_as_the_job_does(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job runs in the project's folder, whatever the working directory is here."""
    monkeypatch.chdir(PROJECT / "examples" / "toy")
    spec = load_cluster("kind", ["model_billions=0.001"])
    assert command_line.main(["cluster", "render", "kind", str(mine), "data.path=data.jsonl.gz"]) == 2
    assert make_entrypoint(spec, load_job(str(mine), ["data.path=examples/toy/data.jsonl.gz"]))


def test_validate_checks_the_config_map(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifests = render(load_cluster("kind"), load_job(str(mine)))
    recipe_map(manifests)["dta"] = {"a": 1}
    recipe_map(manifests)["data"]["b"] = 1
    path = tmp_path / "manifests.yaml"
    path.write_text(to_yaml(manifests))
    assert command_line.main(["cluster", "validate", str(path)]) == 2
    errors = capsys.readouterr().err
    name = recipe_map(manifests)["metadata"]["name"]
    assert f"ConfigMap/{name}: dta: unknown field; did you mean 'data'?" in errors
    assert f"ConfigMap/{name}: data.b: expected a string (in quotes), got a number" in errors
