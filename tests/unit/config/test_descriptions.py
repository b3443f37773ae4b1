from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from cluster.spec import ClusterSpec
from pos2distill.config import Recipe


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a type mentions, and those of their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections_in(field.annotation)
    for part in get_args(annotation):
        yield from sections_in(part)


SECTIONS = sorted({*sections_in(Recipe), *sections_in(ClusterSpec)}, key=lambda section: section.__name__)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_a_section_has_a_description(section: type[BaseModel]) -> None:
    """A phrase or sentence that begins with a capital and ends with a full stop, and makes sense alone."""
    for name, field in section.model_fields.items():
        description = field.description or ""
        assert description[:1].isupper(), f"{name}: {description!r}"
        assert description.endswith("."), f"{name}: {description!r}"
        assert "|" not in description, f"{name}: a column of the tables in docs/ would end there"
