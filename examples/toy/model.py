"""The toy's tokenizer and model: a word-level vocabulary and a Llama of half a million parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.toy.task import BOS, END, PAD, SPECIAL_TOKENS, UNKNOWN, VOCABULARY

HIDDEN_SIZE = 128
HEADS = 4
HEAD_SIZE = HIDDEN_SIZE // HEADS
MAX_POSITIONS = 1024
ROPE_THETA = 10_000.0

CHAT_TEMPLATE = (
    "{{ '<s>' }}"
    "{% for m in messages %}"
    "{{ '<|' + m['role'] + '|> ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ ' <|end|>' }}{% endif %}"
    "{{ ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(vocabulary: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word; a token's id is the word's index in the vocabulary.

    Text is split at whitespace, so the model cannot tell a newline from a space.
    """
    words = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece(
        prefix="##", cleanup=False
    )  # no word has the prefix, so words are joined by spaces
    words.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """A new model whose first layer attends to the previous tokens at the start. Sets torch's global seed."""
    bos, end, pad = (VOCABULARY.index(token) for token in (BOS, END, PAD))
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=256,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-6,
        initializer_range=0.05,
        tie_word_embeddings=True,
        attention_bias=True,
        bos_token_id=bos,
        eos_token_id=end,
        pad_token_id=pad,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    _look_back(model, amplitude=6.0)
    return model


@torch.no_grad()
def _look_back(model: LlamaForCausalLM, amplitude: float) -> None:
    """Initialize head h of the first layer to attend to the token h + 1 positions back, for any tokens.

        score(t, s) = sum_j amplitude^2 cos(f_j (t - s - h - 1)) + (a term of the tokens), largest at s = t - h - 1

    RoPE rotates pair j of a query at position t by the angle t f_j, and of a key at position s by s f_j. So a constant
    query bias (amplitude, 0) and the same key bias rotated by (h + 1) f_j give this score. Only the higher half of the
    frequencies is used, since they distinguish neighboring positions. The biases are trained like all weights.
    Without this start the model is slow to discover the previous token, which retrieval requires.
    """
    attention = model.model.layers[0].self_attn
    pairs = HEAD_SIZE // 2
    frequency = ROPE_THETA ** (-torch.arange(pairs) / pairs)
    strength = torch.where(torch.arange(pairs) < pairs // 2, amplitude, 0.0)
    for head in range(HEADS):
        angle = frequency * (head + 1)
        channels = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
        attention.q_proj.bias[channels] = torch.cat([strength, torch.zeros(pairs)])
        attention.k_proj.bias[channels] = torch.cat([strength * angle.cos(), strength * angle.sin()])


def save(model: LlamaForCausalLM, folder: Path, vocabulary: Sequence[str]) -> None:
    """Write a plain Hugging Face folder: bfloat16 safetensors, tokenizer and chat template."""
    model.bfloat16().save_pretrained(folder)
    build_tokenizer(vocabulary).save_pretrained(folder)
