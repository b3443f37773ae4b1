"""How examples are cut into blocks. One task of a stateless operator processes one block."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pos2distill.config import PoolSection

_BLOCKS_PER_ACTOR = 64


def index_blocks(index_N: npt.NDArray[np.integer[Any]], size: int) -> list[pa.Table]:
    """Tables of the column `index` that cut the indices into blocks of `size`."""
    return [pa.table({"index": index_N[start : start + size]}) for start in range(0, len(index_N), size)]


def sampling_blocks(missing_N: npt.NDArray[np.int64], size: int) -> list[pa.Table]:
    """Tables of the column `index` that cut the missing samples at multiples of `size`.

    So a part of the store that is sampled again is exactly the same batch.
    """
    cuts = np.flatnonzero(np.diff(missing_N // size)) + 1
    return [pa.table({"index": block}) for block in np.split(missing_N, cuts) if len(block)]


def batches_of(block: pa.Table, size: int) -> list[pa.Table]:
    """Cut a block into batches: at least one, since an operator's result needs its columns even without rows."""
    return [block.slice(start, size) for start in range(0, max(len(block), 1), size)]


def examples_per_block(examples: int, prompts_per_example: int, pool: PoolSection) -> int:
    """Examples in a block: one to four batches of prompts.

    Responses are stored, and progress is shown, when a whole block is finished. So blocks are small: even the largest
    number of actors of a pool gets many blocks each. Large evaluations get larger blocks, or they would store too many
    parts.
    """
    prompts = examples * prompts_per_example // (_BLOCKS_PER_ACTOR * pool.max)
    prompts = min(max(prompts, pool.batch_size), 4 * pool.batch_size)
    return math.ceil(prompts / prompts_per_example)
