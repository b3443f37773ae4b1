"""Ranks of a process group, each a process of a test."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def process_group(rank: int, world: int, rendezvous: str) -> Iterator[None]:
    """As a launcher sets it up, for DeepSpeed."""
    of_world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in of_world.items()}
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
