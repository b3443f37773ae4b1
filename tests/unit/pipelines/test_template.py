"""A study with a prompt of one's own: every part of it sees the same prompts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.cli.command_line import main
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.models.load import load_prompt_builder, load_tokenizer
from pos2distill.records import Example, example_from_row
from pos2distill.tasks.permutations import arrange
from pos2distill.tasks.prompts import PromptBuilder
from tests.support.commands import run_analyze, run_distill, run_evaluate

TEMPLATE = {
    "system": "Answer from this:\n{documents}\nNothing else.",
    "user": "Q: {question}",
    "document": "<{number}> {text}",
    "separator": "\n",
}


def expected_prompt(example: Example, slot: int) -> str:
    shown = [f"<{number}> {document.text}" for number, document in enumerate(arrange(example, 4, (slot,)), start=1)]
    system = f"<|system|>Answer from this:\n{chr(10).join(shown)}\nNothing else.<|end|>"
    return f"<s>{system}<|user|>Q: {example.question}<|end|><|assistant|>"


def test_study_with_a_template_has_its_prompts_everywhere(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(
        data={"prompt": "template", "template": TEMPLATE},
        evaluation={"slots": [0, 2]},
        analysis={"examples": 2},
        runtime={"executor": "local", "max_failed_fraction": 1},
    )
    run_evaluate(recipe)
    run_distill(recipe)
    run_analyze(recipe)
    plan = make_plan(recipe)
    assert plan.analyze_base is not None
    assert plan.analyze_base.artifact.manifest() is not None
    examples = [example_from_row(row) for row in plan.prepare.artifact.read_table("evaluation.parquet").to_pylist()]
    expected = {(each.example_id, slot): expected_prompt(each, slot) for each in examples for slot in (0, 2)}
    # As stored, as exported, and as the trainer builds them.
    capsys.readouterr()
    assert main(["inspect", recipe.storage, "--prompts", "--limit", "0", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(row["example_id"], row["slots"][0]): row["prompt"] for row in rows} == expected
    assert main(["export", recipe.storage, str(tmp_path / "tasks")]) == 0
    docs = [json.loads(line) for path in (tmp_path / "tasks").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert {(doc["id"], doc["slots"][0]): doc["prompt"] for doc in docs} == expected
    build = load_prompt_builder(recipe.study, reserve=0)
    assert isinstance(build, PromptBuilder)
    tokenizer = load_tokenizer(recipe.study.model)
    assert str(tokenizer.decode(build(examples[0], 4, (2,)))) == expected[examples[0].example_id, 2]
    # The page puts them together from the frame, in which the user's message is.
    chat = plan.evaluate_base.output().details("chat")["chat"]
    assert chat == ["<s><|system|>", "<|end|><|user|>Q: {question}<|end|><|assistant|>"]
    samples = plan.first_sample.artifact
    assert main(["inspect", samples.url, "--prompts", "--limit", "1", "--json"]) == 0
    sampled = capsys.readouterr().out
    assert "<|system|>Answer from this:" in sampled
