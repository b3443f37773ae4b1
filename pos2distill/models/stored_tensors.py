"""Tensors as the headers of a model's safetensors files describe them."""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from fsspec import AbstractFileSystem

from pos2distill.errors import UserError
from pos2distill.literal_paths import last_part, list_matching
from pos2distill.models.files import INDEX, SINGLE_FILE

# Types that safetensors 0.8 writes. The others are not floating-point types that a model is loaded from.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the header of its safetensors file describes it.

    `start` and `end` are its bytes in the file.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_headers(fs: AbstractFileSystem, root: str, model_name: str) -> dict[str, StoredTensor]:
    """All tensors of a model, by name."""
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(fs, root, model_name):
        for tensor in _read_header(fs, f"{root}/{file}", f"{model_name}/{file}"):
            tensors[tensor.name] = tensor
    return tensors


def _weight_files(fs: AbstractFileSystem, root: str, model_name: str) -> list[str]:
    """The files that transformers loads: model.safetensors, else those that the index names."""
    has_index = fs.exists(f"{root}/{INDEX}")
    if fs.exists(f"{root}/{SINGLE_FILE}"):
        # Then transformers 5.19 reads the single file, and vLLM 0.32 those that the index names.
        if has_index and _indexed_files(fs, root, model_name) != [SINGLE_FILE]:
            raise UserError(
                f"{model_name}: holds {SINGLE_FILE} and {INDEX}, which names other files, so it may hold two models; "
                f"remove one of the two"
            )
        return [SINGLE_FILE]
    if not has_index:
        if not fs.exists(root):
            raise UserError(f"{model_name}: no such model folder (model.path)")
        if list_matching(fs, root, "*.safetensors"):
            raise UserError(
                f"{model_name}: expected {SINGLE_FILE} or {INDEX}, found neither; copy the missing file too"
            )
        raise UserError(
            f"{model_name}: holds no weights in safetensors format; a model in another format is converted by loading "
            f"it in transformers and save_pretrained"
        )
    files = _indexed_files(fs, root, model_name)
    for file in files:
        if not fs.exists(f"{root}/{file}"):
            raise UserError(
                f"{model_name}/{INDEX}: names {file}, which is not in the folder; copy or download it again"
            )
    return files


def read_weight_map(fs: AbstractFileSystem, root: str, model_name: str) -> dict[str, str]:
    """The file of each tensor, from the index of the weights.

    Raises:
        UserError: the index is not valid.
    """
    try:
        weight_map = json.loads(fs.cat_file(f"{root}/{INDEX}"))["weight_map"]
        files = weight_map.values()
        if all(isinstance(file, str) for file in files):
            return dict(weight_map)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{model_name}/{INDEX}: expected JSON with a weight_map of tensors to files")


def _indexed_files(fs: AbstractFileSystem, root: str, model_name: str) -> list[str]:
    """The files that the index of the weights names."""
    return sorted(set(read_weight_map(fs, root, model_name).values()))


def _read_header(fs: AbstractFileSystem, path: str, file_name: str) -> list[StoredTensor]:
    """The tensors of a safetensors file: 8 bytes with the length of a JSON header, the header, the values."""
    size = fs.size(path)
    start = fs.cat_file(path, start=0, end=min(size, 1024))
    # A clone made without git-lfs has small text files in place of the weights.
    if start.startswith(b"version ") and b"git-lfs" in start:
        raise UserError(
            f"{file_name}: is a git-lfs pointer of {size} bytes, not the weights; "
            f"run `git lfs pull` in the model folder"
        )
    length = int.from_bytes(start[:8], "little")
    # A plausible length that exceeds the file: the file was cut off inside its header.
    if 8 <= size < 8 + length <= _MAX_HEADER_BYTES:
        raise UserError(_truncated(file_name, 8 + length, size, "at least "))
    not_safetensors = UserError(f"{file_name}: is not a safetensors file of {size} bytes; copy or download it again")
    if length > _MAX_HEADER_BYTES:
        raise not_safetensors
    try:
        header = json.loads(fs.cat_file(path, start=8, end=8 + length))
        tensors = _parse_header(header, last_part(path), 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise not_safetensors from None
    expected = max((tensor.end for tensor in tensors), default=8 + length)
    if expected != size:
        raise UserError(_truncated(file_name, expected, size))
    return tensors


def _parse_header(header: Any, file: str, values_start: int) -> list[StoredTensor]:
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = DTYPES.get(entry["dtype"])
        if dtype and end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {end - start} bytes for shape {shape} of {dtype}")
        tensors.append(StoredTensor(file, name, entry["dtype"], shape, values_start + start, values_start + end))
    return tensors


def _truncated(file_name: str, expected: int, size: int, bound: str = "") -> str:
    return f"{file_name}: its header describes {bound}{expected} bytes, the file has {size}; copy or download it again"
