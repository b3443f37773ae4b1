"""What is measured: a tokenizer as of a large model, examples as long as those of Natural Questions, and a recipe."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe

WORDS_IN_DOCUMENT, DOCUMENTS = 100, 20

_VOCABULARY = 32_000
_WORDS = 60_000
_POOL = 5_000  # distinct distractors; nothing in the pipeline knows a document again
_SPECIALS = ("<pad>", "<s>", "<|user|>", "<|assistant|>", "<|end|>")
_CHAT_TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path) -> None:
    """A byte-level BPE tokenizer of 32,000 tokens and a configuration; no weights, since nobody computes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(np.random.default_rng(0), _POOL), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        chat_template=_CHAT_TEMPLATE,
        additional_special_tokens=["<s>", "<|user|>", "<|assistant|>"],
    ).save_pretrained(folder)
    LlamaConfig(vocab_size=_VOCABULARY, max_position_embeddings=8192).save_pretrained(folder)


def write_data(path: Path, examples: int) -> None:
    """JSON Lines: a question, its answer, a gold document of 100 words that holds it, and 19 others as long."""
    generator = np.random.default_rng(1)
    texts = _texts(generator, _POOL)
    with path.open("w") as file:
        for number in range(examples):
            gold = _document(
                f"Owl {number}", f"The code of owl {number} is {number:06d}. {texts[number % _POOL]}", True
            )
            drawn = generator.choice(_POOL, DOCUMENTS - 1, replace=False)
            others = (_document(f"Fox {number} {index}", texts[index], False) for index in drawn)
            shown = [gold, *others]
            prompt_specs = {
                "id": f"owl-{number}",
                "question": f"Which code has owl {number}?",
                "answers": [f"{number:06d}"],
            }
            file.write(f'{json.dumps(prompt_specs)[:-1]}, "documents": [{", ".join(shown)}]}}\n')


def load(material: Path, storage: str, examples: int) -> Recipe:
    """R1 over 20 documents with an engine that answers 50 tokens at once; every answer is trained on."""
    return load_recipe(
        "quickstart",
        [
            *(f"runtime.storage={storage}", f"model.path={material}/model", f"data.path={material}/data.jsonl"),
            *(f"data.documents={DOCUMENTS}", f"data.train_examples={examples}", "data.eval_examples=2"),
            *("data.prompt=qa", "data.eval_fraction=0.01", "evaluation.other_documents=[]", "model.engine=fake"),
            *("runtime.fake.reply_tokens=50", "sampling.max_new_tokens=100", "sampling.keep=all"),
            # As the recipes for GPUs have it.
            "runtime.samplers.concurrent_batches=4",
            # Without the teacher, which is model work.
            *("method.advantageous_slot=first", "method.teacher=resident", "training.epochs=1"),
        ],
    )


def _document(title: str, text: str, gold: bool) -> str:
    return json.dumps({"title": title, "text": text, "gold": gold})


def _texts(generator: np.random.Generator, count: int) -> list[str]:
    """Sentences of made-up words: frequencies follow Zipf's law, and frequent words are short, as in a language."""
    words = _words()
    share = 1 / np.arange(10, 10 + len(words))
    drawn = generator.choice(len(words), (count, WORDS_IN_DOCUMENT), p=share / share.sum())
    sentences = (words[row].reshape(-1, 10) for row in drawn)
    return [" ".join(" ".join(sentence).capitalize() + "." for sentence in each) for each in sentences]


def _words() -> npt.NDArray[np.str_]:
    generator = np.random.default_rng(2)
    syllables = np.array(
        [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s", "t", "l")]
    )
    drawn = syllables[generator.integers(len(syllables), size=(_WORDS, 3))]
    words = {"".join(row[:length]) for row, length in zip(drawn, generator.integers(1, 4, _WORDS), strict=True)}
    return np.array(sorted(words, key=lambda word: (len(word), word)))
