from collections.abc import Callable
from typing import get_args

import pytest

from pos2distill.config import (
    Recipe,
)
from pos2distill.config.inference import InferenceSection
from pos2distill.config.inference_table import INFERENCE_METHODS, InferenceMethodName
from pos2distill.config.load import load_recipe
from pos2distill.errors import UserError


def test_reordered_documents_have_one_order(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"distractor_orders: 2, but inference.method 'reorder' orders them; set 1"):
        load("inference.method=reorder", "evaluation.distractor_orders=2")


def test_study_reorder_needs_slots_to_compare(load: Callable[..., Recipe]) -> None:
    with pytest.raises(
        UserError, match=r"method.auto_slots: 1, but inference.method 'reorder' compares at least 2 slots"
    ):
        load("inference.method=reorder", "method.auto_slots=1")
    with pytest.raises(UserError, match=r"method.auto_slots: 99 slots, but there are 20; lower it"):
        load("inference.method=reorder", "method.auto_slots=99")


def test_study_ms_poe_cannot_use_flash_attention(load: Callable[..., Recipe]) -> None:
    with pytest.raises(
        UserError, match=r"inference.method: 'ms_poe' cannot use flash_attention_2; set model.attention"
    ):
        load("inference.method=ms_poe", "model.engine=hf", "model.attention=flash_attention_2")


def test_inference_methods_table_has_every_name_once_and_settings_that_exist() -> None:
    assert list(INFERENCE_METHODS) == list(get_args(InferenceMethodName))
    for name, spec in INFERENCE_METHODS.items():
        assert spec.name == name
        assert set(spec.settings) <= set(InferenceSection.model_fields)
    owned = {setting for spec in INFERENCE_METHODS.values() for setting in spec.settings}
    assert owned == set(InferenceSection.model_fields) - {"method"}


def test_load_recipe_lowers_the_default_slots_of_a_search_to_those_of_a_prompt() -> None:
    overrides = ["inference.method=lpes", "data.documents=2", "evaluation.slots=2", "method.k=1"]
    assert load_recipe("nq_mistral_7b", overrides).study.inference.search.slots == 3
    with pytest.raises(UserError, match=r"inference.search.slots: 4 slots, but there are 2; lower it"):
        load_recipe("nq_mistral_7b", [*overrides, "inference.search.slots=4"])
