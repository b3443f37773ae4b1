"""Recipes from YAML files and the command line.

`read_sections` and `to_user_error` also serve other files of sections, such as cluster specs.
Parsing imports no torch, ray or vllm.
"""

import copy
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pos2distill.config import Recipe, Study
from pos2distill.config.overrides import apply_override, is_within, set_value
from pos2distill.config.paths import paths_in, project_root, resolve_paths, resolve_project_paths
from pos2distill.config.validation import RECIPE_FIELDS, dotted_names, to_user_error
from pos2distill.config.yaml_reader import read_document
from pos2distill.errors import UserError, did_you_mean
from pos2distill.secrets import looks_secret, mask_secrets

__all__ = [
    "RECIPES",
    "find_yaml",
    "is_built_in",
    "load_recipe",
    "make_recipe",
    "read_sections",
    "recipe_names",
    "refuse_secrets",
    "sweep_cells",
    "to_user_error",
]


RECIPES = project_root() / "pipelines" / "recipes"

_MAX_CELLS = 1000  # studies of a sweep


def is_built_in(recipe: Path) -> bool:
    """Whether a recipe's file is one of the project's, which jobs have."""
    return recipe.resolve().parent == RECIPES.resolve()


def recipe_names() -> list[str]:
    """Names of the recipes that come with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `section.field=value` overrides.

    Args:
        name_or_path: a name under `pipelines/recipes/`, or the path of a YAML file.
        overrides: for example `["training.learning_rate=1e-5", "runtime.storage=s3://bucket/run"]`.
    Raises:
        UserError: naming the file, the field and the nearest right name.
    """
    path = find_yaml(name_or_path, RECIPES, "recipe")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path}: expected a recipe, a file named *.yaml; data goes to data.path")
    return make_recipe(read_sections(path, "model, data, …"), overrides, source=path)


def make_recipe(raw: dict[str, Any], overrides: Sequence[str] = (), *, source: Path | str = "recipe") -> Recipe:
    """The recipe in a mapping of sections, as in a file.

    Args:
        raw: is changed. overrides: as of `load_recipe`.
        source: of the mapping, for errors.
    Raises:
        UserError: naming the field and the nearest right name.
    """
    without_overrides = copy.deepcopy(raw)
    overridden = [apply_override(raw, override) for override in overrides]
    refuse_secrets(raw, source, overridden, "set it in the environment, or use the storage's own credentials")
    _refuse_filled_in(raw, source, overridden)
    written_paths, auto_precisions = paths_in(raw), _auto_precisions_in(raw)
    # Only built-in recipes name files of the project; a user's paths are relative to the working directory.
    if isinstance(source, Path) and is_built_in(source):
        resolve_project_paths(raw, overridden)
    # After the overrides, which may contain relative paths as well.
    resolve_paths(raw)
    recipe = _validate(
        raw,
        source,
        overridden,
        without_overrides=without_overrides,
        written_paths=written_paths,
        auto_precisions=auto_precisions,
    )
    # In a second pass, because only a valid study says which other tasks it names.
    if recipe.study.evaluation.also_evaluate:
        other_tasks = _load_other_tasks(recipe.study, source)
        recipe = _validate(
            raw,
            source,
            overridden,
            without_overrides=without_overrides,
            other_tasks=other_tasks,
            written_paths=written_paths,
            auto_precisions=auto_precisions,
        )
    return recipe


def _refuse_filled_in(raw: Mapping[str, Any], file: Path | str, overridden: Sequence[str]) -> None:
    """Refuse a setting that only `Study` fills in. Not in `Study` itself, which is validated with it again."""
    model = raw.get("model")
    if isinstance(model, Mapping) and model.get("rope_scales"):
        source = "command line" if "model.rope_scales" in overridden else file
        raise UserError(f"{source}: model.rope_scales: filled in from inference.scales; set those")


def refuse_secrets(raw: Any, source: Path | str, overridden: Sequence[str], remedy: str, *, prefix: str = "") -> None:
    """Refuse settings that contain a secret, such as a URL with a password, before any message repeats them.

    Settings end in reports, model cards, trackers and manifests.

    Args:
        raw: sections as they were written. overridden: dotted names that the command line sets instead of `source`.
        remedy: where secrets belong, for the message.
        prefix: of the names in `overridden` as they were typed, for the message.
    """
    for dotted, text in _strings_in(raw, ""):
        if looks_secret(text):
            is_override = any(is_within(dotted, name) for name in overridden)
            where = f"command line: {prefix}" if is_override else f"{source}: "
            raise UserError(f"{where}{mask_secrets(dotted)}: contains what looks like a secret; {remedy}")


def _strings_in(value: Any, dotted: str) -> Iterator[tuple[str, str]]:
    """All strings in raw sections, with their dotted names. Keys are strings, too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            name = f"{dotted}.{key}" if dotted else str(key)
            yield name, str(key)
            yield from _strings_in(inner, name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _strings_in(inner, f"{dotted}[{index}]")
    elif isinstance(value, str):
        yield dotted, value


def find_yaml(name_or_path: str, folder: Path, kind: str) -> Path:
    """The YAML file of that name in the project's folder, else the file at that path.

    Args:
        kind: of file, for the error.
    Raises:
        UserError: with the nearest name in the folder, or in that of the path.
    """
    path = folder / f"{name_or_path}.yaml"
    # os.path, because Path raises an error for a name that is too long.
    if not os.path.exists(path):
        path = Path(os.path.expanduser(name_or_path))
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        raise UserError(f"{name_or_path}: is a folder, expected a {kind}, a file named *.yaml")
    if os.path.islink(path):
        raise UserError(f"{name_or_path}: is a broken symbolic link to {os.readlink(path)}")
    if "=" in name_or_path:
        raise UserError(f"{name_or_path}: expected a {kind} first, then settings")
    # Hidden files, such as those of editors, are not suggested.
    files = []
    if os.path.isdir(path.parent):
        files = [str(found) for found in path.parent.glob("[!.]*.yaml")]
    if path.suffix == ".yaml":
        raise UserError(f"{name_or_path:.300}: no such file{did_you_mean(name_or_path, files)}")
    names = [found.stem for found in folder.glob("[!.]*.yaml")]
    raise UserError(f"{name_or_path:.300}: no such {kind}{did_you_mean(name_or_path, [*names, *files])}")


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
            raise UserError(f"sweep: {settings} is the same study as an earlier one; list each value once")
        studies.add(study)
        cells.append((settings, cell))
    return cells


def _check_sweep(recipe: Recipe) -> None:
    """Refuse a sweep of what is not a setting of a study, and one of too many studies.

    Raises:
        UserError: naming a setting that cannot be swept, or if there are too many studies.
    """
    # The other tasks are loaded once for all studies of a sweep, so they cannot differ between them.
    possible = [name for name in dotted_names(Study) if name != "evaluation.also_evaluate"]
    # Whole sections too, for settings that only make sense together.
    possible += [name for name, field in Study.model_fields.items() if name not in ("seed", "evaluation")]
    for dotted, values in recipe.sweep.items():
        if dotted not in possible:
            raise UserError(f"sweep: {dotted}: not a setting of a study{did_you_mean(dotted, possible)}")
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
        UserError: naming the setting whose value cannot be used.
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
    return _validate(
        raw,
        "sweep",
        [],
        other_tasks=recipe.other_tasks,
        written_paths={**recipe.written_paths, **paths_in(swept)},
        auto_precisions=_auto_precisions_in(raw),
    )


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
    _refuse_filled_in(alone, "sweep", [])
    set_value(raw, dotted, swept)


def _merged(kept: Mapping[str, Any], swept: Mapping[str, Any]) -> dict[str, Any]:
    """The swept section, with the kept settings that it does not name, also in sections within it."""
    merged = {**kept, **swept}
    for name in kept.keys() & swept.keys():
        if isinstance(kept[name], dict) and isinstance(swept[name], dict):
            merged[name] = _merged(kept[name], swept[name])
    return merged


def _load_other_tasks(study: Study, source: Path | str) -> dict[str, Study]:
    """The other tasks that `evaluation.also_evaluate` names in the recipe from `source`.

    Raises:
        UserError: if one cannot be evaluated together with this study.
    """
    other_tasks: dict[str, Study] = {}
    for name in study.evaluation.also_evaluate:
        try:
            # Without its own other tasks, which might name this recipe in turn, and without its sweep.
            other = load_recipe(name, ["evaluation.also_evaluate=[]", "sweep={}"]).study
        except UserError as error:
            raise UserError(f"evaluation.also_evaluate: {error}") from None
        # A question is for evaluation if its hash is below this fraction.
        if other.data.eval_fraction != study.data.eval_fraction:
            raise UserError(
                f"evaluation.also_evaluate: {name}: its data.eval_fraction is {other.data.eval_fraction}, here it is "
                f"{study.data.eval_fraction}; they must be equal, so that no evaluation question is trained on"
            )
        stem = Path(name).stem
        if stem in other_tasks:
            raise UserError(f"evaluation.also_evaluate: two recipes are called {stem}; results go by that name")
        if isinstance(source, Path) and find_yaml(name, RECIPES, "recipe").resolve() == source.resolve():
            raise UserError(f"evaluation.also_evaluate: {name}: is this recipe itself; leave it out")
        other_tasks[stem] = other
    return other_tasks


def _validate(
    raw: Mapping[str, Any],
    source: Path | str,
    overridden: Sequence[str],
    without_overrides: Mapping[str, Any] | None = None,
    other_tasks: Mapping[str, Study] | None = None,
    written_paths: Mapping[str, str] | None = None,
    auto_precisions: Sequence[str] = (),
) -> Recipe:
    """The recipe in a raw mapping.

    Args:
        source: of the mapping, for errors. overridden: dotted names of the settings that the command line sets instead.
        without_overrides: the mapping without these. other_tasks: the studies that `evaluation.also_evaluate` names.
        written_paths, auto_precisions: of `Recipe`.
    """
    fields = {
        **_recipe_fields(raw),
        "other_tasks": other_tasks or {},
        "written_paths": written_paths or {},
        "auto_precisions": auto_precisions,
    }
    # Before defaults are filled in: the studies of a sweep may have different methods, with different defaults.
    if raw.get("sweep"):
        fields["written"] = copy.deepcopy(fields["study"])
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        of_file = None if without_overrides is None else _recipe_fields(without_overrides)
        raise to_user_error(error, Recipe, source, overridden, without_overrides=of_file) from None


def _recipe_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A file has the sections of the study next to the recipe's own fields; a `Recipe` has them in `study`."""
    study = {name: value for name, value in raw.items() if name not in RECIPE_FIELDS}
    return {"study": study} | {name: value for name, value in raw.items() if name in RECIPE_FIELDS}


def read_sections(path: Path, sections: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        sections: some that are expected, for errors.
    Raises:
        UserError: naming the file.
    """
    raw = read_document(path)
    if not isinstance(raw, dict):
        kinds = {type(None): "nothing", list: "a list"}
        raise UserError(f"{path}: expected sections ({sections}), got {kinds.get(type(raw), 'a single value')}")
    return raw


def _auto_precisions_in(raw: Mapping[str, Any]) -> list[str]:
    """The settings of a raw recipe that the CPU decides, by dotted name."""
    found = []
    for section, field in (("model", "dtype"), ("training", "precision")):
        settings = raw.get(section)
        if isinstance(settings, dict) and settings.get(field) == "auto":
            found.append(f"{section}.{field}")
    return found
