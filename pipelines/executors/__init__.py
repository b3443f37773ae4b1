"""Executors run the operators and the training loop of a stage: on Ray, or in this process."""

from typing import assert_never

from pos2distill.config import Runtime

from .protocol import Executor


def build_executor(runtime: Runtime) -> Executor:
    """The executor that `runtime.executor` names. Ray is imported only for its own."""
    if runtime.executor == "local":
        from .local import LocalExecutor

        return LocalExecutor(runtime)
    if runtime.executor == "ray":
        from .ray.executor import RayExecutor

        return RayExecutor(runtime)
    assert_never(runtime.executor)
