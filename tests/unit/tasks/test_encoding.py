"""Texts encoded by the faster library, against the tokenizer's own ids."""

import functools
from collections.abc import Callable, Sequence

import fastokens
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pos2distill.records import Tokens
from pos2distill.tasks.encoding import text_encoder
from tests.support.published import PUBLISHED, STAND_INS, DataSet, needs_published, read_lines
from tests.support.tiny import SPECIALS

# The expressions that the tokenizers of GPT-4, Llama 3 and Qwen split texts with.
SHORT_NUMBERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = SHORT_NUMBERS.replace(r"\p{N}{1,3}", r"\p{N}")

TEXT = "Document [3](Title: A12) It's 1984 [4] or [17](. \n\n  Ünïcode 中文 e\u0301 'll 🙂 Document [12]  \n42]"
TEXTS = (TEXT,) * 3


def byte_level(
    pattern: str | None = None, normalizer: normalizers.Normalizer | None = None, texts: Sequence[str] = TEXTS
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    return train(tokenizer, texts, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def sentence_piece(texts: Sequence[str] = TEXTS) -> Tokenizer:
    """As Llama 2 and Mistral have it: no pre-tokenizer that splits, a space in front of every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return train(tokenizer, texts, trainers.BpeTrainer)


def gemma(texts: Sequence[str] = TEXTS) -> Tokenizer:
    """Spaces become letters, and texts are split where they were."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<pad>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    return train(tokenizer, texts, trainers.BpeTrainer, special_tokens=[*SPECIALS, *alphabet])


def unigram(texts: Sequence[str] = TEXTS) -> Tokenizer:
    return train(Tokenizer(models.Unigram()), texts, trainers.UnigramTrainer, unk_token="<pad>", vocab_size=100)


def train(
    tokenizer: Tokenizer, texts: Sequence[str], trainer: Callable[..., trainers.Trainer], **options: object
) -> Tokenizer:
    options = {"vocab_size": 500, "special_tokens": list(SPECIALS), "show_progress": False} | options
    tokenizer.train_from_iterator(texts, trainer(**options))
    return tokenizer


BYTE_LEVEL: dict[str, Callable[..., Tokenizer]] = {
    "gpt2": byte_level,
    "llama3": functools.partial(byte_level, SHORT_NUMBERS),
    "qwen": functools.partial(byte_level, DIGITS, normalizers.NFC()),
    "gemma": gemma,
}
OTHERS: dict[str, Callable[..., Tokenizer]] = {"llama2": sentence_piece, "unigram": unigram}


def chat_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        additional_special_tokens=["<s>", "<|user|>", "<|assistant|>"],
    )


@pytest.fixture(scope="module", params=BYTE_LEVEL | OTHERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return chat_tokenizer((BYTE_LEVEL | OTHERS)[request.param]())


def plain(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def encode(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], Tokens]:
    return text_encoder(tokenizer)


def is_fast(encode: Callable[[str], object]) -> bool:
    return encode.__name__ == "encode_fast"


pieces = st.sampled_from([*TEXT.split(" "), *SPECIALS, " ", "\n", "\t", "\r\n", "</s>"]) | st.text(max_size=6)


@given(text=st.lists(pieces, max_size=20).map(" ".join) | st.lists(pieces, max_size=20).map("".join))
@settings(max_examples=300)
def test_text_encoder_gives_the_tokenizers_ids(
    tokenizer: PreTrainedTokenizerFast, encode: Callable[[str], Tokens], text: str
) -> None:
    ids = encode(text)
    assert ids.tolist() == plain(tokenizer, text)
    assert ids.dtype == np.int32


@pytest.mark.parametrize("family", BYTE_LEVEL)
def test_text_encoder_is_fast_for_common_tokenizers(family: str) -> None:
    assert is_fast(text_encoder(chat_tokenizer(BYTE_LEVEL[family]())))


@pytest.mark.parametrize("family", OTHERS)
def test_text_encoder_falls_back_for_other_tokenizers(family: str) -> None:
    assert not is_fast(text_encoder(chat_tokenizer(OTHERS[family]())))


def test_text_encoder_falls_back_for_random_merges() -> None:
    tokenizer = byte_level()
    tokenizer.model.dropout = 0.1
    assert not is_fast(text_encoder(chat_tokenizer(tokenizer)))


def test_text_encoder_does_not_truncate() -> None:
    """As files do that were saved after training; transformers ignores it."""
    tokenizer = chat_tokenizer(byte_level())
    tokenizer.backend_tokenizer.enable_truncation(4096)
    tokenizer.backend_tokenizer.enable_padding(length=4096)
    encode, text = text_encoder(tokenizer), TEXT * 200
    assert is_fast(encode)
    assert len(encode(text)) > 4096
    assert encode(text).tolist() == plain(tokenizer, text)


@pytest.mark.parametrize("missing", [" ", "Q"], ids=["in the trial", "in a text alone"])
def test_text_encoder_falls_back_for_unknown_bytes(missing: str) -> None:
    alphabet = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter != missing.replace(" ", "Ġ")]
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encode = text_encoder(chat_tokenizer(tokenizer))
    assert encode(f"A{missing}b").tolist() == plain(chat_tokenizer(tokenizer), f"A{missing}b")


def test_text_encoder_falls_back_if_ids_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that splits otherwise than its file says, as a class of its own may."""
    tokenizer, other = chat_tokenizer(byte_level()), fastokens.Tokenizer.from_json_str(byte_level(DIGITS).to_str())
    monkeypatch.setattr(fastokens.Tokenizer, "from_json_str", lambda _: other, raising=False)
    encode = text_encoder(tokenizer)
    assert not is_fast(encode)
    assert encode(TEXT).tolist() == plain(tokenizer, TEXT)


@pytest.mark.parametrize(
    ("data_sets", "every"),
    [
        pytest.param(STAND_INS, 1, id="stand-ins"),
        pytest.param(PUBLISHED, 20, id="published", marks=needs_published),
    ],
)
@pytest.mark.parametrize("family", BYTE_LEVEL)
def test_text_encoder_encodes_published_text_as_the_tokenizer(
    family: str, data_sets: dict[str, DataSet], every: int
) -> None:
    lines = [line for lines in read_lines(data_sets.values()) for line in lines]
    tokenizer = chat_tokenizer(BYTE_LEVEL[family](texts=lines[::every]))
    encode = text_encoder(tokenizer)
    assert is_fast(encode)
    for line in lines[:: min(every, 3)]:
        assert encode(line).tolist() == plain(tokenizer, line)
