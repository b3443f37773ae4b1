"""Fixtures of the unit tests."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pos2distill.config import Study
from tests.support.paths import ODD_NAME

if TYPE_CHECKING:
    from tests.support.samples import Source


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A unit test that hangs costs less than one that starts processes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(params=["disk", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh folder for a run, on disk or on an object store. As a pattern, its name would match others."""
    return str(tmp_path / ODD_NAME) if request.param == "disk" else f"memory://{uuid.uuid4().hex}/{ODD_NAME}"


@pytest.fixture
def make_source() -> Callable[[Study], "Source"]:
    """`make_source(study)`: see `answered_source`."""
    # Imported here: it imports torch, which most unit tests do not need.
    from tests.support.samples import answered_source

    return answered_source
