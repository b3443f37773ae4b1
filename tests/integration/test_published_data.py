"""Data in published formats through whole studies, and through the real vLLM engine, with a small random model.

Accuracy is zero: the model cannot read. What counts is that every stage handles the text. The stand-ins have every
published format; the published files, where they are present, also real text of real length.
"""

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pos2distill.config import DataSection, ModelSection, Recipe, VllmSection
from pos2distill.config.load import load_recipe
from pos2distill.models.chat import stop_token_ids
from pos2distill.models.load import load_tokenizer
from pos2distill.sampling.engines.protocol import Completion, Engine, Failure, SamplingParams
from pos2distill.sampling.engines.vllm import VllmEngine
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.prompts import PromptBuilder
from tests.support.commands import run_distill, run_study
from tests.support.engines import hf_engine
from tests.support.published import PUBLISHED, STAND_INS, DataSet, needs_published, read_lines
from tests.support.results import artifact_of, counts_of
from tests.support.tiny import CHAT_TEMPLATE, SPECIALS

pytestmark = pytest.mark.xdist_group("compute")

TRAINING, EVALUATION = 2, 2  # examples


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], str]:
    """`reader(published)`: a random Llama with a context of 16k and a tokenizer trained on the text of the files."""

    @functools.cache
    def make(published: bool) -> str:
        folder = str(tmp_path_factory.mktemp("reader"))
        save_reader(folder, [line for lines in read_lines(files_of(published).values()) for line in lines[:60]])
        return folder

    return make


def files_of(published: bool) -> dict[str, DataSet]:
    return PUBLISHED if published else STAND_INS


def save_reader(folder: str, text: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=list(SPECIALS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(text, trainer)
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
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)


CASES = [
    *(pytest.param(name, False, id=f"{name}-stand-in") for name in STAND_INS),
    *(
        pytest.param(name, True, marks=[pytest.mark.slow, needs_published], id=f"{name}-published")
        for name in PUBLISHED
    ),
]


def recipe_on(data_set: DataSet, folder: Path, model: str, *, engine: str) -> Recipe:
    method: dict[str, Any] = {"name": "r1", "advantageous_slot": "first", "k": 2}
    slots: int | str = 3
    if max(data_set.hops) > 1:
        method, slots = {"name": "r2", "advantageous_slot": "last", "k": 2, "weights": "adaptive"}, "pairs"
    recipe = {
        "name": "published-format",
        "description": "A random model on published text.",
        "model": {"path": model, "engine": engine, "dtype": "float32"},
        "data": data_set.data
        | {"path": str(data_set.path), "train_examples": TRAINING, "train_candidates": TRAINING}
        | {"eval_examples": EVALUATION},
        "method": method,
        "sampling": {"keep": "all", "max_new_tokens": 12},
        "training": {"epochs": 1, "global_batch_rows": 8, "precision": "float32"},
        "evaluation": {"slots": slots, "other_slots": slots, "max_new_tokens": 12, "bootstrap_samples": 100},
        "runtime": {
            "storage": str(folder / "run"),
            "executor": "ray" if engine == "vllm" else "local",
            "samplers": {"batch_size": 4},
            "trainers": {"strategy": "torch", "micro_batch_tokens": 8192},
            "vllm": {"enforce_eager": True, "max_num_seqs": 8},
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return load_recipe(str(path))


@pytest.mark.parametrize(("task", "is_published"), CASES)
def test_run_study_on_published_formats(
    task: str, reader: Callable[[bool], str], tmp_path: Path, *, is_published: bool
) -> None:
    data_set = files_of(is_published)[task]
    run_study(recipe_on(data_set, tmp_path, reader(is_published), engine="hf"))
    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    counts = summary["counts"]
    records = counts["prepare"]["records"]
    assert records == data_set.records
    assert records == sum(value for name, value in counts["prepare"].items() if name != "records")
    assert counts["sample"]["sampled"] == TRAINING
    assert counts["sample"]["kept"] + counts["sample"]["empty"] == TRAINING
    prompts = EVALUATION * (data_set.pairs if max(data_set.hops) > 1 else 3)
    assert counts["evaluate base"]["prompts"] == counts["evaluate distilled"]["prompts"] == prompts
    assert summary["dataset"] == data_set.name


@pytest.mark.slow
def test_run_distill_samples_by_vllm_on_ray(reader: Callable[[bool], str], tmp_path: Path) -> None:
    """Published text through vLLM is the next test's, a checkpoint through it that of test_engines.py."""
    recipe = recipe_on(STAND_INS["nq_oracle"], tmp_path, reader(False), engine="vllm")
    run_distill(recipe)
    counts = counts_of(recipe, "sample")
    assert counts["sampled"] == TRAINING == counts["kept"] + counts["empty"]
    assert artifact_of(recipe, "distill").manifest() is not None


@pytest.fixture(scope="module")
def vllm(reader: Callable[[bool], str]) -> Iterator[VllmEngine]:
    """One engine for all files: its start takes longer than all that they ask of it."""
    model = ModelSection(path=reader(True), engine="vllm", dtype="float32")
    engine = VllmEngine.start(model, VllmSection(enforce_eager=True, max_num_seqs=8))
    yield engine
    engine.shutdown()


@pytest.mark.slow
@needs_published
def test_vllm_answers_published_prompts_as_the_reference(vllm: VllmEngine, reader: Callable[[bool], str]) -> None:
    model = ModelSection(path=reader(True), engine="hf", dtype="float32")
    tokenizer = load_tokenizer(model)
    prompts = []
    for data_set in PUBLISHED.values():
        data = DataSection(
            **data_set.data, path=str(data_set.path), train_examples=EVALUATION, eval_examples=EVALUATION
        )
        build = PromptBuilder(tokenizer, data.prompt, max_length=16384, reserve=12)
        split = load_split(data, documents=data.documents, seed=0)
        for example in split.evaluation:
            first = tuple(range(len(example.golds)))
            last = tuple(range(data.documents - len(example.golds), data.documents))
            prompts += [build(example, data.documents, slots) for slots in (first, last)]
    params = SamplingParams(0.0, 1.0, 12, tuple(stop_token_ids(model, tokenizer)))

    async def answer(engine: Engine) -> list[list[int]]:
        answers = await engine.generate(prompts, params, [0] * len(prompts))
        assert not any(isinstance(each, Failure) for each in answers)
        return [each.token_ids.tolist() for each in answers if isinstance(each, Completion)]

    answers = asyncio.run(answer(vllm))
    assert len(prompts) == 2 * EVALUATION * len(PUBLISHED)
    assert max(len(prompt) for prompt in prompts) > 4000
    assert answers == asyncio.run(answer(hf_engine(model)))
