"""A recipe without the settings that equal their defaults."""

from collections.abc import Collection, Iterator
from typing import Any

from pydantic import ValidationError

from pos2distill.config.recipe import Recipe


def all_settings(recipe: Recipe) -> dict[str, Any]:
    """Every resolved setting of a recipe, as a file would have it."""
    settings = {"name": recipe.name, "description": recipe.description, **recipe.study.model_dump(mode="json")}
    # Filled in from `inference.scales`; a file must not have them.
    del settings["model"]["rope_scales"]
    if recipe.sweep:
        settings["sweep"] = {name: list(values) for name, values in recipe.sweep.items()}
    settings["runtime"] = recipe.runtime.model_dump(mode="json")
    return settings


def changed_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that differ from the defaults, many of which follow from other settings. They load as this recipe.

    The studies of a sweep can have different defaults, so for a sweep: all that the recipe and the command line wrote.
    """
    settings = all_settings(recipe)
    if recipe.written:
        for name in recipe.study.model_dump():
            settings.pop(name)
        settings.update(recipe.written)
    # Repeated, since some settings can be left out only after another one, which their defaults would contradict.
    while _leave_out_defaults(settings, recipe):
        pass
    return settings


def changed_study_settings(recipe: Recipe) -> dict[str, Any]:
    """The `changed_settings` that can change a result, by dotted name."""
    dotted: dict[str, Any] = {}
    for section, value in changed_settings(recipe).items():
        if isinstance(value, dict) and section != "runtime":
            dotted |= {f"{section}.{name}": setting for name, setting in value.items()}
        elif section == "seed":
            dotted[section] = value
    return dotted


def _leave_out_defaults(settings: dict[str, Any], recipe: Recipe) -> bool:
    """Leave out each setting without which the recipe is the same. Returns whether any was left out."""
    changed = False
    for section, name in list(_leaves(settings, kept=("sweep", *recipe.written))):
        if section is settings and name in ("name", "description"):
            continue
        before = list(section.items())
        del section[name]
        if _gives(settings, recipe):
            changed = True
        else:
            # As it was, in the same order.
            section.clear()
            section.update(before)
    return changed


def _leaves(settings: dict[str, Any], kept: Collection[str] = ()) -> Iterator[tuple[dict[str, Any], str]]:
    """Every value that is not a section: the mapping that holds it, and its name there.

    Args:
        kept: sections that are left out, since the study that is compared does not show what depends on them.
    """
    for name, value in settings.items():
        if name in kept:
            continue
        # The parts of a section before the section: an optional one (`training.lora`) is then left out whole.
        if isinstance(value, dict):
            yield from list(_leaves(value))
        yield settings, name


def _gives(settings: dict[str, Any], recipe: Recipe) -> bool:
    """Whether the settings resolve to this recipe."""
    study = {name: value for name, value in settings.items() if name in type(recipe.study).model_fields}
    try:
        other = Recipe.model_validate(
            {
                "name": recipe.name,
                "description": recipe.description,
                "study": study,
                "runtime": settings.get("runtime", {}),
                "other_tasks": recipe.other_tasks,
            }
        )
    except ValidationError:
        return False
    return other.study == recipe.study and other.runtime == recipe.runtime
