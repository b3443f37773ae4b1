"""Errors that crossed process borders: Ray wraps what a remote function raises, sometimes several times."""

import re
from collections.abc import Iterator
from typing import Any

from ray.exceptions import RayActorError, RayError

from pos2distill.errors import CorruptPart, MachineError, TransientError, UserError
from pos2distill.faults import describe, disk_is_full, is_transient

# Ray Data 2.60 keeps nothing of an exception but the text of its traceback.
_KINDS = {kind.__name__: kind for kind in (UserError, TransientError, MachineError)}
_TRACEBACK_LINE = re.compile(rf"^pos2distill\.errors\.({'|'.join(_KINDS)}): (.+)$", re.MULTILINE)

# As Ray 2.60 says that it ended workers of a node, before the kernel does.
_LOW_MEMORY = re.compile(
    r"killed due to the node running low on memory\. Memory on the node .*? was (\S+) used / (\S+)"
)


def find_user_error(error: BaseException) -> UserError | None:
    """The UserError inside an error, or None."""
    causes = list(_causes(error))
    for cause in causes:
        # What `ray.get` raises is of both classes, and its message is the traceback; the plain error is its cause.
        if isinstance(cause, UserError) and not isinstance(cause, RayError):
            return cause
    # Only after all causes, because an exception object is certain and a line of text is not.
    for cause in causes:
        match = _TRACEBACK_LINE.search(str(cause))
        if match:
            # The line is the whole message, since a UserError has one line.
            return _KINDS[match[1]](match[2])
    # A restart on the same machine would fill its disk again.
    if any(disk_is_full(cause) for cause in causes):
        return MachineError(
            "a worker cannot write: No space left on device; free space in runtime.storage and for temporary files "
            "(TMPDIR), then run the same command again"
        )
    return None


def find_fault(error: BaseException) -> UserError | None:
    """The error to show for what the machine, the network or a storage caused in another process, or None.

    A TransientError if it may pass, else a MachineError: both times a job on a cluster is tried again.

    Unlike the others it follows only what Ray wrapped: an error that is raised while such an error is handled is a bug.
    """
    waiting = [error]
    while waiting:
        current = waiting.pop()
        low = _LOW_MEMORY.search(str(current))
        if low:
            return MachineError(
                f"a node ran low on memory ({low[1]} of {low[2]} used), so Ray ended workers there; give it more, or "
                f"lower runtime.samplers.max, runtime.teachers.batch_size or runtime.trainers.micro_batch_tokens; run "
                f"the same command again to continue"
            )
        wrapped = [each for each in _wrapped(current) if isinstance(each, BaseException) and each is not current]
        waiting += wrapped
        line = None if wrapped else describe(current)
        if line is not None and is_transient(current):
            return TransientError(line)
        if line is not None:
            return MachineError(line)
    return None


def actor_died(error: BaseException) -> bool:
    """Whether an actor ended, more often than it may restart, is among the causes of an error."""
    # Ray Data 2.60 keeps the text alone.
    return any(isinstance(cause, RayActorError) or "ActorDiedError" in str(cause) for cause in _causes(error))


def actor_creation_failed(error: BaseException) -> bool:
    """Whether an actor raised an error while it was created. Ray 2.60 does not restart it then."""
    # Ray Data 2.60 keeps the text alone.
    return any(
        getattr(cause, "actor_init_failed", False) or "raised in its creation task" in str(cause)
        for cause in _causes(error)
    )


def find_corrupt_part(error: BaseException) -> CorruptPart | None:
    """The CorruptPart inside an error, or None."""
    for cause in _causes(error):
        if isinstance(cause, CorruptPart):
            return cause
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and everything that it wraps, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        current = waiting.pop()
        # Causes and contexts of exceptions can form a cycle.
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        inner = [current.__cause__, current.__context__, *_wrapped(current)]
        waiting += [each for each in inner if isinstance(each, BaseException)]


def _wrapped(error: BaseException) -> list[Any]:
    """What the exceptions of Ray 2.60 hold: a task's, and of Ray Train the controller's and one of each rank."""
    found = [getattr(error, name, None) for name in ("cause", "controller_failure")]
    return [*found, *(getattr(error, "worker_failures", None) or {}).values()]
