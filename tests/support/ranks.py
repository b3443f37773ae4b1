"""DistContext of a process group, each a process of a test."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

# Imported once, by the process that ranks are forked from.
_IMPORTS = ["pipelines.executors.ray.train_worker", "pos2distill.training.strategies.zero3"]


def run_ranks(work: Callable[..., None], world: int, *args: Any) -> None:
    """`work(rank, *args)` in so many processes, to their end."""
    multiprocessing.set_forkserver_preload(_IMPORTS)
    start_processes(work, args=args, nprocs=world, start_method="forkserver")


@contextmanager
def process_group(rank: int, world: int, rendezvous: str, backend: str = "gloo") -> Iterator[None]:
    """As a launcher sets it up, for DeepSpeed."""
    of_world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in of_world.items()}
    torch.distributed.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
