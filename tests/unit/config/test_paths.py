import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pos2distill.config import (
    Recipe,
)
from pos2distill.config.load import load_recipe
from pos2distill.config.paths import project_root
from pos2distill.errors import UserError


def test_load_recipe_makes_local_paths_absolute(
    load: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    recipe = load("model.path=base")
    assert recipe.study.model.path == str(tmp_path / "base")
    assert recipe.study.data.path == str(tmp_path / "data.jsonl")
    assert recipe.storage == str(tmp_path / "runs" / "small")
    remote = load("data.path=s3://bucket/data.jsonl", "runtime.storage=gs://bucket/run")
    assert (remote.study.model.path, remote.study.data.path) == ("some/model", "s3://bucket/data.jsonl")
    assert remote.storage == "gs://bucket/run"


def test_load_recipe_makes_one_url_of_a_storage_with_and_without_a_slash(load: Callable[..., Recipe]) -> None:
    """In a bucket, `run//report` would be another folder than `run/report`."""
    assert load("runtime.storage=s3://bucket/run/").storage == "s3://bucket/run"
    assert load("runtime.storage=s3://bucket/").storage == "s3://bucket"
    assert load("runtime.storage=file:///runs/x/").storage == "file:///runs/x"
    assert load("runtime.storage=file:///").storage == "file:///"
    assert load("runtime.storage=dir://runs::s3://bucket/x/").storage == "dir://runs::s3://bucket/x"


def test_load_recipe_takes_any_name_of_a_model_on_a_server(load: Callable[..., Recipe]) -> None:
    tuned = "ft:gpt-4o-mini-2024-07-18:my-org::ID"
    settings = ("model.engine=openai", "runtime.endpoint.base_url=http://127.0.0.1:9/v1", "data.train_examples=0")
    assert load(f"model.path={tuned}", *settings).study.model.path == tuned


def test_load_recipe_rejects_a_working_directory_whose_name_cannot_be_written(
    load: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"lat\xff")
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    with pytest.raises(UserError, match=r"expected a path in UTF-8, also of the working directory$"):
        load("runtime.storage=runs/x")


def test_load_recipe_of_the_project_works_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart")
    toy = project_root() / "examples" / "toy"
    assert (recipe.study.model.path, recipe.study.data.path) == (str(toy / "base"), str(toy / "data.jsonl.gz"))
    assert recipe.storage == str(tmp_path / "runs" / "quickstart")
    # A hub name stays; data that does not come with the project is in the working directory.
    published = load_recipe("nq_llama3_8b").study
    assert published.model.path == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert published.data.path == str(tmp_path / "data" / "nq-open-20_total_documents_gold_at_0.jsonl.gz")
    # An override is the user's own.
    assert load_recipe("quickstart", ["data.path=own.jsonl"]).study.data.path == str(tmp_path / "own.jsonl")


def test_load_recipe_keeps_the_paths_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built_in = load_recipe("quickstart")
    assert built_in.written_paths == {"model.path": "examples/toy/base", "data.path": "examples/toy/data.jsonl.gz"}
    # The same words on the command line mean a file in the user's working directory.
    same = load_recipe("quickstart", ["data.path=examples/toy/data.jsonl.gz", "runtime.storage=runs/x"])
    assert same.written_paths == built_in.written_paths | {"runtime.storage": "runs/x"}
    assert same.study.data.path == str(tmp_path / "examples" / "toy" / "data.jsonl.gz")
    assert "written_paths" not in same.model_dump()


def test_project_root_of_a_checkout_has_run_py() -> None:
    assert (project_root() / "run.py").is_file()
    assert (project_root() / "pipelines" / "recipes" / "quickstart.yaml").is_file()


def test_project_root_of_a_wheel_is_the_package(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "pos2distill"
    package.mkdir(parents=True)
    assert project_root(package) == tmp_path / "site-packages"
    (package / "pipelines" / "recipes").mkdir(parents=True)
    (tmp_path / "site-packages" / "run.py").touch()  # of another package
    assert project_root(package) == package
