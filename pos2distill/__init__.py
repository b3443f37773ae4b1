"""Pos2Distill: distill a language model's best document slot into all the others.

`pos2distill.evaluate`, `sample`, `distill` and `study` run what the commands of these names run, and return objects
(docs/python.md). They are imported when they are first used.

Its layers, of which each imports those below it, are declared for import-linter in pyproject.toml. Nothing here imports
Ray: the pipelines do.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_FUNCTIONS = ("evaluate", "sample", "distill", "study")


def import_pipelines(module: str) -> ModuleType:
    """A module of `pipelines`, which is inside this package where it is installed, and next to it in a checkout.

    By name, since the library imports nothing of the pipelines.
    """
    installed = importlib.util.find_spec("pos2distill.pipelines") is not None
    package = "pos2distill.pipelines" if installed else "pipelines"
    return importlib.import_module(f"{package}.{module}")


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_pipelines("api"), name)
    raise AttributeError(f"module 'pos2distill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FUNCTIONS])
