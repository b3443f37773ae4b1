import json
import pickle
import re
from collections.abc import Callable

import pytest

from pos2distill.config import (
    Recipe,
)
from pos2distill.config.sweep import sweep_cells
from pos2distill.errors import UserError


@pytest.mark.parametrize(
    "name", ["model.chat_template_kwargs={thinking: false}", "model.chat_template_kwargs.thinking=no"]
)
def test_chat_template_kwargs_are_a_part_of_the_model(load: Callable[..., Recipe], name: str) -> None:
    study = load(name).study
    assert study.model.chat_template_kwargs == {"thinking": False}
    assert study.model.model_dump(mode="json")["chat_template_kwargs"] == {"thinking": False}
    # Sections are keys of caches.
    assert hash(study) == hash(load(name).study)
    assert study.model != load().study.model
    assert pickle.loads(pickle.dumps(study)) == study


def test_chat_template_kwargs_are_in_no_dump_where_there_are_none(load: Callable[..., Recipe]) -> None:
    """So that earlier fingerprints stay."""
    for settings in ([], ["model.chat_template_kwargs={}"]):
        assert "chat_template_kwargs" not in load(*settings).study.model_dump_json()


def test_chat_template_kwargs_can_be_swept(load: Callable[..., Recipe]) -> None:
    recipe = load("sweep={model.chat_template_kwargs: [{thinking: true}, {thinking: false}]}")
    cells = [cell.study.model.chat_template_kwargs for _, cell in sweep_cells(recipe)]
    assert cells == [{"thinking": True}, {"thinking": False}]


def test_extra_body_cannot_replace_the_prompt(load: Callable[..., Recipe]) -> None:
    assert load("model.extra_body={max_tokens: null}").study.model.extra_body == {"max_tokens": None}
    assert "extra_body" not in load().study.model.model_dump()
    for name in ("messages", "echo", "truncate_prompt_tokens"):
        with pytest.raises(UserError, match=rf"model.extra_body: {name}: is set by the evaluation, or"):
            load(f"model.extra_body={{{name}: 1}}")


def test_extra_body_has_the_limit_of_the_evaluation(load: Callable[..., Recipe]) -> None:
    server = ("model.engine=openai", "runtime.endpoint.base_url=http://127.0.0.1:1/v1", "data.train_examples=0")
    renamed = "model.extra_body={max_tokens: null, max_completion_tokens: 50}"
    assert load(*server, renamed, "evaluation.max_new_tokens=50").study.evaluation.max_new_tokens == 50
    message = r"max_completion_tokens: 50, but evaluation.max_new_tokens is 40; set both to the same"
    with pytest.raises(UserError, match=message):
        load(*server, renamed, "evaluation.max_new_tokens=40")
    with pytest.raises(UserError, match=r"max_tokens: is evaluation.max_new_tokens; set that, or null to leave it out"):
        load("model.extra_body={max_tokens: 3}")


def test_engine_args_are_rejected_where_vllm_does_not_run_the_model(load: Callable[..., Recipe]) -> None:
    given = "model.engine_args={quantization: fp8}"
    study = load(given, "model.engine=vllm").study
    assert study.model.engine_args == {"quantization": "fp8"}
    assert "engine_args" not in load("model.engine=vllm").study.model.model_dump()
    message = "model.engine_args: are arguments of vLLM, but model.engine is hf; set model.engine to vllm, or leave"
    with pytest.raises(UserError, match=message):
        load(given, "model.engine=hf")
    with pytest.raises(UserError, match=r"from which method.teacher 'topk' learns; set method.teacher to cached or re"):
        load(given, "model.engine=vllm", "method.teacher=topk", "method.teacher_topk=8")


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("model.extra_body={api_key: hunter2}", "model.extra_body.api_key"),
        ("model.extra_body={headers: {Authorization: hunter2}}", "model.extra_body.headers.Authorization"),
        ("model.chat_template_kwargs={api_key: hunter2}", "model.chat_template_kwargs.api_key"),
        ("model.engine_args={hf_token: hunter2}", "model.engine_args.hf_token"),
        ("sweep.model.extra_body=[{}, {api_key: hunter2}]", "sweep.model.extra_body[1].api_key"),
    ],
)
def test_what_is_sent_to_a_server_holds_no_key(load: Callable[..., Recipe], setting: str, place: str) -> None:
    with pytest.raises(UserError, match=rf"{re.escape(place)}: contains what looks like a secret"):
        load(setting)


def test_engine_args_take_numbers_of_tokens(load: Callable[..., Recipe]) -> None:
    arguments = {"max_num_batched_tokens": 4096, "long_prefill_token_threshold": 8}
    assert load(f"model.engine_args={json.dumps(arguments)}", "model.engine=vllm").study.model.engine_args == arguments


def test_extra_body_takes_fields_of_tokens(load: Callable[..., Recipe]) -> None:
    fields = {"stop_token_ids": [1], "return_token_ids": True, "thinking_token_budget": 100, "bos_token": None}
    assert load(f"model.extra_body={json.dumps(fields)}").study.model.extra_body == fields
