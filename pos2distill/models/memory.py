"""Recognizes that a device has too little memory."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory is full: for torch's allocator, or for CUDA itself, which has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
