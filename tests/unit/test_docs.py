import re
import shlex

import pytest

from pipelines.preflight import check_against_model
from pos2distill.config import METHODS
from pos2distill.config.inference import InferenceSection
from pos2distill.config.load import load_recipe, project_root
from scripts.reference_tables import CLUSTER_PAGE, PAGE, render, render_cluster


def test_reference_tables_are_up_to_date() -> None:
    """Else run `make docs`."""
    assert PAGE.read_text() == render(PAGE.read_text())
    assert CLUSTER_PAGE.read_text() == render_cluster(CLUSTER_PAGE.read_text())


def test_reference_tables_list_every_setting() -> None:
    page = PAGE.read_text()
    for line in (
        "| `advantageous_slot` | first \\| last \\| auto \\| random \\| integer \\| [integer, …] | first |",
        "| `betas` | [number, number] | [0.9, 0.95] |",
        "## `runtime.samplers`, `runtime.teachers`",
    ):
        assert line in page


def methods_by_command() -> list[tuple[str, str, str, str]]:
    """The lines of "Every method by one command": method, settings, further ones for either recipe."""
    page = (project_root() / "docs" / "methods.md").read_text()
    section = page.partition("## Every method by one command")[2].partition("## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in cells) for cells in lines[2:]]  # type: ignore[misc]


def settings_in(*cells: str) -> list[str]:
    return [setting for cell in cells for code in re.findall("`([^`]*)`", cell) for setting in shlex.split(code)]


@pytest.mark.parametrize("line", [line for line in methods_by_command() if "`" in line[1]], ids=lambda line: line[0])
def test_methods_by_command_load_with_both_recipes(line: tuple[str, str, str, str]) -> None:
    _, settings, toy, real = line
    load_recipe("facts_smollm2", settings_in(settings, real))
    if toy and not toy.startswith("`"):
        return  # says in words why not, or what instead
    check_against_model(load_recipe("quickstart", settings_in(settings, toy)).study)


def test_methods_by_command_name_every_method() -> None:
    settings = [setting for line in methods_by_command() for setting in settings_in(line[1])]
    assert {f"method.name={name}" for name in METHODS} <= set(settings)
    methods = InferenceSection.model_json_schema()["properties"]["method"]["enum"]
    assert {f"inference.method={name}" for name in methods if name != "none"} <= set(settings)
