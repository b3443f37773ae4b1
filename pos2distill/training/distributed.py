"""Collective operations between the workers of a training run."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DistContext:
    """This worker's rank, and the collectives that the training loop needs. The default is a group of one.

    Attributes:
        rank: this worker's rank.
        world_size: number of workers.
        device: where tensors of the default process group must be (NCCL: the GPU).
        sample_group: a process group on the CPU for the thread that gathers samples while gradients are reduced.
        control_group: another one for what the loop agrees on, which must not wait for the GPU.
    """

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    sample_group: Any = None
    control_group: Any = None

    @classmethod
    def create(cls, rank: int, world_size: int, device: str = "cpu") -> "DistContext":
        """The context of one rank, with its process groups. Called on every rank."""
        if world_size == 1:
            return cls(rank, world_size, device)
        # A timeout of days: waiting for samples is not an error, however long it takes until sampling nodes start.
        sample_group = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
        # While samples are awaited, the ranks meet here every half second. A rank that hangs must not stop all of them.
        control_group = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(minutes=30))
        return cls(rank, world_size, device, sample_group, control_group)

    def all_gather(self, value_C: Tensor) -> Tensor:
        """Every rank's values, in rank order: (C,) -> (world_size * C,), on the CPU."""
        if self.world_size == 1:
            return value_C
        own_C = value_C.to(self.device)
        gathered = [torch.empty_like(own_C) for _ in range(self.world_size)]
        # Requires equal sizes on all ranks; padding rows (`row_keys_of_rank`) make them equal.
        torch.distributed.all_gather(gathered, own_C)
        return torch.cat(gathered).cpu()

    def all_reduce_max(self, value: int) -> int:
        """The greatest of all ranks' values."""
        if self.world_size == 1:
            return value
        greatest = torch.tensor(value)
        torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX, group=self.control_group)
        return int(greatest)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Values are pickled, so they should be small."""
        if self.world_size == 1:
            return [value]
        gathered = [None] * self.world_size
        # On the CPU's group: with NCCL, torch moves pickled objects through GPU memory (torch 2.13).
        torch.distributed.all_gather_object(gathered, value, group=self.sample_group)
        return gathered

    def all_gather_tables(self, table: pa.Table | None) -> Sequence[pa.Table]:
        """The tables of the ranks that pass one, in rank order."""
        if self.world_size == 1:
            return [] if table is None else [table]
        # As IPC bytes, because a pickled slice carries the whole table that it was cut from (pyarrow 26).
        own = None
        if table is not None:
            own = _to_bytes(table)
        gathered = self.all_gather_object(own)
        return [pa.ipc.open_stream(each).read_all() for each in gathered if each is not None]


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written
