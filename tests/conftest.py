"""Fixtures of all tests: a tiny random model, small data files, and recipes on both."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Ray and transformers read these when they are imported, so they are set before both imports.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray 2.60 gives its workers a niceness of 15, so that on two cores they would wait for the tests of the other process.
os.environ.setdefault("RAY_worker_niceness", "0")
# NumPy's threads wait for one another, and so for the other process on the same cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import yaml
from hypothesis import settings

from pos2distill import hardware
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from tests.support.tiny import CHAT_TEMPLATE, SPECIALS, write_examples

# A shell starts a background job with SIGINT ignored, and the processes that tests start and interrupt inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, and no deadline on a busy machine.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests expect the same warnings on every machine. Those that use GPUs ask torch."""
    monkeypatch.setattr(hardware, "visible_gpus", lambda: 0)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama (2 layers, fp32) and a tokenizer of single bytes with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("tiny-model"))
    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,  # far from uniform predictions, so that slots differ
        pad_token_id=words.index("<pad>"),
        bos_token_id=words.index("<s>"),
        eos_token_id=words.index("<|end|>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture
def make_recipe(make_shared_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """`make_recipe(training={"epochs": 1}, …)`: `make_shared_recipe` in `tmp_path`."""

    def make(**overrides: Any) -> Recipe:
        return make_shared_recipe(tmp_path, **overrides)

    return make


@pytest.fixture(scope="session")
def make_shared_recipe(tiny_model_path: str) -> Callable[..., Recipe]:
    """`make_shared_recipe(folder, training={"epochs": 1}, …)`: a recipe on the tiny model, sections merged deeply.

    The file it was read from stays at `folder / "recipe.yaml"`.
    """

    def make(folder: Path, **overrides: Any) -> Recipe:
        data = folder / "data.jsonl"
        if not data.exists():
            write_examples(data, 40, 6)
        raw: dict[str, Any] = {
            "name": "tiny",
            "description": "The tiny random model.",
            "model": {"path": tiny_model_path, "dtype": "float32", "engine": "hf"},
            "data": {
                "format": "jsonl",
                "path": str(data),
                "prompt": "plain",
                "documents": 4,
                "train_examples": 8,
                "eval_examples": 4,
            },
            "method": {"k": 3},
            "sampling": {"max_new_tokens": 8, "keep": "all"},
            "training": {"learning_rate": 1e-3, "epochs": 1, "precision": "float32"},
            "evaluation": {"max_new_tokens": 8, "bootstrap_samples": 100},
            "runtime": {
                "storage": str(folder / "storage"),
                "samplers": {"batch_size": 8},
                "teachers": {"batch_size": 8},
                "trainers": {"strategy": "torch", "gradient_checkpointing": False},
            },
        }
        _merge(raw, overrides)
        # Every example counts in most tests, kept or not; those on `data.train_candidates` set it.
        raw["data"].setdefault("train_candidates", raw["data"]["train_examples"])
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
        return load_recipe(str(path))

    return make


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
