"""Prompts put together from parts that were tokenised once, against the tokenizer's own ids of the whole chat."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pos2distill.records import Document, Example
from pos2distill.tasks import prompts
from pos2distill.tasks.permutations import arrange
from pos2distill.tasks.prompts import JointParts, PromptBuilder, cuts_at_numbers
from tests.conftest import CHAT_TEMPLATE, SPECIALS

DOCUMENTS = 12

# The expressions that the tokenizers of GPT-4, Llama 3 and Qwen split texts with.
SHORT_NUMBERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = SHORT_NUMBERS.replace(r"\p{N}{1,3}", r"\p{N}")

# What surrounds a number in a prompt, and much that could be mistaken for it.
TEXT = "Document [3](Title: A12) It's 1984 [4] or [17](. \n\n  Ünïcode 中文 e\u0301 'll 🙂 Document [12]  \n42]"


def byte_level(pattern: str | None, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    return train(tokenizer, TEXT)


def sentence_piece(text: str) -> Tokenizer:
    """As Llama 2 and Mistral have it: no pre-tokenizer that splits, a space in front of every text, single digits."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    return train(tokenizer, text)


def train(tokenizer: Tokenizer, text: str) -> Tokenizer:
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=list(SPECIALS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text] * 3, trainer)
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(None),
    "llama3": lambda: byte_level(SHORT_NUMBERS),
    "qwen": lambda: byte_level(DIGITS, normalizers.NFC()),
    "llama2": lambda: sentence_piece("Document It is Title: Ünïcode 'll \n or . ( ) Document is Title"),
}


def chat_tokenizer(tokenizer: Tokenizer, template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        chat_template=template,
        additional_special_tokens=["<s>", "<|user|>", "<|assistant|>"],
    )


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return chat_tokenizer(FAMILIES[request.param]())


def whole(builder: PromptBuilder, example: Example, slot: int) -> list[int]:
    """The ids of the chat as the tokenizer itself gives them."""
    shown = arrange(example, len(example.documents), (slot,))
    text = "".join(prompts._STYLES[builder.style](example.question, shown))
    message = [{"role": "user", "content": text}]
    encoded = builder.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def forget(builder: PromptBuilder) -> None:
    assert builder.joint
    builder.joint.known.clear()


texts = st.lists(st.sampled_from([*TEXT.split(" "), " ", "\n", "[1](", "1]"]) | st.text(max_size=4), max_size=12)
words = texts.map(" ".join)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Twelve documents, three of them of any text."""
    shown = [Document(f"Title {number}", "Text") for number in range(DOCUMENTS)]
    shown[0] = Document(draw(words), draw(words), 0)
    shown[4], shown[11] = (Document(draw(words), draw(words)) for _ in range(2))
    return Example("fox", draw(words), ("42",), tuple(shown))


@given(example=examples(), style=st.sampled_from(["qa", "coc", "reasoning"]), slot=st.integers(0, DOCUMENTS - 1))
@settings(max_examples=25)
def test_the_ids_are_those_of_the_whole_chat(
    tokenizer: PreTrainedTokenizerFast, example: Example, style: Any, slot: int
) -> None:
    builder = PromptBuilder(tokenizer, style, max_length=10**6, reserve=0)
    assert builder.joint
    expected = {other: whole(builder, example, other) for other in (slot, 0, 11)}
    for other, ids in expected.items():
        assert builder(example, DOCUMENTS, (other,)).tolist() == ids
    built = (slot,), np.asarray(expected[slot], np.int32)
    for other, ids in expected.items():
        forget(builder)
        assert builder(example, DOCUMENTS, (other,), built=built).tolist() == ids


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were tokenised."""
    texts: list[str] = []
    encode = JointParts._encode
    monkeypatch.setattr(JointParts, "_encode", lambda joint, new: texts.extend(new) or encode(joint, new))
    return texts


NUMBERED = Example(
    "fox",
    "Which?",
    ("42",),
    tuple(Document(f"Title {n}", "Text [sic]", 0 if n == 0 else None) for n in range(DOCUMENTS)),
)


def test_a_document_is_tokenised_once(tokenizer: PreTrainedTokenizerFast, seen: list[str]) -> None:
    """Over all twelve slots: a document once, and once more if it stands both last and elsewhere."""
    builder = PromptBuilder(tokenizer, "qa", max_length=10**6, reserve=0)
    seen.clear()
    for slot in range(DOCUMENTS):
        builder(NUMBERED, DOCUMENTS, (slot,))
    assert len([text for text in seen if "(Title: " in text]) == 12 + 2
    assert len(seen) == 1 + 12 + 12 + 2  # the beginning, numbers, documents


def test_a_prompt_that_was_built_shows_its_documents(tokenizer: PreTrainedTokenizerFast, seen: list[str]) -> None:
    builder = PromptBuilder(tokenizer, "coc", max_length=10**6, reserve=0)
    built = (0,), builder(NUMBERED, DOCUMENTS, (0,))
    forget(builder)
    seen.clear()
    for slot in range(1, DOCUMENTS - 1):
        builder(NUMBERED, DOCUMENTS, (slot,), built=built)
    assert [text for text in seen if "Title" in text] == []
    builder(NUMBERED, DOCUMENTS, (DOCUMENTS - 1,), built=built)
    assert len([text for text in seen if "Title" in text]) == 2


def test_a_bracket_in_a_document_is_not_taken_for_a_number(tokenizer: PreTrainedTokenizerFast) -> None:
    builder = PromptBuilder(tokenizer, "qa", max_length=10**6, reserve=0)
    for text in ("As told [1](elsewhere", "a [", "[[1]", "[sic] or [99]", "[2] [1]", "[ ] []"):
        example = replace(NUMBERED, documents=(Document("T", text, 0), *NUMBERED.documents[1:]))
        built = (0,), np.asarray(whole(builder, example, 0), np.int32)
        forget(builder)
        assert builder(example, DOCUMENTS, (5,), built=built).tolist() == whole(builder, example, 5)


@pytest.mark.parametrize("joined", ["[3", "4]", "17]", "[5]"])
def test_a_token_over_a_cut_is_found(joined: str) -> None:
    assert not cuts_at_numbers(chat_tokenizer(sentence_piece(f"a{joined} b{joined}")))


def test_tokens_that_only_look_like_it_do_no_harm() -> None:
    tokenizer = chat_tokenizer(byte_level(None))
    tokenizer.add_tokens(["[control_8]", "<|reserved_7|>", "](", "[INST]"], special_tokens=True)
    assert cuts_at_numbers(tokenizer)


def test_other_tokenizers_are_given_whole_texts() -> None:
    """Of words, of single letters, and with an end to every word; and a chat template that changes what it shows."""
    by_word = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    by_piece = Tokenizer(models.Unigram([("<pad>", 0.0), ("a", -1.0)], unk_id=0))
    ended = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<pad>"))
    ended.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIALS), end_of_word_suffix="</w>")
    ended.train_from_iterator(["Document It is Title: A list : ( ) [ ] 1 2 3 b a"], trainer)
    for each in (by_word, by_piece, ended):
        assert not cuts_at_numbers(chat_tokenizer(each))


def test_a_template_that_changes_the_message_is_given_whole_texts() -> None:
    tokenizer = chat_tokenizer(byte_level(None), CHAT_TEMPLATE.replace("m['content']", "m['content'] | upper"))
    builder = PromptBuilder(tokenizer, "qa", max_length=10**6, reserve=0)
    example = Example("fox", "Which?", ("42",), (Document("A", "b", 0), Document("C", "d")))
    ids = builder(example, 2, (1,))
    assert ids.tolist() == whole(builder, example, 1)
    assert "DOCUMENT [2](TITLE: A) B" in tokenizer.decode(ids)
    assert np.asarray(ids).dtype == np.int32
