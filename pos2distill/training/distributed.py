"""The workers of a training run, as the loop sees them: what they all_gather_object."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DistContext:
    """This worker's index among all.

    device: what the process group's tensors live on (NCCL: the GPU).
    control: a group of its own on the CPU, so that samples travel while gradients do; see `control_group`.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    control: Any = None

    def gather(self, value_C: Tensor) -> Tensor:
        """Every rank's values, in rank order: (C,) -> (world * C,)."""
        if self.world == 1:
            return value_C
        own_C = value_C.to(self.device)
        gathered = [torch.empty_like(own_C) for _ in range(self.world)]
        torch.distributed.all_gather(gathered, own_C)
        return torch.cat(gathered).cpu()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Values are pickled; for what is small."""
        if self.world == 1:
            return [value]
        gathered = [None] * self.world
        torch.distributed.all_gather_object(gathered, value, group=self.control)
        return gathered

    def all_gather_tables(self, table: pa.Table | None) -> Sequence[pa.Table]:
        """The tables of the ranks that give one, in rank order."""
        # As IPC bytes: a pickled slice would carry the whole table that it was cut from.
        gathered = self.all_gather_object(None if table is None else _to_bytes(table)) if self.world > 1 else [table]
        return [
            pa.ipc.open_stream(each).read_all() if self.world > 1 else each for each in gathered if each is not None
        ]


def control_group(world: int) -> Any:
    """The group for `DistContext.control`; None for one worker. Called on every rank."""
    if world == 1:
        return None
    # Waiting for samples is no fault, however long nodes take to come.
    return torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(days=7))


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written
