"""Training state in files that any number of workers can read: what a resumed run needs beside its index in the data.

Of every parameter, by its name and in its full shape, fp32: the master weight and Adam's two moments. Each of W ranks
writes its share, `state-RANK-of-W-SHARD.safetensors`, with a checksum of each tensor in the file's metadata;
`state.json` says which tensors stand where. How many ranks wrote, and which strategy, leaves no trace in what is read.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pos2distill.errors import UserError

KINDS = ("weight", "exp_avg", "exp_avg_sq")
STATE_FILE = "state.json"

_FORMAT = 1
_SHARD_BYTES = 2 << 30
_BYTES = 4  # of an fp32 value

Shapes = Mapping[str, Sequence[int]]
"""Every parameter's full shape by its name, in the model's order."""


def init_optimizer_state(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Give parameters that were never stepped the state that AdamW's first step would start from."""
    for parameter in parameters:
        if not optimizer.state[parameter]:
            moments = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in KINDS[1:]}
            # Fused steps are counted where the weights are.
            device = parameter.device if optimizer.defaults.get("fused") else "cpu"
            optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=device), **moments}


def write_state(
    folder: Path, shapes: Shapes, gather: Callable[[str, str], Tensor], *, step: int, rank: int, world: int
) -> None:
    """Write this rank's share of the state; rank 0 writes `state.json` too.

    Args:
        gather: a kind of `KINDS` and a parameter's name to its full tensor. Called on every rank for every tensor in
            one order, so that it can be a collective; no rank ever holds more than a shard and one tensor.
        step: Adam's step count.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shares = _deal(shapes, world)
    file_of = {key: file for file, keys in shares[rank].items() for key in keys}
    waiting: dict[str, dict[str, Tensor]] = {file: {} for file in shares[rank]}
    for name in shapes:
        for kind in KINDS:
            tensor, key = gather(kind, name).detach(), f"{kind}/{name}"
            if (file := file_of.get(key)) is None:
                continue
            waiting[file][key] = tensor.float().cpu().contiguous()
            if len(waiting[file]) == len(shares[rank][file]):
                shard = waiting.pop(file)
                save_file(shard, folder / file, {key: _checksum(tensor) for key, tensor in shard.items()})
    if rank == 0:
        content = {
            "format": _FORMAT,
            "adam_step": step,
            "shapes": {name: list(shape) for name, shape in shapes.items()},
            "files": {file: keys for share in shares for file, keys in share.items()},
        }
        (folder / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n")


class StoredState:
    """A training state on disk, found complete and of the right model.

    Args:
        shapes: the model's own.
    Raises:
        UserError: naming the file that is missing, damaged or of another model or version.
    """

    def __init__(self, folder: Path, shapes: Shapes) -> None:
        self.folder = folder
        path = folder / STATE_FILE
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise UserError(
                    f"{path}: training state of format {content['format']}, expected {_FORMAT}: "
                    f"another version of this program wrote it; resume with that one"
                )
            self.step = int(content["adam_step"])
            self.files: dict[str, list[str]] = content["files"]
            self._file_of = {key: file for file, keys in self.files.items() for key in keys}
            _check_shapes(path, content["shapes"], shapes)
        except FileNotFoundError:
            raise _unusable(path, "missing") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unusable(path, f"damaged ({error})") from None
        self.shapes = shapes

    def verify(self, *, rank: int, world: int) -> None:
        """Compare every tensor of this rank's share of the files with its checksum; all ranks together, every file."""
        for file in list(self.files)[rank::world]:
            with self._opened(file) as tensors:
                checksums = tensors.metadata() or {}
                for key in self.files[file]:
                    if _checksum(tensors.get_tensor(key)) != checksums.get(key):
                        raise _unusable(self.folder / file, f"damaged ({key} does not match its checksum)")

    def read(self, kind: str, name: str) -> Tensor:
        """A parameter's full tensor, fp32."""
        return self.read_flat(kind, name, 0, math.prod(self.shapes[name])).view(tuple(self.shapes[name]))

    def read_flat(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a parameter's tensor laid flat, fp32; only the rows they lie in are read."""
        key, shape = f"{kind}/{name}", self.shapes[name]
        if start == stop:
            return torch.zeros(0)
        with self._opened(self._file_of[key]) as tensors:
            row = math.prod(shape[1:])
            first = start // row
            rows: Tensor = tensors.get_slice(key)[first : -(-stop // row)] if shape else tensors.get_tensor(key)
            return rows.flatten()[start - first * row : stop - first * row]

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        path = self.folder / file
        try:
            with safe_open(path, framework="pt") as tensors:
                yield tensors
        except FileNotFoundError:
            raise _unusable(path, "missing") from None
        except (SafetensorError, OSError) as error:
            raise _unusable(path, f"damaged ({str(error).splitlines()[0]})") from None


def _deal(shapes: Shapes, world: int) -> list[dict[str, list[str]]]:
    """Of each rank its files and the tensors in them: every parameter to the rank with the least so far."""
    shares: list[dict[str, list[str]]] = [{} for _ in range(world)]
    totals, rooms = [0] * world, [0] * world
    for name, shape in shapes.items():
        rank = totals.index(min(totals))
        size = _BYTES * math.prod(shape)
        for kind in KINDS:
            if rooms[rank] < size or not shares[rank]:
                shares[rank][f"state-{rank:05d}-of-{world:05d}-{len(shares[rank]):03d}.safetensors"] = []
                rooms[rank] = _SHARD_BYTES
            shares[rank][next(reversed(shares[rank]))].append(f"{kind}/{name}")
            rooms[rank] -= size
            totals[rank] += size
    return shares


def _check_shapes(path: Path, stored: Mapping[str, Sequence[int]], shapes: Shapes) -> None:
    there, wanted = ({name: tuple(shape) for name, shape in each.items()} for each in (stored, shapes))
    if wrong := [name for name in {**wanted, **there} if there.get(name) != wanted.get(name)]:
        name = wrong[0]
        has, wants = (str(list(each[name])) if name in each else "no such parameter" for each in (there, wanted))
        raise UserError(f"{path}: the state of another model ({name}: {has}; this model: {wants})")


def _checksum(tensor: Tensor) -> str:
    values: Any = tensor.flatten().numpy()
    return f"{zlib.crc32(values):08x}"


def _unusable(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}")
