"""Writes the tables of docs/recipes.md and docs/cluster.md from the code's own definitions: `make docs`.

A test holds the pages to it.
"""

import json
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from cluster import spec
from pos2distill.config import Runtime, Section, Study

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
MARK = "<!-- From here on made by scripts/reference_tables.py from pos2distill/config/. -->\n"
CLUSTER_PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"
CLUSTER_MARK = "<!-- From here on made by scripts/reference_tables.py from cluster/spec.py. -->\n"

# Sections of a cluster spec by where they stand in it, alike ones together.
CLUSTER_SECTIONS: dict[str, type[Section]] = {
    "(top)": spec.ClusterSpec,
    "storage": spec.StorageSection,
    "sampling": spec.SamplingGroup,
    "training": spec.TrainingGroup,
    "data": spec.DataGroup,
    "head`, `sampling.node`, `training.node`, `data.node": spec.NodeSection,
    "….node.tolerations[i]": spec.Toleration,
    "pods": spec.PodsSection,
    "pods.secrets[i]": spec.SecretReference,
    "job": spec.JobSection,
    "network": spec.NetworkSection,
    "network.api_server`, `network.egress[i]": spec.EgressRule,
}


def render(page: str) -> str:
    """The page of recipes with everything below the mark made anew."""
    head, _, _ = page.partition(MARK)
    return head + MARK + "".join(_sections())


def render_cluster(page: str) -> str:
    """The page of clusters with everything below the mark made anew."""
    head, _, _ = page.partition(CLUSTER_MARK)
    return head + CLUSTER_MARK + "".join(_section(name, kind) for name, kind in CLUSTER_SECTIONS.items())


def _sections() -> list[str]:
    parts = []
    for name, field in Study.model_fields.items():
        if _is_section(field):
            parts.append(_section(name, field.annotation))
            inner = {key: each for key, each in field.annotation.model_fields.items() if _is_section(each)}  # type: ignore[union-attr]
            parts += [_section(f"{name}.{key}", get_args(each.annotation)[0]) for key, each in inner.items()]
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
    # A section that may be missing counts as one; a list of sections has a row.
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind is not type(None)]
    listed = get_origin(field.annotation) is tuple
    return not listed and any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)


def _type(kind: Any) -> str:
    """A type as people write it: `first | last | int`, `[integer, …]`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        return _type(inner[0])
    if origin in (Literal, types.UnionType, typing.Union):
        return r" \| ".join(map(str if origin is Literal else _type, inner))
    if origin is tuple:
        return f"[{_type(inner[0])}, …]" if inner[-1] is Ellipsis else f"[{', '.join(map(_type, inner))}]"
    if origin is dict:
        return f"{{name: {_type(inner[1])}}}"
    names = {type(None): "null", str: "text", int: "integer", float: "number", bool: "true or false"}
    return "section" if isinstance(kind, type) and issubclass(kind, BaseModel) else names.get(kind, str(kind))


def _default(field: Any) -> str:
    if field.default_factory is not None:
        return "see text"  # it follows from other settings
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, str):
        return field.default
    return json.dumps(field.default, default=lambda section: section.model_dump(mode="json"))


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
    CLUSTER_PAGE.write_text(render_cluster(CLUSTER_PAGE.read_text()))
