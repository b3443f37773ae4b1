"""Recipes from YAML files and the command line, validated. Parsing imports no torch, ray or vllm."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pos2distill.config.inference import InferenceSection
from pos2distill.config.model import ModelSection
from pos2distill.config.overrides import is_within
from pos2distill.config.read import RECIPES, RawRecipe, find_yaml, read_recipe, to_raw_recipe
from pos2distill.config.recipe import Recipe
from pos2distill.config.study import Study
from pos2distill.config.validation import RECIPE_FIELDS, to_user_error
from pos2distill.errors import UserError, reworded


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `section.field=value` overrides.

    Args:
        name_or_path: a name under `pipelines/recipes/`, or the path of a YAML file.
        overrides: for example `["training.learning_rate=1e-5", "runtime.storage=s3://bucket/run"]`.
    Raises:
        UserError: naming the file, the field and the nearest right name.
    """
    return _validate_with_other_tasks(read_recipe(name_or_path, overrides))


def make_recipe(sections: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "recipe") -> Recipe:
    """The recipe in a mapping of sections, as in a file.

    Args:
        overrides: as in `load_recipe`.
        source: where the mapping is from, for errors.
    Raises:
        UserError: naming the field and the nearest right name.
    """
    return _validate_with_other_tasks(to_raw_recipe(sections, overrides, source=source))


def _validate_with_other_tasks(raw_recipe: RawRecipe) -> Recipe:
    recipe = validate(raw_recipe)
    _reject_swept(recipe, raw_recipe)
    if not recipe.study.evaluation.also_evaluate:
        return recipe
    # In a second pass, because only a valid study says which other tasks it names.
    return validate(raw_recipe, _load_other_tasks(recipe.study, raw_recipe.source))


def _reject_swept(recipe: Recipe, raw_recipe: RawRecipe) -> None:
    """Reject a setting of the command line that has no effect, since every study of the sweep sets it.

    Raises:
        UserError: naming the setting.
    """
    for dotted in recipe.sweep:
        for name in raw_recipe.overridden:
            # A section around the swept setting may leave that out. In a swept section, other settings stay.
            if is_within(dotted, name) and _has(raw_recipe.raw, dotted):
                raise UserError(
                    f"command line: {name}: the recipe sweeps {dotted}; change its values (sweep.{dotted}=[…]), or add "
                    f"'sweep={{}}' for one study"
                )


def _has(raw: Any, dotted: str) -> bool:
    """Whether raw sections hold a setting of this name."""
    for name in dotted.split("."):
        if not isinstance(raw, Mapping) or name not in raw:
            return False
        raw = raw[name]
    return True


def validate(raw_recipe: RawRecipe, other_tasks: Mapping[str, Study] | None = None) -> Recipe:
    """The recipe in its raw sections.

    Args:
        other_tasks: the studies that `evaluation.also_evaluate` names.
    Raises:
        UserError: naming the field and the nearest right name.
    """
    fields = {
        **_recipe_fields(raw_recipe.raw),
        "other_tasks": other_tasks or {},
        "written_paths": raw_recipe.written_paths,
        "auto_precisions": raw_recipe.auto_precisions,
    }
    # Before defaults are filled in: the studies of a sweep may have different methods, with different defaults.
    if raw_recipe.raw.get("sweep"):
        fields["written"] = copy.deepcopy(fields["study"])
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise to_user_error(
            error,
            Recipe,
            raw_recipe.source,
            raw_recipe.overridden,
            without_overrides=_recipe_fields(raw_recipe.without_overrides),
        ) from None


def _recipe_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A file has the sections of the study next to the recipe's own fields; a `Recipe` has them in `study`."""
    study = {name: value for name, value in raw.items() if name not in RECIPE_FIELDS}
    return {"study": study} | {name: value for name, value in raw.items() if name in RECIPE_FIELDS}


def _load_other_tasks(study: Study, source: Path | str) -> dict[str, Study]:
    """The other tasks that `evaluation.also_evaluate` names in the recipe from `source`.

    Raises:
        UserError: if one cannot be evaluated together with this study.
    """
    other_tasks: dict[str, Study] = {}
    for name in study.evaluation.also_evaluate:
        with reworded(lambda message: f"evaluation.also_evaluate: {message}"):
            # Without its own other tasks, which might name this recipe in turn, and without its sweep.
            other = load_recipe(name, ["evaluation.also_evaluate=[]", "sweep={}"]).study
        require_equal_split(study, name, other)
        stem = Path(name).stem
        if stem in other_tasks:
            raise UserError(f"evaluation.also_evaluate: two recipes are called {stem}; results go by that name")
        if isinstance(source, Path) and find_yaml(name, RECIPES, "recipe").resolve() == source.resolve():
            raise UserError(f"evaluation.also_evaluate: {name}: is this recipe itself; leave it out")
        other_tasks[stem] = other
    return other_tasks


def require_equal_split(study: Study, name: str, other: Study) -> None:
    """Reject another task that splits questions differently: it may be evaluated on questions of training.

    Args:
        name: that of the other task.
    Raises:
        UserError: naming both fractions.
    """
    # A question is for evaluation if its hash is below this fraction.
    if other.data.eval_fraction != study.data.eval_fraction:
        raise UserError(
            f"evaluation.also_evaluate: {name}: its data.eval_fraction is {other.data.eval_fraction}, here it is "
            f"{study.data.eval_fraction}; they must be equal, so that no evaluation question is trained on"
        )


def validate_evaluated(raw: Mapping[str, Any]) -> Study:
    """The study of these sections, of which only the data and the evaluation are used.

    Its inference method may be that of another study, and need not suit the training examples and slots of this one.

    Raises:
        ValidationError: if a section is invalid, or if two sections other than `inference` contradict each other.
    """
    study = Study.model_validate({**raw, "inference": {}})
    inference = InferenceSection.model_validate(raw.get("inference", {}))
    return study.model_copy(update={"inference": inference, "model": ModelSection.model_validate(raw["model"])})
