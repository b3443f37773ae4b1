"""One plain line for a pydantic ValidationError: the field as the user writes it, what was expected, what was given."""

import difflib
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from pos2distill.config.base import Section
from pos2distill.config.overrides import is_within
from pos2distill.config.study import Study
from pos2distill.errors import UserError, did_you_mean, did_you_mean_one

# A recipe file has the sections of its `study` at the top level, next to the recipe's own fields.
_FLATTENED = "study"
RECIPE_FIELDS = ("name", "description", "runtime", "sweep")


# Names that other tools have for these settings.
_OTHER_NAMES = {
    "lr": "training.learning_rate",
    "num_train_epochs": "training.epochs",
    "training.batch_size": "training.global_batch_rows",
    "per_device_train_batch_size": "training.global_batch_rows",
    "bf16": "training.precision",
    "model_name_or_path": "model.path",
    "model.name": "model.path",
    "data.name": "data.path",
    "max_model_len": "model.max_length",
    "num_docs": "data.documents",
    "positions": "evaluation.slots",
    "sampling.n": "sampling.candidates",
    "output_dir": "runtime.storage",
}
_SIMILAR = 0.75  # a name that is so similar to another one, 0 to 1, is probably a typing error
_INPUT = "input should be "  # how messages of pydantic begin
_WORD = re.compile("'([^']+)'")
_REPR = reprlib.Repr()
_REPR.maxlevel = 2
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 80


@dataclass(frozen=True, slots=True)
class _Field:
    """The innermost field that a problem is in.

    Attributes:
        path: its names in the file.
        section: the one that it belongs to.
    """

    path: list[str]
    section: type[BaseModel]

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def annotation(self) -> Any:
        """The field's type; None for a whole section."""
        return self._info.annotation if self._info else None

    @property
    def constrained(self) -> Any:
        """The field's type with its limits, such as `ge`; None for a whole section."""
        if self._info is None or not self._info.metadata:
            return self.annotation
        return Annotated[self._info.annotation, *self._info.metadata]

    @property
    def _info(self) -> FieldInfo | None:
        """What pydantic knows of the field; None for a whole section."""
        return self.section.model_fields.get(self.path[-1]) if self.path else None


def to_user_error(
    error: ValidationError,
    root: type[Section],
    source: Path | str,
    overridden: Sequence[str],
    *,
    without_overrides: Mapping[str, Any] | None = None,
    prefix: str = "",
) -> UserError:
    """The first problem of a mapping that is not a valid `root`, in one line that begins with where it is from.

    Args:
        source: where the mapping is from.
        overridden: dotted names of the settings that the command line sets instead.
        without_overrides: the mapping without these, if settings may contradict each other; then the command line is
            at fault where it has added the problem.
        prefix: what stood before these names as they were typed.
    """
    problem = _describe(error, root)
    # The message begins with the field's dotted name.
    field = problem.partition(":")[0]
    sets_field = any(is_within(field, dotted) or is_within(dotted, field) for dotted in overridden)
    contradicts = without_overrides is not None and error.errors()[0]["type"] == "value_error" and bool(overridden)
    if sets_field or (contradicts and not _has_problem_in(field, without_overrides, root)):
        return UserError(f"command line: {prefix}{_describe(error, root, prefix)}")
    return UserError(f"{source}: {problem}")


def _has_problem_in(field: str, raw: Any, root: type[Section]) -> bool:
    """Whether the first problem of a mapping is in this field; its values may differ."""
    try:
        root.model_validate(raw)
    except ValidationError as error:
        return _describe(error, root).partition(":")[0] == field
    return False


def dotted_names(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every setting of a section and of those in it, as it is written in a file."""
    names = []
    # Excluded fields are filled in while a recipe is loaded; a file never contains them.
    for name, field in section.model_fields.items():
        if field.exclude:
            continue
        kind = field.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            names.append(f"{prefix}{name}")
        elif name == _FLATTENED:
            names += dotted_names(kind, prefix)
        else:
            names += dotted_names(kind, f"{prefix}{name}.")
    return names


def _describe(error: ValidationError, root: type[Section], prefix: str = "") -> str:
    """The field, what was expected, what was given, and the nearest valid name.

    Args:
        prefix: what stands before the whole name of a suggested setting.
    """
    problems = error.errors()
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    if unknown:  # first, since a misspelled field is often the reason why another one is missing
        return _describe_unknown(unknown[0]["loc"], root, prefix)
    first = problems[0]
    field = _find_field(first["loc"], root)
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        # An item of a list of fixed length: the list is there, but too short.
        return f"{field.dotted}: too few values, {_REPR.repr(first['input'])}"
    if first["type"] == "missing":
        return f"{field.dotted}: missing"
    if first["type"] == "value_error":
        return _describe_value_error(first, field)
    # pydantic reports one problem for each type that the field can have.
    expected = []
    for problem in problems:
        # A list is too short because of an item that is wrong.
        if problem["type"] == "too_short" and first["type"] != "too_short":
            continue
        phrase = _describe_type(problem, field)
        # The other problems are left out: one line names one field.
        if _find_field(problem["loc"], root).path == field.path and phrase not in expected:
            expected.append(phrase)
    # "Input should be" once for all types.
    first_type, *other_types = expected
    wanted = " or ".join([first_type, *(each.removeprefix(_INPUT) for each in other_types)])
    given = first["input"]
    # A mapping is a whole section, too long for one line.
    if isinstance(given, Mapping):
        return f"{field.dotted}: {wanted}"
    # `reprlib`: YAML's aliases can make a few lines a value with billions of parts.
    shown = "nothing" if given is None else _REPR.repr(given)
    return (
        f"{field.dotted}: {wanted}, got {shown}{_nearest_choice(problems, given)}{_hint_for_list(field, given, root)}"
    )


def _hint_for_list(field: _Field, given: Any, root: type[Section]) -> str:
    """For a list in place of one value: how several values are tried, if they can be."""
    is_list_of_values = isinstance(given, list) and not any(isinstance(each, list | dict) for each in given)
    if not is_list_of_values or len(given) < 2:
        return ""
    if field.dotted == "data.path":
        # A web server lists no files.
        is_web = any(str(each).startswith(("http://", "https://")) for each in given)
        return "" if is_web else "; for several files, use a pattern with *"
    can_be_swept = "sweep" in root.model_fields and field.dotted in dotted_names(Study)
    if can_be_swept and all(_is_valid(each, field.constrained) for each in given):
        return f"; to try several with `study`, set sweep.{field.dotted}"
    return ""


def _is_valid(value: Any, annotation: Any) -> bool:
    """Whether a value has this type."""
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def _nearest_choice(problems: Sequence[Any], given: Any) -> str:
    """A hint with the most similar of the words that a field may have, whatever its capitals."""
    choices = [
        word for each in problems if each["type"] == "literal_error" for word in _WORD.findall(each["ctx"]["expected"])
    ]
    if not isinstance(given, str):
        return ""
    by_lower_case = {choice.lower(): choice for choice in choices}
    return did_you_mean_one(by_lower_case.get(given.lower(), given.lower()), choices)


def other_name(dotted: str, root: type[BaseModel]) -> str | None:
    """The setting whose name in other programs this is, with or without its section; None if there is none."""
    name = _OTHER_NAMES.get(dotted, _OTHER_NAMES.get(dotted.rpartition(".")[2]))
    return name if name in dotted_names(root) else None


def _describe_unknown(location: tuple[int | str, ...], root: type[Section], prefix: str) -> str:
    field = _find_field(location, root)
    unknown = str(location[-1])
    name = ".".join([*field.path, unknown])
    usual = other_name(name, root)
    if usual:
        return f"{name}: unknown field; did you mean '{prefix}{usual}'?"
    own = _field_names(field.section)
    # The name may be that of a setting in another section, with or without a typing error.
    settings: dict[str, list[str]] = {}
    for dotted in dotted_names(root):
        # A recipe's own name and description are not what somebody looks for in a section.
        if not field.path or dotted not in ("name", "description"):
            settings.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    near = difflib.get_close_matches(unknown, sorted(settings), n=1, cutoff=_SIMILAR)
    is_near_own = bool(difflib.get_close_matches(unknown, own, n=1, cutoff=_SIMILAR))
    # An item of a list has names of its own.
    in_list = any(isinstance(part, int) for part in location)
    if in_list or not near or (is_near_own and unknown not in settings):
        return f"{name}: unknown field{did_you_mean(unknown, own)}"
    elsewhere = settings[near[0]]
    # A setting of the whole recipe, such as the seed, before one of another section.
    choices = near if near[0] in elsewhere else elsewhere
    return f"{name}: unknown field{did_you_mean_one(name, choices, likeness=0.0, prefix=prefix)}"


def _example_field(section: type[BaseModel], given: Any) -> str:
    """For a word in place of a section, such as `method: sft`: the field of the section that can have this value."""
    if not isinstance(given, str):
        return ""
    for name, field in section.model_fields.items():
        if given in get_args(field.annotation):
            return f", such as {name}: {given}"
    return ""


def _describe_value_error(problem: Any, field: _Field) -> str:
    """The message of a validator of ours: one of a section begins with the field's name, one of a field does not."""
    message = str(problem["ctx"]["error"])
    if not field.path:
        return message
    # An item of a list of plain values is not part of the path.
    last = next(part for part in reversed(problem["loc"]) if isinstance(part, str))
    of_field = last == field.path[-1] and last in field.section.model_fields
    return f"{field.dotted}: {message}" if of_field else f"{field.dotted}.{message}"


def _describe_type(problem: Any, field: _Field) -> str:
    """What was expected, without the names of Python's types."""
    if problem["type"] == "tuple_type":
        return f"input should be a list, for example {_example_list(field.annotation, problem['input'])}"
    if problem["type"] == "model_type":
        return f"expected a section with fields{_example_field(field.section, problem['input'])}"
    if problem["type"] == "dict_type":
        return "input should be a mapping"
    if problem["type"] in ("bool_parsing", "bool_type"):
        return "input should be true or false"
    if problem["type"] == "too_short":
        return f"expected at least {problem['ctx']['min_length']} in the list"
    message = re.split(", unable to parse|, got a number", str(problem["msg"]))[0]
    return message[0].lower() + message[1:]


def _example_list(annotation: Any, given: Any) -> str:
    """The given value as a list, if that is valid: `1` as [1], `0,9` as [0, 9]."""
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else [given]
    return f"[{', '.join(map(str, parts))}]" if _is_valid(parts, annotation) else "[0, 9]"


def _find_field(location: tuple[int | str, ...], root: type[Section]) -> _Field:
    """The field at pydantic's location of a problem.

    The location continues with the types of a union and with indices in lists of plain values, which are left out.
    """
    path: list[str] = []
    section: type[BaseModel] = root
    in_list = in_mapping = False
    for part in location:
        if in_list and isinstance(part, int):
            path[-1] += f"[{part}]"
            in_list = False
            continue
        if in_mapping:
            path.append(str(part))
            in_mapping = False
            continue
        if part not in section.model_fields:
            break
        path.append(str(part))
        annotation = section.model_fields[str(part)].annotation
        inner = _section_in(annotation)
        if inner is None:
            break
        section, in_list, in_mapping = inner, _holds_list(annotation), get_origin(annotation) is dict
    if path[:1] == [_FLATTENED]:
        path = path[1:]
    return _Field(path, section)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds: itself, optionally, in a list, or by name. None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [part for part in get_args(annotation) if part not in (Ellipsis, type(None))]
    if get_origin(annotation) is dict:
        inner = inner[1:]
    # An optional section and a list of sections have one part left; unions of plain values have more.
    return _section_in(inner[0]) if len(inner) == 1 else None


def _holds_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(get_origin(part) is tuple for part in get_args(annotation))


def _field_names(section: type[BaseModel]) -> list[str]:
    names = [name for name, field in section.model_fields.items() if not field.exclude]
    return [*names, *RECIPE_FIELDS] if section is Study else names
