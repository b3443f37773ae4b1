"""Executors run the operators and the training loop of a stage: on Ray, or in this process."""

from typing import assert_never

from pos2distill.config import Runtime
from pos2distill.store.artifacts import Artifact

from .local import LocalExecutor, saved_folders
from .protocol import Executor
from .ray.states import listed_states


def build_executor(runtime: Runtime) -> Executor:
    """The executor that `runtime.executor` names. Ray is imported only for its own."""
    if runtime.executor == "local":
        return LocalExecutor(runtime)
    if runtime.executor == "ray":
        from .ray.executor import RayExecutor

        return RayExecutor(runtime)
    assert_never(runtime.executor)


def saved_by(checkpoint: Artifact) -> list[str]:
    """The executors that have saved training states in a checkpoint. Each has a list of its own."""
    found = {"local": saved_folders(checkpoint), "ray": listed_states(checkpoint)}
    return [name for name, states in found.items() if states]
