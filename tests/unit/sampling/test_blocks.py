"""Cutting examples into blocks."""

import numpy as np
import pytest

from pos2distill.config import PoolSection
from pos2distill.sampling.blocks import examples_per_block, sampling_blocks


@pytest.mark.parametrize(
    ("examples", "prompts_per_example", "size"),
    [
        (20000, 1, 128),  # four batches
        (2000, 12, 11),  # 132 prompts, the next multiple of twelve
        (6400, 1, 50),  # 64 blocks for each of two actors
        (10, 1, 32),  # not less than a batch
        (10, 12, 3),
        (10, 50, 1),
    ],
)
def test_examples_per_block_are_one_to_four_batches(examples: int, prompts_per_example: int, size: int) -> None:
    assert examples_per_block(examples, prompts_per_example, PoolSection(batch_size=32, max=2)) == size


@pytest.mark.parametrize(
    ("missing", "blocks"),
    [
        ([], []),
        ([0, 1, 2, 3, 4, 5, 6, 7], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([1, 4, 5, 6, 7], [[1], [4, 5, 6, 7]]),  # cut at multiples of the size
        ([0, 1, 2, 3, 4], [[0, 1, 2, 3], [4]]),
    ],
)
def test_sampling_blocks_cut_at_multiples_of_the_size(missing: list[int], blocks: list[list[int]]) -> None:
    tables = sampling_blocks(np.asarray(missing, np.int64), 4)
    assert [table["index"].to_pylist() for table in tables] == blocks
