"""Sizes of tiny models, random models and random tokens for them."""

from typing import Any

import numpy as np

from pos2distill.records import Tokens

SMALL: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25}

# Weights so large that positions matter.
POSITIONAL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.25,
}


def draw_tokens(sizes: tuple[int, ...], seed: int) -> list[Tokens]:
    """Random token sequences of these sizes."""
    random = np.random.default_rng(seed)
    return [random.integers(5, 250, size).astype(np.int32) for size in sizes]


def build_model(config: Any) -> Any:
    """A random causal language model in float32, the same for the same config."""
    # Imported here, as most unit tests need no models.
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
