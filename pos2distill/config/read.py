"""Recipes, and other YAML files of sections such as cluster specs, before they are validated.

Parsing imports no torch, ray or vllm.
"""

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pos2distill.config.overrides import apply_override, is_within
from pos2distill.config.paths import paths_in, project_root, resolve_paths, resolve_project_paths
from pos2distill.config.yaml_reader import read_document
from pos2distill.errors import UserError, did_you_mean
from pos2distill.secrets import holds_secret, looks_secret, mask_secrets

RECIPES = project_root() / "pipelines" / "recipes"


@dataclass(frozen=True, slots=True)
class RawRecipe:
    """The sections of a recipe before they are validated.

    Attributes:
        raw: the sections with the overrides and with absolute paths.
        source: where the sections are from, for errors.
        overridden: dotted names of the settings that the command line sets.
        without_overrides: the sections as the source has them.
        written_paths, auto_precisions: see `Recipe`.
    """

    raw: Mapping[str, Any]
    source: Path | str
    overridden: Sequence[str]
    without_overrides: Mapping[str, Any]
    written_paths: Mapping[str, str]
    auto_precisions: Sequence[str]


def read_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> RawRecipe:
    """The sections of a recipe's file, with `section.field=value` overrides.

    Args:
        name_or_path: a name under `pipelines/recipes/`, or the path of a YAML file.
    Raises:
        UserError: naming the file or the setting.
    """
    path = find_yaml(name_or_path, RECIPES, "recipe")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path}: expected a recipe, a file named *.yaml; data goes to data.path")
    return to_raw_recipe(read_sections(path, "model, data, …"), overrides, source=path)


def to_raw_recipe(sections: Mapping[str, Any], overrides: Sequence[str], *, source: Path | str) -> RawRecipe:
    """The sections of a recipe, as in a file, with `section.field=value` overrides and with absolute paths.

    Raises:
        UserError: naming the setting.
    """
    raw: dict[str, Any] = copy.deepcopy(dict(sections))
    overridden = [apply_override(raw, override) for override in overrides]
    reject_secrets(raw, source, overridden, "set it in the environment, or use the storage's own credentials")
    reject_filled_in(raw, source, overridden)
    written_paths, auto_precisions = paths_in(raw), auto_precisions_in(raw)
    # Only built-in recipes name files of the project; a user's paths are relative to the working directory.
    if isinstance(source, Path) and is_built_in(source):
        resolve_project_paths(raw, overridden)
    # After the overrides, which may contain relative paths as well.
    resolve_paths(raw)
    return RawRecipe(raw, source, overridden, sections, written_paths, auto_precisions)


def is_built_in(recipe: Path) -> bool:
    """Whether a recipe's file is one of the project's, which jobs have."""
    return recipe.resolve().parent == RECIPES.resolve()


def recipe_names() -> list[str]:
    """Names of the recipes that come with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_yaml(name_or_path: str, folder: Path, kind: str) -> Path:
    """The YAML file of that name in the project's folder, else the file at that path.

    Args:
        kind: kind of file, for the error.
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
        results = "; `inspect`, `compare` and `runs` take folders of results" if kind == "recipe" else ""
        raise UserError(f"{name_or_path}: is a folder, expected a {kind}, a file named *.yaml{results}")
    if os.path.islink(path):
        raise UserError(f"{name_or_path}: is a broken symbolic link to {os.readlink(path)}")
    if "=" in name_or_path:
        raise UserError(f"{name_or_path}: expected a {kind} first, then settings")
    # Hidden files, such as those of editors, are not suggested.
    files = []
    if os.path.isdir(path.parent):
        files = [str(found) for found in path.parent.glob("[!.]*.yaml")]
    names = [found.stem for found in folder.glob("[!.]*.yaml")]
    if path.suffix == ".yaml":
        files += [path.stem] if path.stem in names else []
        raise UserError(f"{name_or_path:.300}: no such file{did_you_mean(name_or_path, files)}")
    raise UserError(f"{name_or_path:.300}: no such {kind}{did_you_mean(name_or_path, [*names, *files])}")


def read_sections(path: Path, sections: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        sections: some of the expected sections, for errors.
    Raises:
        UserError: naming the file.
    """
    raw = read_document(path)
    if not isinstance(raw, dict):
        kinds = {type(None): "nothing", list: "a list"}
        raise UserError(f"{path}: expected sections ({sections}), got {kinds.get(type(raw), 'a single value')}")
    return raw


# Settings with names of another program, and with an index those of a sweep.
_OTHERS_NAMES = re.compile(r"\bmodel\.(extra_body|chat_template_kwargs|engine_args)[.\[]")


def reject_secrets(raw: Any, source: Path | str, overridden: Sequence[str], remedy: str, *, prefix: str = "") -> None:
    """Reject settings that contain a secret, such as a URL with a password, before any message repeats them.

    Settings end in reports, model cards, trackers and manifests.

    Args:
        raw: sections as they were written.
        overridden: dotted names of the settings that the command line sets instead of `source`.
        remedy: where secrets belong, for the message.
        prefix: what stood before the names in `overridden` as they were typed, for the message.
    """
    for dotted, text, is_key in _strings_in(raw, ""):
        # The names of settings say that they hold none, but a server's fields may be named like secrets.
        is_sent = not is_key and _OTHERS_NAMES.search(dotted)
        if looks_secret(text) or (is_sent and holds_secret(dotted.rpartition(".")[2], text)):
            is_override = any(is_within(dotted, name) for name in overridden)
            where = f"command line: {prefix}" if is_override else f"{source}: "
            raise UserError(f"{where}{mask_secrets(dotted)}: contains what looks like a secret; {remedy}")


def _strings_in(value: Any, dotted: str) -> Iterator[tuple[str, str, bool]]:
    """All strings in raw sections, values and keys: each with its dotted name, and whether it is a key."""
    if isinstance(value, dict):
        for key, inner in value.items():
            name = f"{dotted}.{key}" if dotted else str(key)
            yield name, str(key), True
            yield from _strings_in(inner, name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _strings_in(inner, f"{dotted}[{index}]")
    elif isinstance(value, str):
        yield dotted, value, False


def reject_filled_in(raw: Mapping[str, Any], file: Path | str, overridden: Sequence[str]) -> None:
    """Reject a setting that only `Study` fills in. Not in `Study` itself, which is validated with it again."""
    model = raw.get("model")
    if isinstance(model, Mapping) and model.get("rope_scales"):
        source = "command line" if "model.rope_scales" in overridden else file
        raise UserError(f"{source}: model.rope_scales: filled in from inference.scales; set those")


def auto_precisions_in(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings of a raw recipe that the CPU decides, by dotted name."""
    found = []
    for section, field in (("model", "dtype"), ("training", "precision")):
        settings = raw.get(section)
        if isinstance(settings, dict) and settings.get(field) == "auto":
            found.append(f"{section}.{field}")
    return tuple(found)
