"""Training state in files that any number of workers can read.

It holds what a resumed run needs besides its `TrainingProgress`: for every trained parameter, by its name and in its
full shape, the fp32 master weight and Adam's two moments. Each of W ranks writes some of the tensors to files
`state-RANK-of-W-NUMBER.safetensors`, with a checksum of each tensor in the file's metadata. `state.json` lists which
tensors each file holds. What is read does not depend on how many ranks wrote it, nor on the strategy.
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

from pos2distill.errors import CorruptState, UserError
from pos2distill.faults import error_text
from pos2distill.store.checkpoint_layout import STATE_FILE

KINDS = ("weight", "exp_avg", "exp_avg_sq")

_FORMAT = 1
_FILE_BYTES = 2 << 30
_VALUE_BYTES = 4  # fp32

Shapes = Mapping[str, Sequence[int]]
"""Every parameter's full shape by its name, in the model's order."""


def init_optimizer_state(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Create AdamW's state for parameters that have not been updated yet, as its first step would."""
    for parameter in parameters:
        # torch creates this state in the first step. A run may be saved, and must be restored, before its first step.
        if optimizer.state[parameter]:
            continue
        # torch 2.13: a fused optimizer counts steps on the parameter's device, any other on the CPU.
        device = parameter.device if optimizer.defaults.get("fused") else "cpu"
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }


def write_state(
    folder: Path, shapes: Shapes, gather: Callable[[str, str], Tensor], *, step: int, rank: int, world_size: int
) -> None:
    """Write this rank's files of the state; rank 0 writes `state.json` too.

    Args:
        folder: made if it does not exist.
        shapes: the shapes of the trained parameters.
        gather: returns a parameter's full tensor of a kind in `KINDS`, given the kind and the parameter's name. Called
            on every rank for every tensor in the same order, so that it can be a collective. No rank ever holds more
            than one file's tensors and one more.
        step: Adam's step count.
        rank: this worker's rank.
        world_size: number of workers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files_by_rank = _assign_files(shapes, world_size)
    own_files = files_by_rank[rank]
    file_of = _file_of_each_key(own_files)
    collected: dict[str, dict[str, Tensor]] = {file: {} for file in own_files}
    for name in shapes:
        for kind in KINDS:
            key = f"{kind}/{name}"
            # Also for tensors of other ranks' files, since gathering can be a collective.
            tensor = gather(kind, name).detach()
            if key not in file_of:
                continue
            file = file_of[key]
            # Copied to the CPU, so that the GPU holds one full tensor at a time.
            collected[file][key] = tensor.float().cpu().contiguous()
            if len(collected[file]) == len(own_files[file]):
                tensors = collected.pop(file)
                checksums = {key: _checksum(tensor) for key, tensor in tensors.items()}
                save_file(tensors, folder / file, checksums)
    if rank == 0:
        _write_contents(folder, shapes, files_by_rank, step)


class StoredState:
    """A training state on disk, of the right model.

    Args:
        folder: the folder that `write_state` wrote, or a copy of it.
        shapes: the shapes of the model's trained parameters.
        url: where the state is stored, for messages.
    Raises:
        CorruptState: naming the file in the folder that is missing or corrupt.
        UserError: naming it, if it is of another model or version.
    """

    def __init__(self, folder: Path, shapes: Shapes, url: str) -> None:
        self.folder = folder
        self.url = url
        path = folder / STATE_FILE
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise UserError(
                    f"{url}/{STATE_FILE}: training state of format {content['format']}, expected {_FORMAT}: "
                    f"another version of this program wrote it; resume with that one"
                )
            self.step = int(content["adam_step"])
            self.files: dict[str, list[str]] = content["files"]
            self._file_of = _file_of_each_key(self.files)
            _check_shapes(content["shapes"], shapes, url)
            for name in shapes:
                for kind in KINDS:
                    _ = self._file_of[f"{kind}/{name}"]
        except FileNotFoundError:
            raise self._corrupt(STATE_FILE, "missing") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._corrupt(STATE_FILE, f"corrupt ({error})") from None
        self.shapes = shapes

    def verify(self, *, rank: int, readers: int) -> None:
        """Check the checksums of every `readers`-th file, beginning with `rank`: all readers together check all files.

        Raises:
            CorruptState: naming the file that is missing or corrupt.
        """
        for file in list(self.files)[rank::readers]:
            with self._opened(file) as tensors:
                checksums = tensors.metadata() or {}
                for key in self.files[file]:
                    if _checksum(tensors.get_tensor(key)) != checksums.get(key):
                        raise self._corrupt(file, f"corrupt ({key} does not match its checksum)")

    def read(self, kind: str, name: str) -> Tensor:
        """A parameter's full tensor, fp32."""
        return self.read_flat(kind, name, 0, math.prod(self.shapes[name])).view(tuple(self.shapes[name]))

    def read_flat(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a parameter's flattened tensor, fp32. Only the rows that hold them are read."""
        if start == stop:
            return torch.zeros(0)
        key = f"{kind}/{name}"
        shape = self.shapes[name]
        row_size = math.prod(shape[1:])
        first_row, last_row = start // row_size, math.ceil(stop / row_size)
        with self._opened(self._file_of[key]) as tensors:
            # A scalar has no rows to slice.
            rows: Tensor = tensors.get_slice(key)[first_row:last_row] if shape else tensors.get_tensor(key)
        offset = first_row * row_size
        return rows.flatten()[start - offset : stop - offset]

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        path = self.folder / file
        try:
            # safetensors 0.8 says of any file that it cannot open that there is none.
            with open(path, "rb"):
                pass
            with safe_open(path, framework="pt") as tensors:
                yield tensors
        except FileNotFoundError:
            raise self._corrupt(file, "missing") from None
        except SafetensorError as error:
            raise self._corrupt(file, f"corrupt ({error_text(error)})") from None

    def _corrupt(self, file: str, what: str) -> CorruptState:
        return CorruptState(f"{self.url}/{file}: {what}")


def _assign_files(shapes: Shapes, world_size: int) -> list[dict[str, list[str]]]:
    """For each rank its files, and for each file the keys of its tensors.

    Each parameter goes to the rank that has the fewest bytes so far, and there to its last file, or to a new one if it
    does not fit.
    """
    files_by_rank: list[dict[str, list[str]]] = [{} for _ in range(world_size)]
    rank_bytes = [0] * world_size
    free_bytes = [0] * world_size  # in each rank's last file
    for name, shape in shapes.items():
        # Depends on shapes and world_size only, so every rank computes the same plan without communication.
        rank = rank_bytes.index(min(rank_bytes))
        files = files_by_rank[rank]
        size = _VALUE_BYTES * math.prod(shape)
        for kind in KINDS:
            if not files or free_bytes[rank] < size:
                files[f"state-{rank:05d}-of-{world_size:05d}-{len(files):03d}.safetensors"] = []
                free_bytes[rank] = _FILE_BYTES
            last_file = list(files)[-1]
            files[last_file].append(f"{kind}/{name}")
            free_bytes[rank] -= size
            rank_bytes[rank] += size
    return files_by_rank


def _file_of_each_key(files: Mapping[str, Sequence[str]]) -> dict[str, str]:
    file_of: dict[str, str] = {}
    for file, keys in files.items():
        for key in keys:
            file_of[key] = file
    return file_of


def _write_contents(folder: Path, shapes: Shapes, files_by_rank: list[dict[str, list[str]]], step: int) -> None:
    """Write `state.json`."""
    files: dict[str, list[str]] = {}
    for own_files in files_by_rank:
        files |= own_files
    contents = {
        "format": _FORMAT,
        "adam_step": step,
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "files": files,
    }
    (folder / STATE_FILE).write_text(json.dumps(contents, indent=1) + "\n")


def _check_shapes(stored: Mapping[str, Sequence[int]], shapes: Shapes, url: str) -> None:
    """Check that the stored parameters have the shapes of the model.

    Raises:
        UserError: naming the first parameter that differs; the model's own come first.
    """
    for name in {**shapes, **stored}:
        in_state, in_model = _describe(stored, name), _describe(shapes, name)
        if in_state != in_model:
            raise UserError(
                f"{url}/{STATE_FILE}: the state of another model ({name}: {in_state}; this model: {in_model})"
            )


def _describe(shapes: Mapping[str, Sequence[int]], name: str) -> str:
    if name not in shapes:
        return "no such parameter"
    return str(list(shapes[name]))


def _checksum(tensor: Tensor) -> str:
    # CRC-32 detects damage, which is all that this is for; a cryptographic hash would take longer.
    values: Any = tensor.flatten().numpy()
    return f"{zlib.crc32(values):08x}"
