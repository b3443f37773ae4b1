"""Executors run the operators and the training loop of a stage: on Ray, or in this process."""

from typing import assert_never

from pos2distill.config import Runtime
from pos2distill.store.artifacts import Artifact

from .local import LOCAL_STATES, LocalExecutor
from .protocol import Executor
from .ray.states import RAY_STATES


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
        UserError: if a list is corrupt, or all of its states are missing.
    """
    found = {"local": LOCAL_STATES.present(checkpoint), "ray": RAY_STATES.present(checkpoint)}
    return {name: list(states.values())[-1] for name, states in found.items() if states}
