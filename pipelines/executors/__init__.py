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


def saved_steps(checkpoint: Artifact) -> dict[str, int]:
    """The step of the newest training state in a checkpoint, by the executor that saved it. Each has a list of its own.

    Raises:
        UserError: if a list is corrupt.
    """
    found = {"local": list(saved_folders(checkpoint).values()), "ray": list(listed_states(checkpoint).values())}
    return {name: steps[-1] for name, steps in found.items() if steps}
