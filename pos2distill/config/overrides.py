"""Settings of the command line: `section.field=value`."""

import re
from collections.abc import Sequence
from typing import Any

from pos2distill.config.yaml_reader import last_comment, parse_value
from pos2distill.errors import UserError


def split_override(override: str) -> tuple[str, str | None]:
    """The dotted name of the setting, and its value as it is written; None if there is no `=`."""
    name, separator, text = override.partition("=")
    return name.strip(), text if separator else None


def overrides_setting(override: str, dotted: str) -> bool:
    """Whether an override sets this setting, or a section around it."""
    return is_within(dotted, split_override(override)[0])


def is_within(dotted: str, section: str) -> bool:
    """Whether a dotted name is that of this section or setting, or of a field or an item of a list in it."""
    return dotted == section or dotted.startswith((f"{section}.", f"{section}["))


def override_value(overrides: Sequence[str], dotted: str) -> Any:
    """The value that a setting has by overrides alone; None if none of them sets it, or a section around it."""
    value: Any = {}
    for override in overrides:
        apply_override(value, override)
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def apply_override(raw: dict[str, Any], override: str, *, prefix: str = "") -> str:
    """Set one value in a raw mapping of sections. Returns its dotted name.

    Args:
        prefix: what stood before the name as it was typed, for errors.
    """
    dotted, text = split_override(override)
    if text is None or any(not part or part != part.strip() for part in dotted.split(".")):
        # As in a file, or with a blank instead of the sign.
        written = re.fullmatch(r"(\w+(?:\.\w+)*) *: *(.+)|(\w+(?:\.\w+)+) +(\S+)", override.strip())
        hint = ""
        if written and text is None:
            hint = f"; did you mean '{prefix}{written[1] or written[3]}={written[2] or written[4]}'?"
        raise UserError(f"{prefix}{override}: expected {prefix}section.field=value{hint}")
    if not text.strip():
        # As of a variable of the shell that is not set, which should not mean the default.
        raise UserError(f"{prefix}{dotted}: no value after '='; write null for none, or '' for an empty text")
    try:
        # The value is read as YAML, so that lists, null and quotes mean the same as in a file.
        value = parse_value(text)
    except ValueError as error:
        is_cut = text.count("[") > text.count("]") or text.count("{") > text.count("}")
        hint = "; if it has blanks, put the whole setting in quotes" if is_cut else ""
        if text.startswith("{") and not is_cut:
            hint = f"; if it is text, give it quotes of its own: '{prefix}{dotted}=\"{text}\"'"
        raise UserError(f"{prefix}{dotted}: cannot read the value: {error}{hint}") from None
    comment = last_comment(text, value)
    if comment is not None:
        raise UserError(
            f"{prefix}{dotted}: '{comment:.80}' is a comment in YAML, and would be left out; remove it, or if it "
            f"belongs to the value, give the value quotes of its own, as in '{prefix}{dotted}=\"a #b\"'"
        )
    if dotted.startswith("sweep."):  # the keys of a sweep are dotted names themselves
        sweep = raw.setdefault("sweep", {})
        _require_section(sweep, "sweep", f"{prefix}{dotted}")
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
        _require_section(inner, section, f"{prefix}{dotted}")
        raw = inner
    raw[field] = value


def _require_section(value: Any, section: str, shown: str) -> None:
    if not isinstance(value, dict):
        if value is None:
            kind = "null"
        elif isinstance(value, list):
            kind = "a list"
        else:
            kind = "a single value"
        raise UserError(f"{shown}: '{section}' is {kind} and has no fields")
