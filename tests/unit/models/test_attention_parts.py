from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from pos2distill.models.attention import PACKED, register_kernels
from pos2distill.models.attention_parts import states_and_attention
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.packing import collate
from tests.support.models import HEADS, SMALL, build_model, draw_tokens

CONFIGS = {
    "llama": LlamaConfig(**SMALL, **HEADS),
    "gemma3": Gemma3TextConfig(**SMALL, **HEADS, head_dim=8, sliding_window=6),
    "gpt2": GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_states_and_attention_equal_the_attentions_of_transformers(kind: str, implementation: str) -> None:
    """Two rows, the second with a shared prefix, against each row alone."""
    lm: Any = build_model(CONFIGS[kind])
    first, rest, response, other = draw_tokens((14, 6, 5, 3), seed=3)
    prompts = [first, np.concatenate([first[:9], rest])]
    responses = [response, other]
    parts = [torch.tensor([0] * 4 + [1] * 8 + [2] * 2 + [3] * 5), torch.tensor([2] * 7 + [0] * 5 + [1] * 3 + [3] * 3)]
    batch = collate(prompts, responses, group_ids=[0, 0])
    assert batch.packed.shared_lengths == (0, 9)
    register_kernels()
    lm.set_attn_implementation(PACKED[implementation])
    with torch.inference_mode():
        hidden_TH, sums = states_and_attention(lm, batch, parts, 4)
        # The model is as it was.
        torch.testing.assert_close(hidden_TH, response_hidden_states(lm, batch), atol=0, rtol=0)
        lm.set_attn_implementation("eager")
        for prompt, tokens, part_K, sums_NTP in zip(prompts, responses, parts, sums, strict=True):
            row = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None]
            layers = lm(row, output_attentions=True).attentions
            assert sums_NTP.shape == (2, len(tokens), 4)
            for sums_TP, weights_1HKK in zip(sums_NTP, layers, strict=True):
                mean_TK = weights_1HKK[0].mean(0)[len(prompt) - 1 : -1]
                expected = torch.stack([mean_TK[:, part_K == part].sum(1) for part in range(4)], 1)
                torch.testing.assert_close(sums_TP, expected, atol=1e-6, rtol=0)
            torch.testing.assert_close(sums_NTP.sum(-1), torch.ones(2, len(tokens)), atol=1e-5, rtol=0)
