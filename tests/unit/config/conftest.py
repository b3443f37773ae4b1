from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from tests.support.recipes import MINIMAL_RECIPE


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Recipe]:
    """`load("training.epochs=1", model={…})`: the smallest recipe with overrides and other sections."""

    def load(*overrides: str, **changes: Any) -> Recipe:
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump({**MINIMAL_RECIPE, **changes}))
        return load_recipe(str(path), overrides)

    return load
