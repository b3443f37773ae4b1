"""Settings of the command line: `section.field=value`."""

import re
from typing import Any

from pos2distill.config.yaml_reader import parse_value
from pos2distill.errors import UserError


def split_override(override: str) -> tuple[str, str | None]:
    """The dotted name of the setting, and its value as it is written; None if there is no `=`."""
    name, separator, text = override.partition("=")
    return name.strip(), text if separator else None


def apply_override(raw: dict[str, Any], override: str, *, prefix: str = "") -> str:
    """Set one value in a raw mapping of sections. Returns its dotted name.

    Args:
        prefix: of the name as it was typed, for errors.
    """
    dotted, text = split_override(override)
    if text is None or not dotted:
        written = override.split()
        # As in a file, or with a blank instead of the sign.
        is_setting = text is None and len(written) == 2 and re.fullmatch(r"\w+(\.\w+)*:?", written[0])
        hint = f"; did you mean '{prefix}{written[0].rstrip(':')}={written[1]}'?" if is_setting else ""
        raise UserError(f"{prefix}{override}: expected {prefix}section.field=value{hint}")
    try:
        # The value is read as YAML, so that lists, null and quotes mean the same as in a file.
        value = parse_value(text)
    except ValueError as error:
        raise UserError(f"{prefix}{dotted}: cannot read the value: {error}") from None
    if dotted.startswith("sweep."):  # the keys of a sweep are dotted names themselves
        sweep = raw.setdefault("sweep", {})
        if not isinstance(sweep, dict):
            raise UserError(f"{dotted}: 'sweep' is a single value and has no fields")
        sweep[dotted.removeprefix("sweep.")] = value
    else:
        set_value(raw, dotted, value, prefix)
    return dotted


def set_value(raw: dict[str, Any], dotted: str, value: Any, prefix: str = "") -> None:
    """Set the value of a setting in a raw mapping of sections.

    Raises:
        UserError: if one of its sections is a single value.
    """
    *sections, field = dotted.split(".")
    for section in sections:
        inner = raw.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UserError(f"{prefix}{dotted}: '{section}' is a single value and has no fields")
        raw = inner
    raw[field] = value
