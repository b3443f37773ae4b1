"""The base class of all sections, types that several of them have, and fingerprints."""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from pos2distill.hardware import cpu_is_faster_in_bfloat16

Count = Annotated[int, Field(ge=1)]


def _resolve_precision(name: str) -> str:
    """`auto` is resolved when a recipe is loaded, so that the fingerprint covers the precision that computed."""
    if name == "auto":
        return "bfloat16" if cpu_is_faster_in_bfloat16() else "float32"
    return name


Precision = Annotated[Literal["bfloat16", "float32", "auto"], AfterValidator(_resolve_precision)]
WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}  # bytes of one weight, by precision


class HashableMapping(dict[str, Any]):
    """A mapping of JSON values that a section can have, since sections are hashable. It must not be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


Options = Annotated[dict[str, JsonValue], AfterValidator(HashableMapping)]
"""Names and values that another program understands."""


class Section(BaseModel):
    """A part of a recipe. It is immutable and rejects unknown fields."""

    # Frozen, so that a section is hashable and cannot change after its fingerprint was computed. Infinity and NaN are
    # rejected, because JSON cannot represent them.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_leaves_open(cls, settings: Any) -> Any:
        """`weights: null` in YAML leaves open a setting whose default follows from others."""
        return without_null(settings, [name for name, field in cls.model_fields.items() if field.default_factory])

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_not_booleans(cls, settings: Any) -> Any:
        # pydantic takes true for 1 where a number is expected.
        if not isinstance(settings, dict):
            return settings
        for name, value in settings.items():
            field = cls.model_fields.get(name)
            if field is None or not _mentions(field.annotation, int, float) or _mentions(field.annotation, bool):
                continue
            for each in _leaves(value):
                if isinstance(each, bool):
                    raise ValueError(f"{name}: input should be a number, got {str(each).lower()}")
        return settings

    def replace(self, **values: Any) -> Self:
        """The section with other values. Unlike `model_copy`, it validates them, also against the other settings.

        Raises:
            ValidationError: for a value that is invalid, or contradicts another one.
        """
        return self.model_validate({name: getattr(self, name) for name in type(self).model_fields} | values)


def _leaves(value: Any) -> Iterator[Any]:
    """The single values in lists of lists."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _mentions(annotation: Any, *kinds: type) -> bool:
    """Whether a type is one of these, or has one of them as a part."""
    return annotation in kinds or any(_mentions(part, *kinds) for part in get_args(annotation))


def without_null(settings: Any, names: Collection[str]) -> Any:
    """The mapping without the named settings that are null: `weights: null` in YAML leaves the setting open."""
    if not isinstance(settings, Mapping):
        return settings
    return {name: value for name, value in settings.items() if value is not None or name not in names}


def fingerprint(*parts: Any) -> str:
    """16 hex digits of SHA-256 over the parts as canonical JSON. Equal parts have equal fingerprints on any machine."""
    # Keys are sorted, so that the order in which settings were written does not matter.
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=lambda part: part.model_dump(mode="json"))
    # 64 bits: short enough for folder names, and two studies in one storage practically never collide.
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def matches(pattern: str, expected: str) -> AfterValidator:
    """For `Annotated[str, …]`: a text that matches a pattern as a whole, rejected with what is expected instead."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"expected {expected}, got {value[:60]!r}")
        return value

    return AfterValidator(check)
