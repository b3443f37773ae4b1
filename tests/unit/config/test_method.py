from collections.abc import Callable
from typing import Any, get_args

import pytest

from pos2distill.config import (
    METHODS,
    DataSection,
    EvaluationSection,
    MethodSection,
    Recipe,
)
from pos2distill.config.method_table import MethodName
from pos2distill.errors import UserError


def test_study_advantageous_last_depends_on_documents(load: Callable[..., Recipe]) -> None:
    assert load("method.advantageous_slot=last", "data.documents=7").study.fixed_advantageous_slots(1) == (6,)


@pytest.mark.parametrize(
    ("slot", "hops", "slots"),
    [
        ("first", 1, (0,)),
        ("last", 1, (19,)),
        ("first", 3, (0, 1, 2)),
        ("last", 2, (18, 19)),
        ("[7, 3]", 2, (7, 3)),
    ],
)
def test_study_advantageous_depends_on_hops(
    load: Callable[..., Recipe], slot: str, hops: int, slots: tuple[int, ...]
) -> None:
    recipe = load("data.format=jsonl", f"data.hops=[{hops}]", f"method.advantageous_slot={slot}")
    assert recipe.study.fixed_advantageous_slots(hops) == slots


def test_study_advantageous_auto_raises(load: Callable[..., Recipe]) -> None:
    with pytest.raises(ValueError, match="the advantageous slot is 'auto'"):
        load("method.advantageous_slot=auto").study.fixed_advantageous_slots(1)
    with pytest.raises(ValueError, match="the advantageous slot is 'random'"):
        load("method.advantageous_slot=random").study.fixed_advantageous_slots(1)


@pytest.mark.parametrize(
    ("name", "loss", "weights", "anchor", "teacher"),
    [
        ("r1", "kl", "paper", 1.0, True),
        ("kl+align", "kl", "paper", 0.0, True),
        ("kl", "kl", "uniform", 0.0, True),
        ("r1-on-policy", "kl", "paper", 1.0, True),
        ("r2", "ce", "uniform", 0.0, False),
        ("seqkd", "ce", "uniform", 0.0, False),
        ("sft", "ce", "uniform", 0.0, False),
    ],
)
def test_method_section_resolves_the_defaults_of_its_name(
    name: str, loss: str, weights: str, anchor: float, teacher: bool
) -> None:
    method = MethodSection(name=name)  # type: ignore[arg-type]
    resolved = (method.loss, method.weights, method.anchor_weight, method.needs_teacher)
    assert resolved == (loss, weights, anchor, teacher)


@pytest.mark.parametrize(
    ("settings", "teacher", "tokens"),
    [
        ({}, "cached", 0),
        ({"teacher": "resident"}, "resident", 0),
        ({"teacher": "topk"}, "topk", 64),
        ({"teacher": "topk", "teacher_topk": 8}, "topk", 8),
        ({"name": "seqkd"}, "none", 0),
        ({"name": "seqkd", "teacher": "topk"}, "none", 0),
        ({"name": "seqkd", "teacher": "topk", "teacher_topk": 8}, "none", 0),
        ({"name": "seqkd", "weights": "adaptive"}, "cached", 0),
    ],
)
def test_method_section_has_a_teacher_only_if_needed(settings: dict[str, Any], teacher: str, tokens: int) -> None:
    method = MethodSection(**settings)
    assert (method.teacher, method.teacher_topk) == (teacher, tokens)
    assert (method.teacher == "none") == (not method.needs_teacher)
    again = MethodSection.model_validate(method.model_dump())
    assert again == method


def test_method_section_null_leaves_a_setting_open() -> None:
    null = {"weights": None, "anchor_weight": None, "teacher": None, "teacher_topk": None, "auto_slots": None}
    assert MethodSection.model_validate(null) == MethodSection()
    assert EvaluationSection.model_validate({"slots": None, "other_slots": None, "seed": None}) == EvaluationSection()
    data = {"format": "jsonl", "path": "d"}
    assert DataSection.model_validate({**data, "metric": None, "train_candidates": None}) == DataSection(**data)


def test_method_section_rounds_are_those_of_its_name() -> None:
    assert (MethodSection().rounds, MethodSection(name="r1-on-policy").rounds) == (1, 2)
    assert MethodSection(name="r1-on-policy", rounds=1).rounds == 1
    assert MethodSection(k=3).responses_per_example == 1
    assert MethodSection(name="r1-on-policy", k=3).responses_per_example == 4
    assert MethodSection(name="r1-on-policy", k=3, anchor_weight=0.5).responses_per_example == 4
    assert MethodSection(name="r1-on-policy", k=3, anchor_weight=0).responses_per_example == 3


def test_methods_table_has_every_name_once() -> None:
    assert list(METHODS) == list(get_args(MethodName))
    for name, spec in METHODS.items():
        assert spec.name == name
        assert spec.weights in spec.allowed_weights
        assert MethodSection(name=spec.name).spec is spec


def test_method_auto_slots_of_two_hops_are_one_less(load: Callable[..., Recipe]) -> None:
    auto = ("data.format=musique", "data.hops=[2]", "method.advantageous_slot=auto")
    assert load(*auto, "method.auto_slots=19").study.method.auto_slots == 19
    with pytest.raises(UserError, match=r"method.auto_slots: 20 slots, but there are 19"):
        load(*auto, "method.auto_slots=20")


def test_method_auto_slots_are_all_placements_of_few_documents(load: Callable[..., Recipe]) -> None:
    """Two adjacent gold documents among six have five placements."""
    settings = ["data.format=musique", "data.hops=[2]", "data.documents=6", "method.k=2"]
    assert load(*settings, "method.advantageous_slot=auto").study.method.auto_slots == 5


def test_method_k_is_at_most_the_trivial_placements_of_the_fewest_hops(load: Callable[..., Recipe]) -> None:
    """Two of four documents in order have 12 placements, one of them advantageous; three have 24."""
    settings = ["data.format=musique", "data.hops=[2, 3]", "data.documents=4"]
    assert load(*settings, "method.k=11").study.method.k == 11
    with pytest.raises(UserError, match=r"method.k: 12 trivial slots, but 4 documents have 11; lower method.k"):
        load(*settings, "method.k=12")
