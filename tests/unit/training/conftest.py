"""Fixtures of the tests of training."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pos2distill.config import Recipe, Study

if TYPE_CHECKING:
    from tests.support.samples import Source


@pytest.fixture
def make(make_recipe: Callable[..., Recipe], make_source: "Callable[[Study], Source]") -> "Callable[..., Source]":
    """`make(method={"k": 2}, …)`: the answered source of `make_recipe` with these settings."""
    return lambda **overrides: make_source(make_recipe(**overrides).study)
