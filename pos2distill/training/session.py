"""What an executor provides to a training worker, wherever it runs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from pos2distill.training.distributed import DistContext
from pos2distill.training.sources import StreamReader


class WorkerSession(Protocol):
    """The rank, the device, the sample stream, and the checkpoint I/O of one training worker."""

    dist: DistContext
    device: torch.device
    local_rank: int  # among the workers of this node
    reader_rank: int  # among the workers that read the same copy of a saved state
    readers: int  # how many there are

    def open_stream(self) -> StreamReader:
        """This worker's part of the samples that the store lacks. Called at most once, unless parts are corrupt."""

    def saved_states(self) -> Iterator[Any]:
        """The saved training states, for `opened_state`; newest first, the same on all workers. Empty in a new run."""

    def state_url(self, state: Any) -> str:
        """Where a saved training state is."""

    def opened_state(self, state: Any, scratch: Path) -> AbstractContextManager[Path]:
        """A folder with a saved training state. A collective of all workers.

        Args:
            scratch: the folder in which a copy is made if the storage is remote: one copy for all workers of a node,
                which is removed at the end of the context.
        """

    def save_state(self, step: int, folder: Path) -> None:
        """Keep this rank's folder of a training state, and remove it here.

        Called on every rank; may return before the upload ends.
        """

    def wait_until_listed(self) -> None:
        """Wait until the last saved state is one from which another run could continue. A minute at most."""

    def stop_requested(self) -> bool:
        """Whether a stop is requested. Hardly waits; called on rank 0 only."""

    def is_preempted(self) -> bool:
        """Whether the node of any worker is about to be taken away. Returns at once."""

    def warn(self, line: str) -> None:
        """Have the driver print a warning."""

    def report_step(self, trained: int, steps: int, loss: float) -> None:
        """Report the totals so far: samples trained on over all epochs, steps, the last loss. Called on rank 0 only."""
