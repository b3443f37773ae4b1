"""Recipes from YAML files and the command line, and one plain line for whatever is wrong with them.

`read_sections`, `apply_override` and `to_user_error` serve every file of sections, not recipes only.
Parsing imports no torch, ray or vllm.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

import pos2distill
from pos2distill.config import Recipe, Section, Study
from pos2distill.errors import UserError, did_you_mean


def project_root(package: Path = Path(pos2distill.__file__).parent) -> Path:
    """The folder that holds `pipelines/recipes/` and `examples/toy/`.

    In a checkout it is the folder with `run.py`. In an installed wheel it is the package's own folder.
    """
    installed = (package / "pipelines" / "recipes").is_dir()
    return package if installed else package.parent


RECIPES = project_root() / "pipelines" / "recipes"


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
    if path.resolve().parent == RECIPES.resolve():
        _resolve_project_paths(raw)
    overridden = [apply_override(raw, override) for override in overrides]
    _resolve_paths(raw)
    recipe = _validate(raw, path, overridden)
    if recipe.study.evaluation.also_evaluate:
        recipe = _validate(raw, path, overridden, transfers=_load_transfers(recipe.study))
    return recipe


def find_yaml(name_or_path: str, folder: Path, kind: str) -> Path:
    """The YAML file of that name in the project's folder, else the file at that path.

    Args:
        kind: what is looked for, for the error.
    Raises:
        UserError: with the nearest name in the folder or beside the path.
    """
    path = folder / f"{name_or_path}.yaml"
    if not path.exists():
        path = Path(name_or_path)
    if not path.is_file():
        beside = [str(found) for found in path.parent.glob("[!.]*.yaml")]
        if path.suffix == ".yaml":
            raise UserError(f"{name_or_path}: no such file{did_you_mean(name_or_path, beside)}")
        known = [*(found.stem for found in folder.glob("[!.]*.yaml")), *beside]
        raise UserError(f"{name_or_path}: no such {kind}{did_you_mean(name_or_path, known)}")
    return path


def sweep_cells(recipe: Recipe) -> list[tuple[dict[str, Any], Recipe]]:
    """The studies of a sweep: for every combination of values, in the order written, its settings and its recipe.

    A cell is built from the study as it was written, so that what one method's name leaves open is resolved anew.

    Raises:
        UserError: naming the setting, if it or a value of it cannot be used.
    """
    if not recipe.sweep:
        return [({}, recipe)]
    possible = [name for name in _dotted_names(Study) if name != "evaluation.also_evaluate"]
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
        cell = _validate(raw, "sweep", [], transfers=recipe.transfers)
        if any(cell.study == other.study for _, other in cells):
            raise UserError(f"sweep: {settings} is the same study as an earlier one; list each value once")
        cells.append((settings, cell))
    return cells


def _load_transfers(study: Study) -> dict[str, Study]:
    """The other tasks that `evaluation.also_evaluate` names.

    Raises:
        UserError: if one cannot be asked beside this study.
    """
    transfers: dict[str, Study] = {}
    for name in study.evaluation.also_evaluate:
        try:
            other = load_recipe(name, ["evaluation.also_evaluate=[]", "sweep={}"]).study
        except UserError as error:
            raise UserError(f"evaluation.also_evaluate: {error}") from None
        # The side of the split is a hash of the question against this share.
        if other.data.eval_fraction != study.data.eval_fraction:
            raise UserError(
                f"evaluation.also_evaluate: {name}: its data.eval_fraction is {other.data.eval_fraction}, here it is "
                f"{study.data.eval_fraction}; they must be equal, so that no question is trained on there or here"
            )
        if (stem := Path(name).stem) in transfers:
            raise UserError(f"evaluation.also_evaluate: two recipes are called {stem}; results go by that name")
        transfers[stem] = other
    return transfers


def _validate(
    raw: Mapping[str, Any],
    source: Path | str,
    overridden: Sequence[str],
    transfers: Mapping[str, Study] | None = None,
) -> Recipe:
    """The recipe in a raw mapping.

    Args:
        source: of the mapping, for errors. overridden: settings that came from the command line instead.
        transfers: the studies that `evaluation.also_evaluate` names.
    """
    # A file has the sections of the study next to the recipe's own fields; a `Recipe` has them in `study`.
    fields: dict[str, Any] = {"study": {}, "transfers": transfers or {}}
    for name, value in raw.items():
        if name in ("name", "description", "runtime", "sweep"):
            fields[name] = value
        else:
            fields["study"][name] = value
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, bytes that are no text
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        came = "nothing" if raw is None else "a list" if isinstance(raw, list) else "a single value"
        raise UserError(f"{path}: expected sections ({sections}), got {came}")
    return raw


def to_user_error(
    error: ValidationError, root: type[Section], source: Path | str, overridden: Sequence[str]
) -> UserError:
    """The one line for a mapping that is no `root`: where it comes from, field, what was expected, what came.

    Args:
        source: of the mapping. overridden: settings that came from the command line instead.
    """
    problem = _first_problem(error, root)
    field = problem.partition(":")[0]
    given = any(f"{dotted}.".startswith(f"{field}.") or field.startswith(f"{dotted}.") for dotted in overridden)
    return UserError(f"{'command line' if given else source}: {problem}")


def _resolve_project_paths(raw: Mapping[str, Any]) -> None:
    """In a raw built-in recipe, make the paths of files that come with the project absolute.

    Others stay: a model may be a hub name, and a data set is in the user's working directory.
    """
    for section, field in (("model", "path"), ("data", "path")):
        path = project_root() / raw[section][field]
        if path.exists():
            raw[section][field] = str(path)


def _resolve_paths(raw: dict[str, Any]) -> None:
    """Make local paths in a raw recipe absolute, from the working directory, which the processes of a run do not share.

    Values of other types stay as they are, for the validation to refuse.
    """
    runtime = raw.setdefault("runtime", {})
    if isinstance(runtime, dict) and runtime.get("storage") is None:
        runtime["storage"] = f"runs/{raw.get('name')}"
    for section, field in (("model", "path"), ("data", "path"), ("runtime", "storage")):
        settings = raw.get(section)
        path = settings.get(field) if isinstance(settings, dict) else None
        if not isinstance(path, str) or "://" in path:
            continue
        if section == "model" and not Path(path).is_dir():
            continue  # it may be a hub name
        raw[section][field] = str(Path(path).absolute())


def apply_override(raw: dict[str, Any], override: str) -> str:
    """Set one value in a raw mapping of sections. Returns its dotted name."""
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise UserError(f"{override}: expected section.field=value")
    try:
        if dotted.startswith("sweep."):  # the keys of a sweep are dotted names themselves
            raw.setdefault("sweep", {})[dotted.removeprefix("sweep.")] = yaml.safe_load(text)
        else:
            _set(raw, dotted, yaml.safe_load(text))
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{dotted}: cannot read the value {text!r}") from None
    return dotted


def _set(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, field = dotted.split(".")
    for section in sections:
        if not isinstance(inner := raw.setdefault(section, {}), dict):
            raise UserError(f"{dotted}: '{section}' is a single value and has no fields")
        raw = inner
    raw[field] = value


def _first_problem(error: ValidationError, root: type[Section]) -> str:
    """One line for the first thing that is wrong: field, what was expected, what came, the nearest right name."""
    # A misspelt field is often why another one is missing, so it is told first.
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path, section = _field_at(first["loc"], root)
    where = ".".join(path)
    if first["type"] == "extra_forbidden":
        unknown = str(first["loc"][-1])
        # Right by name, but of another section: that is said in full.
        elsewhere = [dotted for dotted in _dotted_names(root) if dotted.rsplit(".", 1)[-1] == unknown]
        hint = f"; did you mean '{elsewhere[0]}'?" if elsewhere else did_you_mean(unknown, _field_names(section))
        return f"{'.'.join([*path, unknown])}: unknown field{hint}"
    if first["type"] == "missing":
        return f"{where}: missing"
    if first["type"] == "value_error":
        # A section names its field itself; a field stands alone.
        joint = ": " if first["loc"] and first["loc"][-1] in section.model_fields else "."
        return f"{where + joint if where else ''}{first['ctx']['error']}"
    # A field of several types has one problem for each of them.
    kind = section.model_fields[path[-1]].annotation if path and path[-1] in section.model_fields else None
    same = [_in_plain_words(problem, kind) for problem in error.errors() if _field_at(problem["loc"], root)[0] == path]
    expected = " or ".join(dict.fromkeys(same))
    came = "" if isinstance(first["input"], Mapping) else f", got {_shown(first['input'])}"
    return f"{where}: {expected}{came}"


def _in_plain_words(problem: Any, kind: Any) -> str:
    """What was expected, without the names of Python's types. `kind`: the field's type."""
    if problem["type"] == "tuple_type":
        return f"input should be a list, for example {_example_list(kind, problem['input'])}"
    if problem["type"] == "model_type":
        return "expected a section with fields"
    return str(problem["msg"][0].lower() + problem["msg"][1:])


def _example_list(kind: Any, came: Any) -> str:
    """A list in place of what came alone: of just that, if the field would take it."""
    try:
        TypeAdapter(kind).validate_python([came])
    except ValidationError:
        return "[0, 9]"
    return f"[{came}]"


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def _dotted_names(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every field of a recipe as it is written there."""
    names = []
    for name, field in section.model_fields.items():
        if field.exclude:
            continue
        dotted = prefix if name == "study" else f"{prefix}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += _dotted_names(kind, "" if name == "study" else f"{dotted}.")
        else:
            names.append(dotted)
    return names


def _field_at(location: tuple[int | str, ...], root: type[Section]) -> tuple[list[str], type[BaseModel]]:
    """The dotted path, as it is written in the file, of the innermost field that a problem lies in; and its section.

    What follows in pydantic's location (the types of a union, places in a list of plain values) is dropped.
    """
    path: list[str] = []
    section: type[BaseModel] = root
    listed = False
    for part in location:
        if listed and isinstance(part, int):
            path[-1] += f"[{part}]"
            listed = False
            continue
        if part not in section.model_fields:
            break
        path.append(str(part))
        inner = _section_in(section.model_fields[str(part)].annotation)
        if inner is None:
            break
        section, listed = inner
    return path[1:] if path[:1] == ["study"] else path, section


def _section_in(kind: Any) -> tuple[type[BaseModel], bool] | None:
    """The section that a field holds, and whether it holds a list of them; None for plain values."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind, False
    inner = [part for part in get_args(kind) if part not in (Ellipsis, type(None))]
    found = _section_in(inner[0]) if len(inner) == 1 else None
    return found and (found[0], found[1] or get_origin(kind) is tuple)


def _field_names(section: type[BaseModel]) -> list[str]:
    names = [name for name, field in section.model_fields.items() if not field.exclude]
    # At the top of the file the study's sections stand beside `runtime`.
    return names if section is not Study else [*names, "name", "description", "runtime", "sweep"]
