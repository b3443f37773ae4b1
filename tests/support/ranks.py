"""Several ranks on one machine: each a process with a process group, or each a thread of the test."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from pos2distill.training.distributed import DistContext

# Imported once, by the server process that ranks are forked from.
_PRELOAD = [
    "pos2distill.training.loop",
    "pos2distill.training.strategies.zero3",
    "transformers.models.llama.modeling_llama",
]

Result = TypeVar("Result")


def run_processes(work: Callable[..., None], world_size: int, *args: Any) -> None:
    """Run `work(rank, *args)` in `world_size` processes and wait for all of them."""
    preload = list(_PRELOAD)
    if not torch.cuda.is_available():  # DeepSpeed may initialize CUDA, which does not survive a fork
        os.environ["DS_ACCELERATOR"] = "cpu"
        preload.append("deepspeed")
    multiprocessing.set_forkserver_preload(preload)
    start_processes(work, args=args, nprocs=world_size, start_method="forkserver")


@contextmanager
def process_group(rank: int, world_size: int, rendezvous: str, backend: str = "gloo") -> Iterator[None]:
    """The default process group, with the environment variables that a launcher sets for DeepSpeed."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in variables.items()}
    torch.distributed.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Meeting:
    """Gathers one value of each rank, where every rank is a thread."""

    def __init__(self, world_size: int) -> None:
        self.values: list[Any] = [None] * world_size
        # With a timeout, so that one rank's failure ends the others.
        self.barrier = threading.Barrier(world_size, timeout=60)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value; each rank calls this once a round."""
        self.values[rank] = value
        self.barrier.wait()
        gathered = list(self.values)
        self.barrier.wait()
        return gathered


@dataclass(frozen=True, slots=True)
class ThreadDist(DistContext):
    """A rank that is a thread. Its groups are meetings."""

    tensors: Any = None

    def all_gather(self, value_C: Tensor) -> Tensor:
        return torch.cat(self.tensors.gather(self.rank, value_C))

    def all_reduce_max(self, value: int) -> int:
        return max(self.control_group.gather(self.rank, value))

    def all_gather_object(self, value: Any) -> list[Any]:
        gathered: list[Any] = self.sample_group.gather(self.rank, value)
        return gathered


def thread_ranks(world_size: int) -> list[ThreadDist]:
    """The ranks of one group."""
    samples, control, tensors = Meeting(world_size), Meeting(world_size), Meeting(world_size)
    return [
        ThreadDist(rank, world_size, sample_group=samples, control_group=control, tensors=tensors)
        for rank in range(world_size)
    ]


def run_threads(work: Callable[[DistContext], Result], world_size: int) -> list[Result]:
    """Run `work(dist)` on `world_size` ranks at once, each a thread. Returns their results in rank order."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(work, thread_ranks(world_size)))
