"""Against plain transformers: one forward pass for each prompt, without packing."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from pos2distill.config import Study
from pos2distill.config.load import load_recipe
from pos2distill.evaluation.passes import PositionPasses
from pos2distill.models.load import load_tokenizer
from pos2distill.records import PASSES_SCHEMA, Example
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.permutations import arrange
from pos2distill.tasks.prompts import PromptBuilder

OVERRIDES = ["data.documents=8", "data.eval_examples=2", "data.train_examples=2", "evaluation.slots=[0, 3, 7]"]
RECIPE = load_recipe("quickstart", [*OVERRIDES, "analysis.examples=2"])
STUDY: Study = RECIPE.study


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return list(load_split(STUDY.data, documents=8, seed=0).evaluation)


@pytest.fixture(scope="module")
def responses(examples: list[Example]) -> list[list[int]]:
    """Responses that no model gave, of two lengths."""
    tokenizer: Any = load_tokenizer(STUDY.model)
    texts = ["The code of Dark Viper is 87 57 . <|end|>", "12 96 <|end|>"]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def batch(examples: list[Example], responses: list[list[int]]) -> pa.Table:
    columns = {
        "example_id": [example.example_id for example in examples],
        "example": [asdict(example) for example in examples],
        "slots": [[7]] * 2,
        "response_ids": responses,
    }
    return pa.table(columns, schema=pa.schema([PASSES_SCHEMA.field(name) for name in columns]))


@pytest.fixture(scope="module")
def passes(batch: pa.Table) -> list[dict[str, Any]]:
    return PositionPasses(STUDY, STUDY.model, RECIPE.runtime.teachers)(batch).to_pylist()


def plain_model(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def prompt_of(example: Example, slot: int) -> list[int]:
    build = PromptBuilder(load_tokenizer(STUDY.model), "plain", max_length=4096, reserve=16)
    return build(example, 8, (slot,)).tolist()


def logprobs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


def plain_kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum(-1)


def test_position_passes_kl_equals_two_plain_forward_passes(
    passes: list[dict[str, Any]], examples: list[Example], responses: list[list[int]]
) -> None:
    model = plain_model(STUDY.model.path)
    for row, example, response in zip(passes, examples, responses, strict=True):
        assert row["placement_slots"] == [[0], [3], [7]]
        advantaged_TV = logprobs(model, prompt_of(example, 7), response)
        assert row["tokens"] == advantaged_TV.argmax(-1).tolist()
        for slot, kl_T, agrees_T in zip((0, 3, 7), row["kl"], row["agrees"], strict=True):
            moved_TV = logprobs(model, prompt_of(example, slot), response)
            torch.testing.assert_close(torch.tensor(kl_T), plain_kl(advantaged_TV, moved_TV), atol=1e-6, rtol=1e-4)
            assert agrees_T == (moved_TV.argmax(-1) == advantaged_TV.argmax(-1)).tolist()
    # The prompts of other slots are other prompts.
    assert max(passes[0]["kl"][0]) > 1e-3


def test_position_passes_compare_a_trained_model_with_the_initial_one(
    batch: pa.Table, passes: list[dict[str, Any]], examples: list[Example], responses: list[list[int]], tmp_path: Any
) -> None:
    trained = plain_model(STUDY.model.path)
    with torch.no_grad():
        trained.lm_head.weight.mul_(1.1)
    trained.save_pretrained(tmp_path)
    load_tokenizer(STUDY.model).save_pretrained(tmp_path)
    model = STUDY.model.model_copy(update={"path": str(tmp_path)})
    study = STUDY.model_copy(update={"model": model})
    stored = PASSES_SCHEMA.empty_table().schema
    states = pa.Table.from_pylist(passes, schema=stored)
    batch = batch.append_column("hidden", states["hidden"]).append_column("hidden_dtype", states["hidden_dtype"])
    row = PositionPasses(study, STUDY.model, RECIPE.runtime.teachers)(batch).to_pylist()[0]
    initial = plain_model(STUDY.model.path)
    advantaged_TV = logprobs(initial, prompt_of(examples[0], 7), responses[0])
    for slot, kl_T in zip((0, 3, 7), row["kl"], strict=True):
        moved_TV = logprobs(plain_model(str(tmp_path)), prompt_of(examples[0], slot), responses[0])
        torch.testing.assert_close(torch.tensor(kl_T), plain_kl(advantaged_TV, moved_TV), atol=1e-6, rtol=1e-4)


def test_position_passes_attention_equals_that_of_transformers(
    passes: list[dict[str, Any]], examples: list[Example], responses: list[list[int]]
) -> None:
    model = plain_model(STUDY.model.path)
    tokenizer: Any = load_tokenizer(STUDY.model)
    prompt, response = prompt_of(examples[0], 3), responses[0]
    with torch.inference_mode():
        layers = model(torch.tensor([prompt + response]), output_attentions=True).attentions
    # The toy's tokens are words, so the words of each document say where it is.
    lengths = []
    for document in arrange(examples[0], 8, (3,)):
        text = f"Title: {document.title}\n{document.text}\n"
        lengths.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    start = prompt.index(tokenizer.convert_tokens_to_ids("Title:"))
    edges = start + np.cumsum([0, *lengths])
    edges = np.array([0, *edges, len(prompt), len(prompt) + len(response)])
    sums_N2P = np.asarray(passes[0]["attention"][1]).reshape(passes[0]["layers"], 2, 11)
    for layer, weights_1HLL in enumerate(layers):
        mean_LL = weights_1HLL[0].mean(0).numpy()
        queries_TL = mean_LL[len(prompt) - 1 : -1]
        for query, expected_L in enumerate((queries_TL.mean(0), queries_TL[0])):
            before, *documents, after, answer = np.add.reduceat(expected_L, edges[:-1])
            expected = [*documents, before, after, answer]
            np.testing.assert_allclose(sums_N2P[layer, query], expected, atol=1e-6)
    np.testing.assert_allclose(sums_N2P.sum(-1), 1, atol=1e-5)


def test_position_passes_without_attention(batch: pa.Table) -> None:
    study = load_recipe("quickstart", [*OVERRIDES, "analysis.attention=false"]).study
    (row,) = PositionPasses(study, study.model, RECIPE.runtime.teachers)(batch.slice(0, 1)).to_pylist()
    assert (row["layers"], row["attention"]) == (0, [])


def test_position_passes_of_a_template_are_those_of_the_wording_that_it_has(
    batch: pa.Table, passes: list[dict[str, Any]]
) -> None:
    template = {"user": "{documents}Question: {question}", "document": "Title: {title}\n{text}\n", "separator": ""}
    overrides = [*OVERRIDES, "analysis.examples=2", f"data.template={json.dumps(template)}", "data.prompt=template"]
    recipe = load_recipe("quickstart", overrides)
    assert PositionPasses(recipe.study, recipe.study.model, recipe.runtime.teachers)(batch).to_pylist() == passes
