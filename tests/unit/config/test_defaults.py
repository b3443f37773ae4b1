from pathlib import Path
from typing import Any

import pytest
import yaml

from pos2distill.config.defaults import all_settings, changed_settings, changed_study_settings
from pos2distill.config.load import load_recipe
from pos2distill.config.read import recipe_names
from pos2distill.config.sweep import sweep_cells


def test_changed_settings_keep_those_of_a_chat_template() -> None:
    kwargs = {"enable_thinking": False}
    recipe = load_recipe(
        "quickstart", [f"model.chat_template_kwargs={yaml.safe_dump(kwargs, default_flow_style=True)}"]
    )
    assert changed_settings(recipe)["model"]["chat_template_kwargs"] == kwargs


@pytest.mark.parametrize("name", recipe_names())
def test_changed_settings_load_as_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    short, full = changed_settings(recipe), all_settings(recipe)
    for settings in (short, full):
        path = tmp_path / "again.yaml"
        path.write_text(yaml.safe_dump(settings))
        again = load_recipe(str(path))
        assert (again.study, again.runtime, again.description) == (recipe.study, recipe.runtime, recipe.description)
    assert len(str(short)) < len(str(full)) / 2
    assert short["name"] == recipe.name


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("training.epochs=2", None),  # the default
        ("training.epochs=3", {"epochs": 3}),
        ("training.lora={rank: 16}", {"lora": {}}),  # an optional section with all its defaults
        ("training.lora.rank=4", {"lora": {"rank": 4}}),
    ],
)
def test_changed_settings_of_training(override: str, shown: Any) -> None:
    base = changed_settings(load_recipe("quickstart"))["training"]
    training = changed_settings(load_recipe("quickstart", [override]))["training"]
    assert training == base | (shown or {})


def test_changed_settings_have_the_learning_rate_only_if_adapters_do_not_give_it() -> None:
    open_rate = ["training.learning_rate=null"]
    assert "learning_rate" not in changed_settings(load_recipe("quickstart", open_rate))["training"]
    adapters = [*open_rate, "training.lora.rank=4"]
    assert "learning_rate" not in changed_settings(load_recipe("quickstart", adapters))["training"]
    other = changed_settings(load_recipe("quickstart", ["training.lora.rank=4", "training.learning_rate=3e-6"]))
    assert other["training"]["learning_rate"] == 3e-6


def test_changed_settings_keep_a_value_that_equals_a_default_of_another_setting() -> None:
    """With seed 3, evaluation.seed would be 3, so 0 is shown."""
    settings = changed_settings(load_recipe("quickstart", ["seed=3", "evaluation.seed=0"]))
    assert settings["evaluation"]["seed"] == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["sweep={seed: [0, 1], method.name: [r1, sft]}"],
        ["sweep={seed: [0, 1], model.engine: [hf, vllm]}", "evaluation.seed=0"],
        ["sweep={method.name: [r1, kl], seed: [0, 1]}", "method.weights=paper"],
        ["sweep={seed: [0, 1], data.train_examples: [160, 40]}", "data.train_candidates=640"],
    ],
)
def test_changed_settings_of_a_sweep_load_as_the_same_studies(tmp_path: Path, overrides: list[str]) -> None:
    """Also what is a default of the first study alone."""
    recipe = load_recipe("quickstart", overrides)
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(changed_settings(recipe), sort_keys=False))
    again = [cell.study for _, cell in sweep_cells(load_recipe(str(path)))]
    assert again == [cell.study for _, cell in sweep_cells(recipe)]
    assert len(again) == 4


def test_changed_study_settings_are_dotted_and_without_the_runtime() -> None:
    recipe = load_recipe("quickstart", ["seed=3", "evaluation.seed=0", "runtime.executor=local"])
    changed = changed_study_settings(recipe)
    assert (changed["seed"], changed["evaluation.seed"], changed["training.learning_rate"]) == (3, 0, 1e-3)
    assert not [name for name in changed if name.startswith(("runtime", "name", "description"))]
