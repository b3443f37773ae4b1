"""Check a model before a run starts: its weights (files, names, shapes, types, values), and that it can be trained.

transformers 5.19 initializes a missing tensor at random and only logs it, so an incomplete model would be measured
as if it were whole.
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from pos2distill.config import ModelSection
from pos2distill.errors import UserError, warn
from pos2distill.literal_paths import last_part
from pos2distill.models.architecture import (
    attention_errors,
    context_length,
    empty_model,
    load_config,
    resolve_attention,
    torch_dtype,
    weight_dtypes,
)
from pos2distill.models.attention import PACKED, register_kernels
from pos2distill.models.files import is_hub_name, local_folder
from pos2distill.models.stored_tensors import DTYPES, StoredTensor, read_headers
from pos2distill.models.trainable import (
    is_quantized,
    reject_quantized,
    reject_soft_caps,
    reject_unpackable,
    require_trainable_family,
)
from pos2distill.urls import open_url

# Up to this many bytes, all values are read; of a larger model, a sample of this size. Less is read over a network.
MAX_VALUE_BYTES = 2 << 30
MAX_VALUE_BYTES_OF_URL = 256 << 20

_READ_BYTES = 64 << 20  # held in memory at a time
_BLOCK_BYTES = 4 << 20  # size of one read
_MIN_SAMPLE_BYTES = 64 << 10  # minimum for one tensor

# IEEE 754: the bits of positive infinity. With the sign bit cleared, larger bits are NaN and smaller ones finite.
_INFINITY: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}


def check_weights(model: ModelSection) -> None:
    """Check that a model folder holds exactly the weights that its config.json describes, all of them finite.

    Names, shapes and types come from the safetensors headers. transformers' own loader compares them with the model
    on the meta device, so that tied weights, keys that a model ignores and tensors that it renames or merges (experts)
    count as they do when the model is loaded. Tensors that the model does not have are a warning on stderr. Tied
    weights that are both stored must be equal.

    Up to `MAX_VALUE_BYTES` (2 GiB) of floating-point weights, every value is read. Of a larger model, evenly spaced
    blocks of every tensor are read, together about that many bytes; of a URL, 256 MiB. So a tensor that is NaN
    throughout is always found, a few NaN values in a large model perhaps not.

    Of a quantized model (`quantization_config`) only files and values are checked. A hub name is not checked: its files
    are downloaded when the model is first loaded, and checked then (`downloaded.checked_folder`).

    Raises:
        UserError: naming the file and the tensor, what was expected and what came.
    """
    if is_hub_name(model.path):
        return
    fs, root = open_url(model.path, "model.path")
    tensors = read_headers(fs, root, model.path)
    limit = MAX_VALUE_BYTES_OF_URL if "://" in model.path else MAX_VALUE_BYTES
    with _config_folder(model) as folder:
        _check(fs, root, tensors, model, folder, limit)


def check_weights_in(folder: str, model: ModelSection) -> None:
    """`check_weights` of a model whose files are in a folder of this machine; messages name `model.path`."""
    fs = LocalFileSystem()
    tensors = read_headers(fs, folder, model.path)
    _check(fs, folder, tensors, model, folder, MAX_VALUE_BYTES)


def check_trainable(model: ModelSection, *, on_gpu: bool, gradient_checkpointing: bool = False) -> None:
    """Check that a model can be trained, from its config: that `load_model` will load it with `packed=True`.

    Of a hub name, its config is downloaded if it is not in the cache, without the weights.

    Args:
        on_gpu: whether it will be loaded on GPUs. Which attention these can compute is known only on them.
        gradient_checkpointing: whether it will be trained with `runtime.trainers.gradient_checkpointing`.
    Raises:
        UserError: with the family, or the settings, that cannot be trained.
    """
    with _config_folder(model) as folder:
        config = load_config(model, folder=folder)
        require_trainable_family(config, model.path)
        reject_quantized(config, model.path)
        attention = resolve_attention(model.attention, torch_dtype(model.dtype), torch.device("cpu"))
        if on_gpu or attention == "flash_attention_2":
            lm = empty_model(model, folder=folder)
        else:
            register_kernels()
            with attention_errors(model, attention):
                lm = empty_model(model, folder=folder, attention=PACKED[attention])
            reject_soft_caps(config, attention, model_name=model.path)
        reject_unpackable(lm, context=context_length(model, folder=folder), model_name=model.path)
        if gradient_checkpointing and not lm.supports_gradient_checkpointing:
            raise UserError(
                f"{model.path}: models of the family {config.model_type} are trained without gradient checkpointing; "
                f"set runtime.trainers.gradient_checkpointing=false"
            )


def check_engine_attention(model: ModelSection, *, on_gpu: bool) -> None:
    """Check that the engine `hf` computes all of a model's attention, from its config.

    Args:
        on_gpu: whether it runs on GPUs. Which implementation `auto` is there is known only on them.
    Raises:
        UserError: naming the implementations that compute all of it.
    """
    if on_gpu and model.attention == "auto":
        return
    attention = resolve_attention(model.attention, torch_dtype(model.dtype), torch.device("cpu"))
    reject_soft_caps(load_config(model), attention, model_name=model.path)


def check_sharded(model: ModelSection) -> None:
    """Check that ZeRO-3 can train a model in `model.dtype`: it holds all parameters in one type.

    Raises:
        UserError: naming the first parameter that transformers keeps in another one.
    """
    with _config_folder(model) as folder:
        dtypes = weight_dtypes(model, folder=folder)
        for name, _ in empty_model(model, folder=folder).named_parameters():
            if dtypes[name] != torch_dtype(model.dtype):
                raise UserError(
                    f"training.precision: {model.dtype}, but {model.path} has {name} in float32, which "
                    f"runtime.trainers.strategy zero3 would round; set training.precision to float32, or strategy to "
                    f"torch"
                )


@contextmanager
def _config_folder(model: ModelSection) -> Iterator[str]:
    """A local folder with the model's config; of a URL, a temporary one that holds no weights."""
    if "://" not in model.path:
        yield local_folder(model, weights=False)
        return
    fs, root = open_url(model.path, "model.path")
    with tempfile.TemporaryDirectory() as folder:
        for file in fs.ls(root, detail=False):
            # `.py`: a model with trust_remote_code has its classes in its own folder.
            if file.endswith((".json", ".py")):
                fs.get_file(file, str(Path(folder) / last_part(file)))
        yield folder


def _check(
    fs: AbstractFileSystem, root: str, tensors: dict[str, StoredTensor], model: ModelSection, folder: str, limit: int
) -> None:
    """Check the tensors in `root`: their headers by the config in `folder`, unless the model is quantized, and values.

    Args:
        limit: bytes of values that are read.
    """
    if not is_quantized(load_config(model, folder=folder)):
        described = empty_model(model, folder=folder)
        _compare(tensors, described, model, folder)
        _check_tied(fs, root, tensors, described, model.path, limit)
    _check_values(fs, root, model.path, list(tensors.values()), limit)


def _compare(tensors: dict[str, StoredTensor], described: PreTrainedModel, model: ModelSection, folder: str) -> None:
    """Compare the stored tensors with the model that the config in `folder` describes."""
    model_name = model.path
    expected = described.state_dict()
    architecture = type(described).__name__
    for name, stored in tensors.items():
        parameter = expected.get(name)
        if parameter is not None and parameter.is_floating_point() and stored.dtype not in DTYPES:
            raise UserError(
                f"{model_name}/{stored.file}: tensor {name} is stored as {stored.dtype}, expected a floating-point "
                f"type; a quantized model must say so in config.json (quantization_config)"
            )
    # Shapes before names: a config of another size lacks layers too, and its shapes say more.
    missing, extra, mismatched = _load_on_meta(type(described), tensors, model, folder)
    # Before the single errors: if no tensor belongs to the model, each of them is only a symptom.
    if tensors and len(extra) >= len(tensors):
        raise UserError(
            f"{model_name}: none of its {len(tensors)} tensors (first {min(tensors)}) belongs to the {architecture} "
            f"that config.json describes; the weights and config.json are of different models"
        )
    if mismatched:
        name, stored_shape, shape = mismatched[0]
        file, cause = "", "some of the tensors that are merged into it are missing, or config.json is of another model"
        if name in tensors:
            file, cause = f"/{tensors[name].file}", "the weights and config.json are of different models"
        raise UserError(
            f"{model_name}{file}: tensor {name} has shape {list(stored_shape)}, config.json describes {list(shape)} "
            f"({_count(mismatched)}); {cause}"
        )
    if missing:
        raise UserError(
            f"{model_name}: tensor {missing[0]} of shape {list(expected[missing[0]].shape)} is missing "
            f"({_count(missing)} of {len(expected)}); copy the whole model, or correct config.json"
        )
    if extra:
        warn(
            f"{model_name}: {_count(extra)} (first {extra[0]}) not part of the {architecture} that config.json "
            f"describes, ignored"
        )


def _load_on_meta(
    architecture: type[PreTrainedModel], tensors: dict[str, StoredTensor], model: ModelSection, folder: str
) -> tuple[list[str], list[str], list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """Load tensors without values.

    Returns: sorted names of the model's tensors that are missing; of stored tensors that the model does not have; and
        name, stored shape and described shape where the two differ.
    """
    state: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        # A tensor on the meta device has a shape but no memory, so a model of any size can be compared.
        state[name] = torch.empty(stored.shape, dtype=DTYPES.get(stored.dtype, torch.uint8), device="meta")
    try:
        with _quiet_transformers():
            loaded: Any = architecture.from_pretrained(
                None,
                config=load_config(model, folder=folder),
                state_dict=state,
                device_map={"": "meta"},
                dtype=torch_dtype(model.dtype),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RuntimeError:  # transformers logs which conversion failed, but only as a table for a terminal
        raise UserError(
            f"{model.path}: tensors that a {architecture.__name__} holds as one (experts) are incomplete or of "
            f"different shapes; copy the whole model, or correct config.json"
        ) from None
    info: dict[str, Any] = loaded[1]
    return sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), sorted(info["mismatched_keys"])


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without transformers' own table of missing tensors and its progress bar."""
    verbosity, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()


def _check_tied(
    fs: AbstractFileSystem,
    root: str,
    tensors: dict[str, StoredTensor],
    described: PreTrainedModel,
    model_name: str,
    limit: int,
) -> None:
    """Reject two different tensors that the config makes one: programs differ in which of them they use."""
    tied: dict[str, str] = described.all_tied_weights_keys
    for target, source in tied.items():
        head, embeddings = tensors.get(target), tensors.get(source)
        if head and embeddings and not _are_equal(fs, root, head, embeddings, limit):
            raise UserError(
                f"{model_name}: {target} and {source} are stored with different values, but config.json ties them; set "
                f"tie_word_embeddings to false in config.json to use both"
            )


def _are_equal(fs: AbstractFileSystem, root: str, one: StoredTensor, other: StoredTensor, limit: int) -> bool:
    """Whether two tensors have the same values, in a sample of `limit` bytes if they are larger."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    fraction = min(1.0, limit / max(1, 2 * (one.end - one.start)))
    for (start, end), (other_start, other_end) in zip(
        blocks_to_read(one, fraction), blocks_to_read(other, fraction), strict=True
    ):
        paths = [f"{root}/{one.file}", f"{root}/{other.file}"]
        values, other_values = fs.cat_ranges(paths, [start, other_start], [end, other_end], on_error="raise")
        if values != other_values:
            return False
    return True


def _check_values(fs: AbstractFileSystem, root: str, model_name: str, tensors: list[StoredTensor], limit: int) -> None:
    """Read the values, or a sample of `limit` bytes, and reject NaN and infinity."""
    floating = [tensor for tensor in tensors if tensor.dtype in _INFINITY]
    total = sum(tensor.end - tensor.start for tensor in floating)
    # A quantized model may have no floating-point tensor, hence `max`.
    fraction = min(1.0, limit / max(1, total))
    batch: list[tuple[StoredTensor, int, int]] = []
    batch_bytes = 0
    for tensor in floating:
        for start, end in blocks_to_read(tensor, fraction):
            batch.append((tensor, start, end))
            batch_bytes += end - start
            if batch_bytes >= _READ_BYTES:
                _check_batch(fs, root, model_name, batch)
                batch, batch_bytes = [], 0
    _check_batch(fs, root, model_name, batch)


def blocks_to_read(tensor: StoredTensor, fraction: float) -> Iterator[tuple[int, int]]:
    """The parts of a tensor to read, as bytes of its file: all of it, or evenly spaced blocks from first to last."""
    size = tensor.end - tensor.start
    if not size:
        return
    itemsize = DTYPES[tensor.dtype].itemsize
    # A minimum for each tensor, so that small ones are read whole also in a very large model.
    sample = max(_MIN_SAMPLE_BYTES, math.ceil(size * fraction))
    # Rounded up to whole values; the other two limits are multiples of every value's size.
    whole_values = math.ceil(sample / itemsize) * itemsize
    block = min(size, _BLOCK_BYTES, whole_values)
    count = math.ceil(min(size, sample) / block)
    for number in range(count):
        # From 0 to size - block; where count blocks cover the tensor, none leaves a gap.
        offset = (size - block) * number // max(1, count - 1)
        # A block that starts inside a value would be read as other numbers.
        offset -= offset % itemsize
        yield tensor.start + offset, tensor.start + offset + block


def _check_batch(
    fs: AbstractFileSystem, root: str, model_name: str, batch: list[tuple[StoredTensor, int, int]]
) -> None:
    paths, starts, ends = [], [], []
    for tensor, start, end in batch:
        paths.append(f"{root}/{tensor.file}")
        starts.append(start)
        ends.append(end)
    # Object stores answer the ranges of one call in parallel.
    for (tensor, _, _), read in zip(batch, fs.cat_ranges(paths, starts, ends, on_error="raise"), strict=True):
        # numpy on the bits copies nothing and takes one thread; torch's threads wait for each other on a busy machine.
        unsigned, infinity = _INFINITY[tensor.dtype]
        bits = np.frombuffer(read, unsigned)
        without_sign = unsigned((1 << (8 * bits.itemsize - 1)) - 1)
        highest = int((bits & without_sign).max())
        if highest >= infinity:
            found = "infinite values" if highest == infinity else "NaN"
            raise UserError(
                f"{model_name}/{tensor.file}: tensor {tensor.name} holds {found}, expected finite weights; "
                f"the training that wrote it diverged or the file is corrupt: take another checkpoint"
            )


def _count(names: list[Any]) -> str:
    plural = "" if len(names) == 1 else "s"
    return f"{len(names)} tensor{plural}"
