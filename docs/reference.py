"""Writes the tables of docs/recipes.md from the recipe's own definition: `make docs`. A test holds them to it."""

import json
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pos2distill.config import Runtime, Section, Study

PAGE = Path(__file__).parent / "recipes.md"
MARK = "<!-- From here on made by docs/reference.py from pos2distill/config.py. -->\n"


def render(page: str) -> str:
    """The page with everything below the mark made anew."""
    head, _, _ = page.partition(MARK)
    return head + MARK + "".join(_sections())


def _sections() -> list[str]:
    parts = [_section(name, field.annotation) for name, field in Study.model_fields.items() if _is_section(field)]
    parts.append(f"\n## `seed`\n\nA whole number, default {Study.model_fields['seed'].default}. ")
    parts.append("All randomness follows from it and from example ids.\n")
    parts.append(_section("runtime", Runtime))
    # Pools are of one kind and share a table.
    kinds: dict[type[Section], list[str]] = {}
    for name, field in Runtime.model_fields.items():
        if _is_section(field):
            kinds.setdefault(typing.cast(type[Section], field.annotation), []).append(f"runtime.{name}")
    return parts + [_section("`, `".join(names), kind) for kind, names in kinds.items()]


def _section(name: str, kind: Any) -> str:
    rows = [
        f"| `{field_name}` | {_type(field.annotation)} | {_default(field)} | {field.description or ''} |\n"
        for field_name, field in kind.model_fields.items()
        if not _is_section(field)
    ]
    head = "| field | value | default | |\n|---|---|---|---|\n"
    return f"\n## `{name}`\n\n{kind.__doc__.splitlines()[0]}\n\n{head}{''.join(rows)}"


def _is_section(field: Any) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _type(kind: Any) -> str:
    """A type as people write it: `first | last | int`, `[integer, …]`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        return _type(inner[0])
    if origin is Literal:
        return r" \| ".join(map(str, inner))
    if origin in (types.UnionType, typing.Union):
        return r" \| ".join(map(_type, inner))
    if origin is tuple:
        return f"[{_type(inner[0])}, …]" if inner[-1] is Ellipsis else f"[{', '.join(map(_type, inner))}]"
    names = {type(None): "null", str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(kind, str(kind))


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return field.default if isinstance(field.default, str) else json.dumps(field.default)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
