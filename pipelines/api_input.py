"""What a script passes to the functions of `api`, as the command line has it: settings as text, records as a file."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe, make_recipe
from pos2distill.errors import UserError, reworded
from pos2distill.tasks.parquet_records import drop_null_fields

# JSON may hold them as they are, but YAML rejects them or takes them for line breaks. All have four hex digits.
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")

AnyRecipe = str | Path | Recipe | Mapping[str, Any]
Settings = Mapping[str, Any]
Questions = str | Path | Iterable[Mapping[str, Any]]


def to_recipe(recipe: AnyRecipe, settings: Settings | None, data: str | None = None) -> Recipe:
    """The recipe with its settings.

    Args:
        data: `data.path`, if it is given beside the recipe.
    Raises:
        UserError: naming the setting at fault.
    """
    if isinstance(recipe, Recipe) and data is not None:
        raise UserError("data: a Recipe has its data already; give its name, file or mapping instead")
    overrides = to_overrides(settings)
    if data is not None:
        if _set_data_path(settings or {}):
            raise UserError("data: data.path is set too; give one of them")
        overrides.append(f"data.path={_to_json(data, 'data')}")
    if isinstance(recipe, Recipe):
        if overrides:
            raise UserError("settings: a Recipe has its settings already; give its name, file or mapping instead")
        return recipe
    with errors_name_arguments(settings):
        if isinstance(recipe, Mapping):
            raw = {name: to_plain_value(section, f"recipe: {name}") for name, section in recipe.items()}
            return make_recipe(raw, overrides)
        return load_recipe(to_text(recipe, "recipe"), overrides)


def _set_data_path(settings: Settings) -> bool:
    """Whether settings set `data.path`, by its name or within the section `data`."""
    section = settings.get("data")
    return "data.path" in settings or (isinstance(section, Mapping) and "path" in section)


def errors_name_arguments(settings: Settings | None) -> AbstractContextManager[None]:
    """Errors of overrides name what a script has passed, since it has no command line."""
    given = "settings" if settings else "arguments"
    return reworded(lambda message: re.sub("^command line: ", f"{given}: ", message))


def to_overrides(settings: Settings | None) -> list[str]:
    """Settings by dotted name as `section.field=value`.

    Raises:
        UserError: naming the setting whose value is not a number, text, list or mapping.
    """
    if settings is None:
        return []
    if not isinstance(settings, Mapping):
        raise UserError(f"settings: expected a mapping of dotted names to values, got {type(settings).__name__}")
    # JSON is YAML, in which overrides are written.
    return [f"{name}={_to_json(value, f'settings: {name}')}" for name, value in settings.items()]


def to_text(value: Any, name: str) -> str:
    """A path or name as text.

    Raises:
        UserError: for anything else, naming the argument.
    """
    if not isinstance(value, str | Path):
        raise UserError(f"{name}: expected a path or name, got {type(value).__name__}")
    return os.fspath(value)


def to_plain_value(value: Any, name: str) -> Any:
    """A value as a YAML file would hold it: numbers of NumPy and paths become Python numbers and text.

    Raises:
        UserError: for a value that no file can hold.
    """
    return json.loads(_to_json(value, name))


@contextmanager
def questions_file(data: Questions) -> Iterator[str]:
    """The path of a data file: the one given, or a temporary one with the given records, removed at the end.

    A later call with the same records resumes, because results depend on the bytes of the file and not on its folder.
    Its name is made of these bytes, since the default storage is called after it. Errors within the context name the
    record instead of this file.

    Raises:
        UserError: for what is neither a file nor records, naming the record at fault.
    """
    if isinstance(data, str | Path):
        yield os.fspath(data)
        return
    if isinstance(data, Mapping):
        raise UserError("data: expected a file or records, got one mapping; of columns, make a list of records")
    if not isinstance(data, Iterable):
        raise UserError(f"data: expected a file or records, got {type(data).__name__}")
    # A folder for each call: of two calls with the same records, one may end while the other reads its file.
    with tempfile.TemporaryDirectory(prefix="pos2distill-data-") as folder:
        partial = Path(folder) / "questions.jsonl"
        digest = hashlib.sha256()
        with partial.open("wb") as file:
            for number, record in enumerate(data, start=1):
                line = _to_line(record, number)
                digest.update(line)
                file.write(line)
        path = partial.with_name(f"questions-{digest.hexdigest()[:16]}.jsonl")
        partial.rename(path)
        with reworded(lambda message: _name_records(message, path)):
            yield str(path)


def _name_records(message: str, path: Path) -> str:
    """An error about the temporary file in terms of the records, of which each is a line."""
    named = f"(?:{re.escape(str(path))}|{re.escape(path.name)})"
    return re.sub(rf"{named}, line (?=\d)", "data: record ", message).replace(str(path), "data")


def _to_line(record: Any, number: int) -> bytes:
    if not isinstance(record, Mapping):
        raise UserError(f"data: record {number}: expected a mapping, got {type(record).__name__}")
    # As in Parquet: a `datasets.Dataset` has every field in every row, null where it is missing.
    fields = drop_null_fields(to_plain_value(record, f"data: record {number}"))
    try:
        return f"{json.dumps(fields, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        raise UserError(f"data: record {number}: contains an unpaired surrogate, which is not a character") from None


def _to_json(value: Any, name: str) -> str:
    try:
        text = json.dumps(value, default=_to_plain, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: a list that contains itself
        raise UserError(f"{name}: cannot be written as JSON ({error})") from None
    # Characters beyond these four digits stay, since JSON escapes them as surrogates, which YAML does not combine.
    return _NOT_IN_YAML.sub(lambda character: f"\\u{ord(character[0]):04x}", text)


def _to_plain(value: Any) -> Any:
    """What `json` asks for a value of a type that it does not know."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"expected numbers, text, lists and mappings, got {type(value).__name__}")
