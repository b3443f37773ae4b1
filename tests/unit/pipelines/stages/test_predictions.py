import pyarrow as pa

from pipelines.stages.predictions import finished_examples, prediction_parts, refusal_parts
from pos2distill.records import PREDICTION_SCHEMA, REFUSAL_SCHEMA
from pos2distill.store.artifacts import Artifact


def prompts(schema: pa.Schema, *keys: tuple[str, int]) -> pa.Table:
    """A row for each (example id, placement), with 5 documents; every other column is null."""
    empty = dict.fromkeys(schema.names)
    rows = [empty | {"documents": 5, "order": 0, "example_id": example, "placement": at} for example, at in keys]
    return pa.Table.from_pylist(rows, schema=schema)


def test_finished_examples_have_an_answer_to_every_prompt(storage: str) -> None:
    parts = prediction_parts(Artifact(storage, "base-scores", "f00d"))
    parts.append(prompts(PREDICTION_SCHEMA, ("a", 0), ("a", 1), ("b", 0)))
    assert finished_examples(parts.read(), 2).to_pylist() == ["a"]
    parts.append(prompts(PREDICTION_SCHEMA, ("b", 0)))  # twice the same prompt
    assert finished_examples(parts.read(), 2).to_pylist() == ["a"]
    parts.append(prompts(PREDICTION_SCHEMA, ("b", 1)))
    assert sorted(finished_examples(parts.read(), 2).to_pylist()) == ["a", "b"]


def test_refusal_parts_are_apart_from_the_answers(storage: str) -> None:
    artifact = Artifact(storage, "base-scores", "f00d")
    answers, refusals = prediction_parts(artifact), refusal_parts(artifact)
    answers.append(prompts(PREDICTION_SCHEMA, ("a", 0)))
    refusals.append(prompts(REFUSAL_SCHEMA, ("b", 1)))
    assert answers.read()["example_id"].to_pylist() == ["a"]
    assert refusals.read()["example_id"].to_pylist() == ["b"]
