"""Fixtures of the model tests."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pos2distill.config import ModelSection


@pytest.fixture
def copy_model(tiny_model_path: str, tmp_path: Path) -> Callable[..., ModelSection]:
    """A copy of the tiny model, without some of its files."""

    def copy(*without: str) -> ModelSection:
        folder = tmp_path / "copy"
        shutil.copytree(tiny_model_path, folder)
        for name in without:
            (folder / name).unlink()
        return ModelSection(path=str(folder), dtype="float32")

    return copy
