from collections.abc import Iterator

import pytest

from pos2distill.errors import warn_once


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each warning is printed once in a process; here once in a test."""
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()
