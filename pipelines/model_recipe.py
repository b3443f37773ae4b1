"""The recipe that evaluates a model on a file of questions, of the command line and of `api`."""

from collections.abc import Mapping, Sequence
from typing import Any

from pos2distill.config import Recipe
from pos2distill.config.evaluation_recipe import DEFAULT_EXAMPLES, evaluation_recipe
from pos2distill.config.overrides import overrides_setting, split_override
from pos2distill.errors import UserError

SETTINGS_OF_ARGUMENTS = {
    "model": "model.path",
    "data": "data.path",
    "base_url": "runtime.endpoint.base_url",
    "documents": "data.documents",
    "examples": "data.eval_examples",
    "slots": "evaluation.slots",
}
"""The settings that the arguments of `recipe_of_questions` stand for."""


def recipe_of_questions(
    model: str, data: str, *, examples: int | None = None, overrides: Sequence[str] = (), **settings: Any
) -> Recipe:
    """The recipe that evaluates a model on a file of questions: on 100 of them, or on all if the file has fewer.

    Args:
        examples: how many; then a file with fewer is rejected. The others: see `evaluation_recipe`.
    Raises:
        UserError: naming the setting at fault, the argument whose setting is overridden too, or the record that cannot
            be read.
    """
    _reject_set_twice({"model": model, "data": data, "examples": examples, **settings}, overrides)
    if examples is not None:
        return evaluation_recipe(model, data, examples=examples, overrides=overrides, **settings)
    recipe = evaluation_recipe(model, data, overrides=overrides, **settings)
    if any(overrides_setting(override, "data.eval_examples") for override in overrides):
        return recipe
    # Imported here, so that --help and a misspelled field are answered at once.
    from pos2distill.tasks.datasets import count_questions

    found = count_questions(recipe.study.data, max(recipe.study.prompt_lengths), DEFAULT_EXAMPLES)
    # With none, the evaluation itself says why.
    if found in (0, DEFAULT_EXAMPLES):
        return recipe
    return evaluation_recipe(model, data, examples=found, overrides=overrides, **settings)


def _reject_set_twice(arguments: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Reject an argument beside an override of its setting or of a section around it, which would replace it.

    Raises:
        UserError: naming both.
    """
    for name, value in arguments.items():
        setting = SETTINGS_OF_ARGUMENTS[name]
        replacing = [split_override(override)[0] for override in overrides if overrides_setting(override, setting)]
        if value is None or not replacing:
            continue
        if setting in replacing:
            raise UserError(f"{name}: {setting} is set too; give one of them")
        section = replacing[0]
        raise UserError(
            f"{name}: {setting} would be replaced with its whole section {section}; set fields of the section instead, "
            f"as {section}.FIELD"
        )
