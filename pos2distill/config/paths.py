"""Paths in recipes: which settings hold them, and what they are relative to."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pos2distill
from pos2distill.config.overrides import set_value
from pos2distill.config.recipe import default_storage
from pos2distill.errors import UserError

# Sections and their fields that hold paths.
_PATHS = (("model", "path"), ("data", "path"), ("runtime", "storage"))


def project_root(package: Path = Path(pos2distill.__file__).parent) -> Path:
    """The folder that holds `pipelines/recipes/` and `examples/toy/`.

    In a checkout it is the folder with `run.py`. In an installed wheel it is the package's own folder.
    """
    installed = (package / "pipelines" / "recipes").is_dir()
    return package if installed else package.parent


def in_project(path: str) -> str:
    """A path relative to the project if it is of one of its files, so that it is valid in every copy; else itself."""
    root = project_root()
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


def paths_in(raw: Mapping[str, Any]) -> dict[str, str]:
    """The paths of a raw recipe by dotted name. Values of other types are left out; the validation rejects them."""
    paths = {}
    for section, field in _PATHS:
        settings = raw.get(section)
        path = settings.get(field) if isinstance(settings, dict) else None
        if isinstance(path, str):
            paths[f"{section}.{field}"] = path
    return paths


def resolve_project_paths(raw: dict[str, Any], overridden: Sequence[str]) -> None:
    """In a raw built-in recipe, make the paths of files that come with the project absolute.

    Others stay: a model may be a hub name, and a data set is in the user's working directory.

    Args:
        overridden: dotted names of the settings that the command line sets; its paths are the user's.
    """
    for dotted, path in paths_in(raw).items():
        section = dotted.partition(".")[0]
        if section in overridden or dotted in overridden:
            continue
        project_path = project_root() / path
        if project_path.exists():
            set_value(raw, dotted, str(project_path))


def resolve_paths(raw: dict[str, Any]) -> None:
    """Make local paths in a raw recipe absolute, because the processes of a run have different working directories.

    Values of other types stay as they are, for the validation to reject.
    """
    runtime = raw.setdefault("runtime", {})
    # The default is set before the loop below, so that it becomes absolute like the other paths.
    if isinstance(runtime, dict) and runtime.get("storage") is None:
        runtime["storage"] = default_storage(raw.get("name"))
    for dotted, written in paths_in(raw).items():
        _reject_misspelled_path(dotted, written)
        if "://" in written:
            if dotted == "runtime.storage":
                set_value(raw, dotted, _plain_url(dotted, written))
            continue
        # A shell expands no `~` inside `data.path=~/x`.
        path = os.path.expanduser(written)
        is_folder = os.path.isdir(path) or path.startswith("/")
        if dotted == "model.path" and (not is_folder or _uses_chat_api(raw["model"])):
            continue  # it may be a hub name
        absolute = str(Path(path).absolute())
        _reject_unusable_path(dotted, written, absolute)
        set_value(raw, dotted, absolute)


def _reject_unusable_path(dotted: str, written: str, absolute: str) -> None:
    """Reject a local path that fsspec would read as something else, or that no file of a run could hold.

    Raises:
        UserError: naming the setting.
    """
    if "::" in absolute:
        raise UserError(f"{dotted}: {written}: '::' joins file systems in URLs, so no path may have it; rename it")
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise UserError(f"{dotted}: {written!a}: expected a path in UTF-8, also of the working directory") from None


def _plain_url(dotted: str, url: str) -> str:
    """A folder's URL without a slash at its end: in a bucket, `a//b` is another object than `a/b`.

    Raises:
        UserError: for one with two slashes in its middle.
    """
    scheme, _, path = url.rpartition("://")  # the last one, of URLs that are joined by `::`
    plain = path.rstrip("/")
    if "//" in plain:
        raise UserError(f"{dotted}: {url}: expected single slashes in the path of a URL")
    return f"{scheme}://{plain}" if plain else url


def _reject_misspelled_path(dotted: str, written: str) -> None:
    """Reject a path that would become a folder with an odd name, or the working directory.

    Raises:
        UserError: naming the setting.
    """
    if not written.strip():
        raise UserError(f"{dotted}: expected a path or URL, got an empty text")
    scheme, _, rest = written.partition(":")
    if re.fullmatch("[A-Za-z][A-Za-z0-9+.-]+", scheme) and rest.startswith("/"):
        right = f"{scheme.lower()}://{rest.lstrip('/')}"
        if not rest.startswith("//") or scheme != scheme.lower():
            raise UserError(f"{dotted}: {written}: expected a URL such as {right}")
    variable = re.search(r"\$\w+|\$\{", written)
    if variable and not os.path.exists(written):
        raise UserError(f"{dotted}: {written}: variables are not replaced here; write the path itself")


def _uses_chat_api(model: Mapping[str, Any]) -> bool:
    """Whether `model.path` is a name on a server, even if there is a folder of that name."""
    # As `ModelSection.uses_chat_api`, of settings that are not validated yet.
    return model.get("engine") == "openai" and model.get("api", "chat") == "chat"
