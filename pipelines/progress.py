"""Training progress on the driver's terminal: workers tell an actor, a thread of the driver asks it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.actor import ActorHandle
from tqdm import tqdm

from pipelines.ray_session import driver_node

_PERIOD_SECONDS = 0.5


class _Board:
    """The latest step and loss."""

    def __init__(self) -> None:
        self.latest = (0, 0, 0.0)

    def post(self, done: int, total: int, loss: float) -> None:
        """Called by rank 0 after each step; nothing waits for it."""
        self.latest = (done, total, loss)

    def read(self) -> tuple[int, int, float]:
        """Steps done, steps in all, the last loss."""
        return self.latest


@contextmanager
def training_progress() -> Iterator[ActorHandle]:
    """A board to post steps to, shown as a progress bar while the body runs."""
    board = ray.remote(num_cpus=0, scheduling_strategy=driver_node())(_Board).remote()
    finished = threading.Event()
    with tqdm(desc="distill", unit="step") as bar:
        watcher = threading.Thread(target=_watch, args=(board, bar, finished), daemon=True)
        watcher.start()
        try:
            yield board
        finally:
            finished.set()
            watcher.join()


def _watch(board: ActorHandle, bar: tqdm, finished: threading.Event) -> None:
    last_look = False
    while not last_look:
        last_look = finished.wait(_PERIOD_SECONDS)
        done, total, loss = ray.get(board.read.remote())
        if done:
            bar.total = total
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update(done - bar.n)
