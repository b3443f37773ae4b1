"""Recipes from YAML files and the command line.

`read_sections`, `apply_override` and `to_user_error` also serve other files of sections, such as cluster specs.
Parsing imports no torch, ray or vllm.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

import pos2distill
from pos2distill.config import Recipe, Study
from pos2distill.config.recipe import default_storage
from pos2distill.config.validation import RECIPE_FIELDS, dotted_names, to_user_error
from pos2distill.errors import UserError, did_you_mean

__all__ = [
    "RECIPES",
    "apply_override",
    "find_yaml",
    "load_recipe",
    "project_root",
    "read_sections",
    "recipe_names",
    "sweep_cells",
    "to_user_error",
]


def project_root(package: Path = Path(pos2distill.__file__).parent) -> Path:
    """The folder that holds `pipelines/recipes/` and `examples/toy/`.

    In a checkout it is the folder with `run.py`. In an installed wheel it is the package's own folder.
    """
    installed = (package / "pipelines" / "recipes").is_dir()
    return package if installed else package.parent


RECIPES = project_root() / "pipelines" / "recipes"

# Sections and their fields that hold paths.
_PATHS = (("model", "path"), ("data", "path"), ("runtime", "storage"))


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
    raw = read_sections(path, "model, data, …")
    overridden = [apply_override(raw, override) for override in overrides]
    _refuse_filled_in(raw, path, overridden)
    written_paths = _paths_in(raw)
    # Only built-in recipes name files of the project; a user's paths are relative to the working directory.
    if path.resolve().parent == RECIPES.resolve():
        _resolve_project_paths(raw, overridden)
    # After the overrides, which may contain relative paths as well.
    _resolve_paths(raw)
    recipe = _validate(raw, path, overridden, written_paths=written_paths)
    # In a second pass, because only a valid study says which other tasks it names.
    if recipe.study.evaluation.also_evaluate:
        other_tasks = _load_other_tasks(recipe.study)
        recipe = _validate(raw, path, overridden, other_tasks=other_tasks, written_paths=written_paths)
    return recipe


def _refuse_filled_in(raw: Mapping[str, Any], path: Path, overridden: Sequence[str]) -> None:
    """Refuse a setting that only `Study` fills in. Not in `Study` itself, which is validated with it again."""
    model = raw.get("model")
    if isinstance(model, Mapping) and model.get("rope_scales"):
        source = "command line" if "model.rope_scales" in overridden else path
        raise UserError(f"{source}: model.rope_scales: filled in from inference.scales; set those")


def find_yaml(name_or_path: str, folder: Path, kind: str) -> Path:
    """The YAML file of that name in the project's folder, else the file at that path.

    Args:
        kind: of file, for the error.
    Raises:
        UserError: with the nearest name in the folder, or in that of the path.
    """
    path = folder / f"{name_or_path}.yaml"
    if not path.exists():
        path = Path(name_or_path)
    if path.is_file():
        return path
    # Hidden files, such as those of editors, are not suggested.
    files = [str(found) for found in path.parent.glob("[!.]*.yaml")]
    if path.suffix == ".yaml":
        raise UserError(f"{name_or_path}: no such file{did_you_mean(name_or_path, files)}")
    names = [found.stem for found in folder.glob("[!.]*.yaml")]
    raise UserError(f"{name_or_path}: no such {kind}{did_you_mean(name_or_path, [*names, *files])}")


def sweep_cells(recipe: Recipe) -> list[tuple[dict[str, Any], Recipe]]:
    """The studies of a sweep: for every combination of values, in the order written, its settings and its recipe.

    A cell is built from the study as it was written, so that each cell gets the defaults of its own method.

    Raises:
        UserError: naming the setting, if it or a value of it cannot be used.
    """
    if not recipe.sweep:
        return [({}, recipe)]
    # The other tasks are loaded once for all studies of a sweep, so they cannot differ between them.
    possible = [name for name in dotted_names(Study) if name != "evaluation.also_evaluate"]
    for dotted, values in recipe.sweep.items():
        if dotted not in possible:
            raise UserError(f"sweep: {dotted}: not a setting of a study{did_you_mean(dotted, possible)}")
        if not values:
            raise UserError(f"sweep: {dotted}: expected at least one value")
    cells: list[tuple[dict[str, Any], Recipe]] = []
    for values in itertools.product(*recipe.sweep.values()):
        settings = dict(zip(recipe.sweep, values, strict=True))
        # A recipe made in Python has no written form.
        raw = copy.deepcopy(recipe.written) or recipe.study.model_dump(mode="json")
        raw["name"] = recipe.name
        raw["description"] = recipe.description
        raw["runtime"] = recipe.runtime.model_dump(mode="json")
        for dotted, value in settings.items():
            _set(raw, dotted, value)
        _resolve_paths(raw)
        cell = _validate(raw, "sweep", [], other_tasks=recipe.other_tasks)
        # Equal studies have the same result, which would count several times in an interval over seeds.
        if any(cell.study == other.study for _, other in cells):
            raise UserError(f"sweep: {settings} is the same study as an earlier one; list each value once")
        cells.append((settings, cell))
    return cells


def _load_other_tasks(study: Study) -> dict[str, Study]:
    """The other tasks that `evaluation.also_evaluate` names.

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
        other_tasks[stem] = other
    return other_tasks


def _validate(
    raw: Mapping[str, Any],
    source: Path | str,
    overridden: Sequence[str],
    other_tasks: Mapping[str, Study] | None = None,
    written_paths: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe in a raw mapping.

    Args:
        source: of the mapping, for errors. overridden: dotted names of the settings that the command line sets instead.
        other_tasks: the studies that `evaluation.also_evaluate` names. written_paths: of `Recipe`.
    """
    # A file has the sections of the study next to the recipe's own fields; a `Recipe` has them in `study`.
    fields: dict[str, Any] = {
        "study": {},
        "other_tasks": other_tasks or {},
        "written_paths": written_paths or {},
    }
    for name, value in raw.items():
        if name in RECIPE_FIELDS:
            fields[name] = value
        else:
            fields["study"][name] = value
    # Before defaults are filled in: the studies of a sweep may have different methods, with different defaults.
    if raw.get("sweep"):
        fields["written"] = copy.deepcopy(fields["study"])
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise to_user_error(error, Recipe, source, overridden) from None


def read_sections(path: Path, sections: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        sections: some that are expected, for errors.
    Raises:
        UserError: naming the file.
    """
    try:
        raw = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date, or bytes that are not text
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        kinds = {type(None): "nothing", list: "a list"}
        raise UserError(f"{path}: expected sections ({sections}), got {kinds.get(type(raw), 'a single value')}")
    return raw


def _paths_in(raw: Mapping[str, Any]) -> dict[str, str]:
    """The paths of a raw recipe by dotted name. Values of other types are left out; the validation refuses them."""
    paths = {}
    for section, field in _PATHS:
        settings = raw.get(section)
        path = settings.get(field) if isinstance(settings, dict) else None
        if isinstance(path, str):
            paths[f"{section}.{field}"] = path
    return paths


def _resolve_project_paths(raw: dict[str, Any], overridden: Sequence[str]) -> None:
    """In a raw built-in recipe, make the paths of files that come with the project absolute.

    Others stay: a model may be a hub name, and a data set is in the user's working directory.

    Args:
        overridden: dotted names of the settings that the command line sets; its paths are the user's.
    """
    for dotted, path in _paths_in(raw).items():
        section = dotted.partition(".")[0]
        if section in overridden or dotted in overridden:
            continue
        project_path = project_root() / path
        if project_path.exists():
            _set(raw, dotted, str(project_path))


def _resolve_paths(raw: dict[str, Any]) -> None:
    """Make local paths in a raw recipe absolute, because the processes of a run have different working directories.

    Values of other types stay as they are, for the validation to refuse.
    """
    runtime = raw.setdefault("runtime", {})
    # The default is set before the loop below, so that it becomes absolute like the other paths.
    if isinstance(runtime, dict) and runtime.get("storage") is None:
        runtime["storage"] = default_storage(raw.get("name"))
    for dotted, path in _paths_in(raw).items():
        if "://" in path:
            continue
        if dotted == "model.path" and not Path(path).is_dir():
            continue  # it may be a hub name
        _set(raw, dotted, str(Path(path).absolute()))


def apply_override(raw: dict[str, Any], override: str) -> str:
    """Set one value in a raw mapping of sections. Returns its dotted name."""
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise UserError(f"{override}: expected section.field=value")
    try:
        if dotted.startswith("sweep."):  # the keys of a sweep are dotted names themselves
            raw.setdefault("sweep", {})[dotted.removeprefix("sweep.")] = yaml.safe_load(text)
        else:
            # The value is read as YAML, so that lists, null and quotes mean the same as in a file.
            _set(raw, dotted, yaml.safe_load(text))
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{dotted}: cannot read the value {text!r}") from None
    return dotted


def _set(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, field = dotted.split(".")
    for section in sections:
        inner = raw.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UserError(f"{dotted}: '{section}' is a single value and has no fields")
        raw = inner
    raw[field] = value
