"""A study reduced to some of its settings, so that code can use only those it names."""

from collections.abc import Collection
from typing import Any, Self, get_args

from pydantic.fields import FieldInfo

from pos2distill.config.base import Section
from pos2distill.config.study import Study


class RestrictedStudy(Study):
    """A study of which only some settings are kept, made by `restrict`.

    Only this kind of study is built without validation: the constants that stand for the other settings may contradict
    the settings that are kept.
    """

    def replace(self, **values: Any) -> Self:
        """As `Section.replace`, without validation: the study would be rejected although nothing is wrong."""
        return self.model_copy(update=values)


def restrict(study: Study, fields: Collection[str]) -> RestrictedStudy:
    """A copy of a resolved study in which every setting that is not named has a constant instead of its value.

    The constant is the setting's default, or a placeholder if the setting is required. So two restricted studies are
    equal, and have equal fingerprints, if and only if the named settings are equal. Each setting that
    is kept was validated as a part of `study`.

    Args:
        fields: dotted names, for example `seed`, `data.prompt`, `training.lora`, or a whole section as `data`.
    Raises:
        KeyError: for a name that is not a setting.
    """
    for name in fields:
        _check_name(name)
    values: dict[str, Any] = {}
    for name, field in Study.model_fields.items():
        value = getattr(study, name)
        if name in fields:
            values[name] = value
        elif isinstance(value, Section) and field.default is not None:
            kept = {dotted.partition(".")[2] for dotted in fields if dotted.startswith(f"{name}.")}
            values[name] = _restrict_section(value, kept)
        else:
            # A single value, or a section that may be left out, which is kept whole or not at all.
            values[name] = _constant(field)
    return RestrictedStudy.model_construct(**values)


def _restrict_section(section: Section, kept: Collection[str]) -> Section:
    values: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        values[name] = getattr(section, name) if name in kept else _constant(field)
    return type(section).model_construct(**values)


def _constant(field: FieldInfo) -> Any:
    """The default of a setting, the same for every study; for a required one a valid value."""
    if not field.is_required():
        # A default that follows from other settings is that of an empty section.
        return field.get_default(call_default_factory=True, validated_data={})
    if field.annotation is str:
        return ""
    return get_args(field.annotation)[0]  # the first value of a Literal


def _check_name(dotted: str) -> None:
    section, dot, name = dotted.partition(".")
    field = Study.model_fields.get(section)
    if field is None:
        raise KeyError(f"{dotted}: not a setting of a study")
    kind = field.annotation
    fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, Section) else {}
    if dot and name not in fields:
        raise KeyError(f"{dotted}: not a setting of a study")
