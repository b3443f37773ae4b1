"""Python runs this file at the start of every process that has its folder in PYTHONPATH.

There, a pass of training takes `PASS_SECONDS` longer, from the step SLOW_PASSES_FROM on, while the file exists that
SLOW_PASSES_WHILE names. So these steps are long on a machine of any speed, and keep no core busy.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PASS_SECONDS = 2.0
_MODULE = "pos2distill.training.loop"


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the training loop as soon as a process has imported it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_slow_down(module: ModuleType) -> None:
            execute(module)
            _slow_down(module.TrainingLoop)

        spec.loader.exec_module = execute_and_slow_down  # type: ignore[method-assign]
        return spec


def _slow_down(trainer: Any) -> None:
    forward, step = trainer._forward, trainer._step
    is_slow = False

    def slow_step(self: Any, prepared: Any, number: int, *arguments: Any) -> Any:
        nonlocal is_slow
        is_slow = number >= int(os.environ["SLOW_PASSES_FROM"])
        return step(self, prepared, number, *arguments)

    def slow_forward(self: Any, *arguments: Any) -> Any:
        if is_slow and os.path.exists(os.environ["SLOW_PASSES_WHILE"]):
            time.sleep(PASS_SECONDS)
        return forward(self, *arguments)

    trainer._step, trainer._forward = slow_step, slow_forward


if "SLOW_PASSES_WHILE" in os.environ:
    sys.meta_path.insert(0, _Finder())
