"""The studies of a sweep: a recipe's settings with every combination of the values that its sweep names."""

import copy
import itertools
import math
from collections.abc import Mapping
from typing import Any

from pos2distill.config.load import require_equal_split, validate
from pos2distill.config.overrides import set_value
from pos2distill.config.paths import paths_in, resolve_paths
from pos2distill.config.read import RawRecipe, auto_precisions_in, reject_filled_in
from pos2distill.config.recipe import Recipe
from pos2distill.config.study import Study
from pos2distill.config.validation import dotted_names, other_name
from pos2distill.errors import UserError, did_you_mean_one, reworded

_MAX_CELLS = 1000  # limit on the studies of a sweep


def sweep_cells(recipe: Recipe) -> list[tuple[dict[str, Any], Recipe]]:
    """The studies of a sweep: for every combination of values, in the order written, its settings and its recipe.

    A cell is built from the study as it was written, so that each cell gets the defaults of its own method.

    Raises:
        UserError: naming the setting, if it or a value of it cannot be used.
    """
    if not recipe.sweep:
        return [({}, recipe)]
    _check_sweep(recipe)
    cells: list[tuple[dict[str, Any], Recipe]] = []
    studies: set[str] = set()
    for values in itertools.product(*recipe.sweep.values()):
        settings = dict(zip(recipe.sweep, values, strict=True))
        cell = _make_cell(recipe, settings)
        # Equal studies have the same result, which would count several times in an interval over seeds.
        study = cell.study.model_dump_json()
        if study in studies:
            named = ", ".join(f"{dotted}={value}" for dotted, value in settings.items())
            raise UserError(f"sweep: {named}: is the same study as an earlier one; list each value once")
        studies.add(study)
        cells.append((settings, cell))
    return cells


def _check_sweep(recipe: Recipe) -> None:
    """Reject a sweep of what is not a setting of a study, and one of too many studies.

    Raises:
        UserError: naming a setting that cannot be swept, or if there are too many studies.
    """
    # The other tasks are loaded once for all studies of a sweep, so they cannot differ between them.
    possible = [name for name in dotted_names(Study) if name != "evaluation.also_evaluate"]
    # Whole sections too, for settings that only make sense together.
    possible += [name for name, field in Study.model_fields.items() if name not in ("seed", "evaluation")]
    for dotted, values in recipe.sweep.items():
        if dotted not in possible:
            usual = other_name(dotted, Study)
            hint = f"; did you mean '{usual}'?" if usual else did_you_mean_one(dotted, possible)
            raise UserError(f"sweep: {dotted}: not a setting of a study{hint}")
        if not values:
            raise UserError(f"sweep: {dotted}: expected at least one value")
        within = [name for name in recipe.sweep if name.startswith(f"{dotted}.")]
        if within:
            raise UserError(
                f"sweep: {dotted}: is swept as a section, and so is its setting {within[0]}; name one of them"
            )
    count = math.prod(len(values) for values in recipe.sweep.values())
    if count > _MAX_CELLS:
        raise UserError(f"sweep: {count} studies; at most {_MAX_CELLS} are possible")


def _make_cell(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe of one study of a sweep.

    Raises:
        UserError: naming the setting whose value cannot be used, also beside the other tasks.
    """
    # A recipe made in Python has no written form.
    raw = copy.deepcopy(recipe.written) or recipe.study.model_dump(mode="json")
    raw["name"] = recipe.name
    raw["description"] = recipe.description
    raw["runtime"] = recipe.runtime.model_dump(mode="json")
    swept: dict[str, Any] = {}
    for dotted, value in settings.items():
        _set_swept(raw, dotted, value)
        set_value(swept, dotted, copy.deepcopy(value))
    resolve_paths(raw)
    raw_recipe = RawRecipe(
        raw=raw,
        source="sweep",
        overridden=(),
        without_overrides=raw,
        written_paths={**recipe.written_paths, **paths_in(swept)},
        auto_precisions=auto_precisions_in(raw),
    )
    cell = validate(raw_recipe, recipe.other_tasks)
    # Once more, since the fraction may be swept.
    for name, other in recipe.other_tasks.items():
        with reworded(lambda message: f"sweep: {message}"):
            require_equal_split(cell.study, name, other)
    return cell


def _set_swept(raw: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a swept setting. A section keeps compatible settings that the value does not name."""
    # A copy, since paths in a section are resolved in place.
    swept, kept = copy.deepcopy(value), raw.get(dotted)
    if isinstance(kept, dict) and isinstance(swept, dict):
        if dotted == "inference" and swept.get("method") not in (None, kept.get("method")):
            # Scales belong to the method that they were written for; each other setting belongs to one method.
            kept = {name: setting for name, setting in kept.items() if name != "scales"}
        swept = _merged(kept, swept)
    alone: dict[str, Any] = {}
    set_value(alone, dotted, swept)
    reject_filled_in(alone, "sweep", [])
    set_value(raw, dotted, swept)


def _merged(kept: Mapping[str, Any], swept: Mapping[str, Any]) -> dict[str, Any]:
    """The swept section, with the kept settings that it does not name, also in sections within it."""
    merged = {**kept, **swept}
    for name in kept.keys() & swept.keys():
        if isinstance(kept[name], dict) and isinstance(swept[name], dict):
            merged[name] = _merged(kept[name], swept[name])
    return merged
