from collections.abc import Callable

import pytest

from pos2distill.config import (
    Recipe,
)
from pos2distill.errors import UserError


def test_load_recipe_overrides_are_yaml_values(load: Callable[..., Recipe]) -> None:
    recipe = load(
        "training.learning_rate=1e-5", "runtime.samplers.max=3", "evaluation.slots=[0, 9]", "description=a=b", "seed=7"
    )
    assert recipe.study.training.learning_rate == 1e-5
    assert recipe.runtime.samplers.max == 3
    assert recipe.study.evaluation.slots == (0, 9)
    assert recipe.description == "a=b"
    assert recipe.study.seed == 7
    assert load("description='clerk #7'").description == load('description="clerk #7"').description == "clerk #7"
    assert load("description=C#7").description == "C#7"
    assert load("sweep={description: [Why?, 'a #b']}").sweep == {"description": ("Why?", "a #b")}


def test_load_recipe_applies_the_last_override(load: Callable[..., Recipe]) -> None:
    assert load("seed=1", "seed=2").study.seed == 2
    assert load("seed = 3").study.seed == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epochs", "training.epochs: expected section.field=value"),
        ("=3", "=3: expected section.field=value"),
        ("runtime.storage=", "runtime.storage: no value after '='; write null for none, or '' for an empty text"),
        ("training.epochs 3", "training.epochs 3: expected section.field=value; did you mean 'training.epochs=3'?"),
        ("= 5", "= 5: expected section.field=value"),
        ("the recipe is", "the recipe is: expected section.field=value"),
        ("training.epochs: 3", "training.epochs: 3: expected section.field=value; did you mean 'training.epochs=3'?"),
        ("training.epochs:3", "training.epochs:3: expected section.field=value; did you mean 'training.epochs=3'?"),
        ("training.epochs : 3", "training.epochs : 3: expected section.field=value; did you mean 'training.epochs=3'?"),
        ("seed: 5", "seed: 5: expected section.field=value; did you mean 'seed=5'?"),
        (
            "evaluation.slots: [1, 2]",
            "evaluation.slots: [1, 2]: expected section.field=value; did you mean 'evaluation.slots=[1, 2]'?",
        ),
        ("training. epochs=3", "training. epochs=3: expected section.field=value"),
        ("the recipe", "the recipe: expected section.field=value"),
        ("training..epochs=3", "training..epochs=3: expected section.field=value"),
        (".epochs=3", ".epochs=3: expected section.field=value"),
        ("name.first=x", "name.first: 'name' is a single value and has no fields"),
        (
            "seed=[1",
            "seed: cannot read the value: not valid YAML: line 2: did not find expected ',' or ']'; if it has blanks, "
            "put the whole setting in quotes",
        ),
        (
            "data.template.user={documents} {question}",
            "data.template.user: cannot read the value: not valid YAML: line 1: did not find expected <document "
            "start>; if it is text, give it quotes of its own: 'data.template.user=\"{documents} {question}\"'",
        ),
        ("seed=2024-13-45", "seed: cannot read the value: not valid YAML: a value cannot be converted (ValueError)"),
    ],
)
def test_load_recipe_reports_a_bad_override(load: Callable[..., Recipe], override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("override", "comment"),
    [
        ("data.path=/data/set #2.jsonl", "#2.jsonl"),
        ("evaluation.slots=[0, 1] # two", "# two"),
        ("sampling=temperature: 0 #5", "#5"),
        ("description=#7 # 8", "#7 # 8"),
        ("description='a' #b", "#b"),
    ],
)
def test_load_recipe_rejects_a_comment_behind_a_value(load: Callable[..., Recipe], override: str, comment: str) -> None:
    """It may belong to the value, of which the rest would be used."""
    name = override.partition("=")[0]
    with pytest.raises(UserError) as caught:
        load(override)
    assert str(caught.value) == (
        f"{name}: '{comment}' is a comment in YAML, and would be left out; remove it, or if it belongs to the value, "
        f"give the value quotes of its own, as in '{name}=\"a #b\"'"
    )
