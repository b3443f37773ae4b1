"""Recognizes that a device has too little memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pos2distill.errors import UserError


@contextmanager
def model_must_fit(message: str) -> Iterator[None]:
    """While the body loads a model, a GPU that is too small for it is a UserError with this message."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise UserError(message) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory is full: for torch's allocator, or for CUDA itself, which has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
