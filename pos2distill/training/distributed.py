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
        rank: of this worker.
        world: number of workers.
        device: where tensors of the default process group must be (NCCL: the GPU).
        samples: a group on the CPU, for the thread that gathers samples while gradients are reduced.
        decisions: another one, for the loop's decisions, which must not wait for the GPU; see `control_groups`.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    samples: Any = None
    decisions: Any = None

    def gather(self, value_C: Tensor) -> Tensor:
        """Every rank's values, in rank order: (C,) -> (world * C,), on the CPU."""
        if self.world == 1:
            return value_C
        own_C = value_C.to(self.device)
        gathered = [torch.empty_like(own_C) for _ in range(self.world)]
        # Requires equal sizes on all ranks; filler rows (`rows_of_rank`) make them equal.
        torch.distributed.all_gather(gathered, own_C)
        return torch.cat(gathered).cpu()

    def maximum(self, value: int) -> int:
        """The greatest of all ranks' values."""
        if self.world == 1:
            return value
        greatest = torch.tensor(value)
        torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX, group=self.decisions)
        return int(greatest)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Values are pickled, so they should be small."""
        if self.world == 1:
            return [value]
        gathered = [None] * self.world
        # On the CPU's group: with NCCL, torch moves pickled objects through GPU memory (torch 2.13).
        torch.distributed.all_gather_object(gathered, value, group=self.samples)
        return gathered

    def all_gather_tables(self, table: pa.Table | None) -> Sequence[pa.Table]:
        """The tables of the ranks that pass one, in rank order."""
        if self.world == 1:
            return [] if table is None else [table]
        # As IPC bytes, because a pickled slice carries the whole table that it was cut from (pyarrow 26).
        own = None
        if table is not None:
            own = _to_bytes(table)
        gathered = self.all_gather_object(own)
        return [pa.ipc.open_stream(each).read_all() for each in gathered if each is not None]


def control_groups(world: int) -> dict[str, Any]:
    """The groups on the CPU, as arguments of `DistContext`; none for one worker. Called on every rank."""
    if world == 1:
        return {}
    # A timeout of days: waiting for samples is not an error, however long it takes until sampling nodes start.
    timeout = datetime.timedelta(days=7)
    names = ("samples", "decisions")
    return {name: torch.distributed.new_group(backend="gloo", timeout=timeout) for name in names}


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written
