"""Published benchmark files: their text to token ids; and the whole chain, with a small random model and both engines.

Accuracy is zero: the model cannot read. What counts is that every stage takes real text of real length.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.unit.test_encoding import BYTE_LEVEL, chat_tokenizer, is_fast, plain

from pipelines.commands import run_study
from pos2distill.config.load import load_recipe
from pos2distill.tasks.encoding import text_encoder
from tests.conftest import CHAT_TEMPLATE, SPECIALS
from tests.integration.conftest import BENCHMARK_DATA

pytestmark = pytest.mark.skipif(
    not BENCHMARK_DATA.is_dir(),
    reason=f"no benchmark samples in {BENCHMARK_DATA}; set POS2DISTILL_BENCHMARK_DATA to a folder that holds them",
)

TASKS: dict[str, dict[str, Any]] = {
    "nq": {"format": "nq_oracle", "path": "nq-open-oracle.jsonl.gz", "prompt": "qa", "documents": 20},
    "kv": {"format": "kv", "path": "kv-retrieval-140_keys.jsonl.gz", "prompt": "kv", "documents": 140},
    "musique": {"format": "musique", "path": "musique_train.jsonl.gz", "documents": 20, "hops": [2, 3, 4]},
    "hotpotqa": {"format": "hotpotqa", "path": "hotpotqa_train.json", "documents": 10, "hops": [2]},
}
ROWS = {"nq": 1500, "kv": 150, "musique": 60, "hotpotqa": 60}
NAMES = {"nq": "nq-oracle-random-distractors", "kv": "kv", "musique": "musique", "hotpotqa": "hotpotqa"}
TRAIN, EVALUATION = 4, 2  # examples
REASONING = ("musique", "hotpotqa")


def published_lines() -> list[list[str]]:
    """Of every compressed file."""
    files = [BENCHMARK_DATA / task["path"] for task in TASKS.values() if task["path"].endswith(".gz")]
    return [[line.decode() for line in gzip.decompress(file.read_bytes()).splitlines()] for file in files]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a context of 16k and a tokenizer trained on the files' own text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("reader"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [line for lines in published_lines() for line in lines[:60]]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=2000, special_tokens=list(SPECIALS), initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        additional_special_tokens=["<s>", "<|user|>", "<|assistant|>"],
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16384,
        pad_token_id=0,
        eos_token_id=SPECIALS.index("<|end|>"),
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", BYTE_LEVEL)
def test_published_text_is_encoded_as_by_the_tokenizer(family: str) -> None:
    lines = [line for lines in published_lines() for line in lines]
    tokenizer = chat_tokenizer(BYTE_LEVEL[family](texts=lines[::20]))
    encode = text_encoder(tokenizer)
    assert is_fast(encode)
    for line in lines[::3]:
        assert encode(line).tolist() == plain(tokenizer, line)


@pytest.mark.parametrize(
    ("task", "engine"),
    [("nq", "hf"), ("kv", "hf"), ("musique", "hf"), ("hotpotqa", "vllm")],
)
def test_study_runs_through_on_published_files(task: str, engine: str, reader: str, tmp_path: Path) -> None:
    data = TASKS[task] | {"path": str(BENCHMARK_DATA / TASKS[task]["path"])}
    method: dict[str, Any] = {"name": "r1", "advantageous_slot": "first", "k": 2}
    slots: int | str = 3
    if task in REASONING:
        data |= {"prompt": "reasoning", "metric": "em"}
        method, slots = {"name": "r2", "advantageous_slot": "last", "k": 2, "weights": "adaptive"}, "pairs"
    recipe = {
        "name": task,
        "description": "A random model on published text.",
        "model": {"path": reader, "engine": engine, "dtype": "float32"},
        "data": data | {"train_examples": TRAIN, "eval_examples": EVALUATION},
        "method": method,
        "sampling": {"keep": "all", "max_new_tokens": 12},
        "training": {"epochs": 1, "global_batch_rows": 8, "precision": "float32"},
        "evaluation": {"slots": slots, "other_slots": slots, "max_new_tokens": 12, "bootstrap_samples": 100},
        "runtime": {
            "storage": str(tmp_path / "run"),
            "samplers": {"batch_size": 4, "threads": 2},
            "trainers": {"strategy": "torch", "micro_batch_tokens": 8192, "threads": 2},
            "vllm": {"enforce_eager": True, "max_num_seqs": 8},
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run_study(load_recipe(str(path)))
    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    counts = summary["counts"]
    rows = counts["examples"]["rows"]
    assert rows == ROWS[task]
    assert rows == sum(value for name, value in counts["examples"].items() if name != "rows")
    assert counts["sample"]["sampled"] == TRAIN
    assert counts["sample"]["kept"] + counts["sample"]["empty"] == TRAIN
    prompts = EVALUATION * (12 if task in REASONING else 3)
    assert counts["evaluate base"]["prompts"] == counts["evaluate distilled"]["prompts"] == prompts
    assert summary["dataset"] == NAMES[task]
