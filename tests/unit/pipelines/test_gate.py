"""`evaluate --fail-if-gap-above`, on predictions made by hand: accuracies 1, 0.85 and 0.8 at three slots."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines import command_line
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.records import PREDICTION_SCHEMA
from pos2distill.store.artifacts import Artifact, claim_storage


def publish(artifact: Artifact, right: tuple[int, ...], **counts: int) -> None:
    """Of 20 examples at each slot, the first so many are right."""
    rows = [
        {
            "example_id": f"e{example}",
            "documents": 4,
            "placement": slot,
            "group": "",
            "slots": [slot],
            "sampled_ids": [],
            "text": "",
            "correct": example < count,
            "f1": 0.0,
            "finish_reason": "stop",
        }
        for slot, count in enumerate(right)
        for example in range(20)
    ]
    with artifact.writing():
        artifact.write_table("predictions.parquet", pa.Table.from_pylist(rows, schema=PREDICTION_SCHEMA))
        artifact.publish(counts=counts, seconds={})


@pytest.fixture
def evaluate(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., int]:
    recipe = make_recipe()
    plan = make_plan(recipe)
    claim_storage(recipe.storage, recipe.name)
    publish(plan.prepare.artifact, ())
    publish(plan.evaluate_base.artifact, (20, 17, 16))

    def evaluate(points: str) -> int:
        return command_line.main(["evaluate", str(tmp_path / "recipe.yaml"), "--fail-if-gap-above", points])

    return evaluate


def test_gate_fails_on_a_larger_gap(evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("19.5") == 1
    assert capsys.readouterr().err == "gate: GAP 20 is above 19.5 (mean 88.3)\n"


def test_gate_fails_without_right_answers(
    evaluate: Callable[..., int], make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(make_recipe())
    publish(plan.distill.artifact, ())
    publish(plan.evaluate_distilled.artifact, (0, 0, 0))
    assert evaluate("100") == 1
    assert capsys.readouterr().err == "gate: no answer is right (mean 0.0), so a GAP of 0 means nothing\n"


def test_evaluate_warns_of_truncated_answers(
    evaluate: Callable[..., int], make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(make_recipe())
    publish(plan.distill.artifact, ())
    publish(plan.evaluate_distilled.artifact, (20, 20, 20), prompts=60, hit_max_tokens=7)
    assert evaluate("5") == 0
    assert capsys.readouterr().err == (
        "warning: evaluate distilled: 7 of 60 answers were cut at evaluation.max_new_tokens; "
        "raise it if they are incomplete\n"
    )


@pytest.mark.parametrize("points", ["20", "100"])
def test_gate_passes_at_the_limit(
    evaluate: Callable[..., int], points: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 - 0.8 is a little less or more than 0.2 in floating point; equal is not above."""
    assert evaluate(points) == 0
    assert "GAP 0.200" in capsys.readouterr().out


def test_gate_judges_the_checkpoint_if_there_is_one(
    evaluate: Callable[..., int], make_recipe: Callable[..., Recipe]
) -> None:
    plan = make_plan(make_recipe())
    publish(plan.distill.artifact, ())
    publish(plan.evaluate_distilled.artifact, (20, 19, 20))
    assert evaluate("6") == 0
    assert evaluate("4") == 1
