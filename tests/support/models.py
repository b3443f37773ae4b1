"""Sizes of tiny models, and random tokens for them."""

from typing import Any

import numpy as np

from pos2distill.records import Tokens

SMALL: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25}


def draw_tokens(sizes: tuple[int, ...], seed: int) -> list[Tokens]:
    """Random token sequences of these sizes."""
    random = np.random.default_rng(seed)
    return [random.integers(5, 250, size).astype(np.int32) for size in sizes]
