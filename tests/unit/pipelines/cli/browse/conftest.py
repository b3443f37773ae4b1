"""A study of 4 questions that the tiny random model answered, in one process, for the commands that look at results."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.cli import command_line
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from tests.support.commands import Command, run_evaluate, run_study
from tests.support.paths import ODD_NAME


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory, make_shared_recipe: Callable[..., Recipe]) -> Recipe:
    folder = tmp_path_factory.mktemp("browse")
    make_shared_recipe(folder, data={"documents": 3, "eval_examples": 2}, method={"k": 2}, evaluation={"slots": "all"})
    other = folder / "short.yaml"
    (folder / "recipe.yaml").rename(other)
    recipe = make_shared_recipe(
        folder,
        runtime={"executor": "local", "storage": str(folder / ODD_NAME)},
        evaluation={"slots": "all", "other_documents": [], "also_evaluate": [str(other)]},
    )
    run_study(recipe)
    return recipe


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str, code: int = 0) -> list[str]:
        assert command_line.main(list(words)) == code
        captured = capsys.readouterr()
        return (captured.err if code else captured.out).splitlines()

    return run


@pytest.fixture(scope="session")
def evaluated(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs that were evaluated only: the base model as it is, and with shorter answers."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name, words in (("one", []), ("two", ["evaluation.max_new_tokens=2"])):
        path = str(Path(recipe.study.data.path).parent / "recipe.yaml")
        run_evaluate(load_recipe(path, [f"runtime.storage={folder / name}", *words]))
    return folder
