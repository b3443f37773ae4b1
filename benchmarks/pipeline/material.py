"""The input of these benchmarks: a tokenizer of a large model's size, examples as long as those of Natural Questions,
and a recipe."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe

WORDS_PER_DOCUMENT, DOCUMENTS = 100, 20

_VOCABULARY = 32_000
_WORDS = 60_000
_POOL = 5_000  # distinct distractors; no part of the pipeline caches documents, so repetitions save nothing
_SPECIAL_TOKENS = ("<pad>", "<s>", "<|user|>", "<|assistant|>", "<|end|>")
_CHAT_TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path) -> None:
    """Save a byte-level BPE tokenizer of 32,000 tokens and a configuration; no weights, since no model runs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_make_texts(np.random.default_rng(0), _POOL), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        chat_template=_CHAT_TEMPLATE,
        additional_special_tokens=["<s>", "<|user|>", "<|assistant|>"],
    ).save_pretrained(folder)
    LlamaConfig(vocab_size=_VOCABULARY, max_position_embeddings=8192).save_pretrained(folder)


def write_data(path: Path, examples: int) -> None:
    """Write JSON Lines: a question, its answer, a gold document of 100 words that holds it, and 19 distractors."""
    generator = np.random.default_rng(1)
    texts = _make_texts(generator, _POOL)
    with path.open("w") as file:
        for number in range(examples):
            gold_text = f"The code of owl {number} is {number:06d}. {texts[number % _POOL]}"
            documents = [_document(f"Owl {number}", gold_text, gold=True)]
            for index in generator.choice(_POOL, DOCUMENTS - 1, replace=False):
                documents.append(_document(f"Fox {number} {index}", texts[index], gold=False))
            record = {
                "id": f"owl-{number}",
                "question": f"Which code has owl {number}?",
                "answers": [f"{number:06d}"],
                "documents": documents,
            }
            file.write(json.dumps(record) + "\n")


def load(material: Path, storage: str, examples: int) -> Recipe:
    """R1 over 20 documents with an engine that answers 50 tokens without delay; every answer is kept."""
    overrides = [
        f"runtime.storage={storage}",
        "runtime.fake.reply_tokens=50",
        "runtime.samplers.concurrent_batches=4",  # as in the recipes for GPUs
        f"model.path={material}/model",
        "model.engine=fake",
        f"data.path={material}/data.jsonl",
        f"data.documents={DOCUMENTS}",
        f"data.train_examples={examples}",
        f"data.train_candidates={examples}",
        "data.eval_examples=2",
        "data.eval_fraction=0.01",
        "data.prompt=qa",
        "sampling.max_new_tokens=100",
        "sampling.keep=all",
        "method.advantageous_slot=first",
        "method.teacher=resident",  # so that the teacher, which is a model, does not run while sampling
        "training.epochs=1",
        "evaluation.other_documents=[]",
    ]
    return load_recipe("quickstart", overrides)


def _document(title: str, text: str, *, gold: bool) -> dict[str, Any]:
    return {"title": title, "text": text, "gold": gold}


def _make_texts(generator: np.random.Generator, count: int) -> list[str]:
    """Sentences of made-up words: frequencies follow Zipf's law and frequent words are short, as in a language."""
    words = _make_words()
    frequency = 1 / np.arange(10, 10 + len(words))
    drawn = generator.choice(len(words), (count, WORDS_PER_DOCUMENT), p=frequency / frequency.sum())
    texts = []
    for word_indices in drawn:
        sentences = []
        for sentence in words[word_indices].reshape(-1, 10):
            sentences.append(" ".join(sentence).capitalize() + ".")
        texts.append(" ".join(sentences))
    return texts


def _make_words() -> npt.NDArray[np.str_]:
    """Distinct words of one to three syllables, the shortest first."""
    generator = np.random.default_rng(2)
    parts = product("bcdfghklmnprstvw", "aeiou", ("", "n", "r", "s", "t", "l"))
    syllables = np.array(["".join(letters) for letters in parts])
    drawn = syllables[generator.integers(len(syllables), size=(_WORDS, 3))]
    words = set()
    for row, length in zip(drawn, generator.integers(1, 4, _WORDS), strict=True):
        words.add("".join(row[:length]))
    return np.array(sorted(words, key=lambda word: (len(word), word)))
