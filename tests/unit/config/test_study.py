from collections.abc import Callable
from typing import Any

import pytest

from pos2distill.config import (
    Recipe,
)
from pos2distill.config.sweep import sweep_cells
from pos2distill.errors import UserError


@pytest.mark.parametrize(("prompt", "tokens"), [("qa", 100), ("reasoning", 512), ("coc", 512)])
def test_study_default_of_max_new_tokens_depends_on_the_prompt(
    load: Callable[..., Recipe], prompt: str, tokens: int
) -> None:
    for override in ((), ("sampling.max_new_tokens=null", "evaluation.max_new_tokens=null")):
        study = load(f"data.prompt={prompt}", *override).study
        assert (study.sampling.max_new_tokens, study.evaluation.max_new_tokens) == (tokens, tokens)
    assert load(f"data.prompt={prompt}", "sampling.max_new_tokens=7").study.sampling.max_new_tokens == 7


def test_study_defaults_are_those_of_the_paper(load: Callable[..., Recipe]) -> None:
    study = load().study
    training = study.training
    assert (training.learning_rate, training.betas, training.weight_decay) == (3e-6, (0.9, 0.95), 0.01)
    assert (training.warmup_ratio, training.min_lr_ratio, training.max_grad_norm) == (0.05, 0.1, 1.0)
    assert (training.global_batch_rows, training.epochs, training.precision) == (32, 2, "bfloat16")
    assert (study.method.k, study.method.anchor_weight, study.method.weights) == (4, 1.0, "paper")
    assert (study.method.distractor_order, study.sampling.temperature) == ("fixed", 0.0)
    assert study.fixed_advantageous_slots(1) == (0,)
    assert (study.data.documents, study.data.train_examples) == (20, 300)


def test_training_learning_rate_depends_on_adapters_where_it_is_open(load: Callable[..., Recipe]) -> None:
    lora = "training.lora={rank: 4}"
    assert load("training.learning_rate=null").study.training.learning_rate == 3e-6
    assert load("training.learning_rate=null", lora).study.training.learning_rate == 1e-4
    assert load("training.learning_rate=3e-6", lora).study.training.learning_rate == 3e-6
    assert load("training.learning_rate=2e-6").study.training.learning_rate == 2e-6


def test_study_keeps_wrong_answers_of_on_policy_methods(load: Callable[..., Recipe]) -> None:
    assert load("method.name=r1").study.sampling.keep == load("sampling.keep=null").study.sampling.keep == "correct"
    assert load("method.name=r1-on-policy").study.sampling.keep == "all"
    assert load("method.name=r1-on-policy", "sampling.keep=correct").study.sampling.keep == "correct"
    cells = sweep_cells(load("sweep.method.name=[r1, r1-on-policy]"))
    assert [cell.study.sampling.keep for _, cell in cells] == ["correct", "all"]


def test_study_rejects_a_choice_of_on_policy_answers(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"sampling.candidates: 4, but method 'r1-on-policy' learns from what the stud"):
        load("method.name=r1-on-policy", "sampling={candidates: 4, temperature: 1}")


def test_study_rejects_a_batch_smaller_than_one_example(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"training.global_batch_rows: 3 rows cannot hold one example, which needs 4"):
        make_recipe(training={"global_batch_rows": 3})
    # R2 has no row at the advantageous slot.
    r2: dict[str, Any] = {"method": {"name": "r2", "k": 3}, "training": {"global_batch_rows": 3}}
    assert make_recipe(**r2).study.method.reserved_rows_per_example == 3
    with pytest.raises(UserError, match=r"2 rows cannot hold one example, which needs 3 rows \(method.k\)"):
        make_recipe(method=r2["method"], training={"global_batch_rows": 2})
