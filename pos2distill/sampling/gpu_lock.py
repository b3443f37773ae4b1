"""Processes that share a GPU load their models one after the other."""

import contextlib
import os
from contextlib import AbstractContextManager

from pos2distill.scratch import locked, user_folder


def gpu_start_lock(gpus: float) -> AbstractContextManager[None]:
    """Within this context, no other process of this user on the same GPU is in such a context.

    While it starts, vLLM 0.32 derives the memory that it has used from the free memory of the whole GPU: it would count
    what another process loads meanwhile, and fail or keep too little for its cache.

    Args:
        gpus: GPUs of the process. Only a part of one is shared.
    """
    if not 0 < gpus < 1:
        return contextlib.nullcontext()
    # Ray names the one GPU of an actor here. The name of a part of a GPU (MIG) may have slashes.
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").replace("/", "-")
    return locked(user_folder("gpu-starts") / f"{device}.lock")
