import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pos2distill.config import ModelSection, Recipe
from pos2distill.errors import UserError
from pos2distill.models.chat import check_template, end_of_turn_id, response_opening, stop_token_ids
from pos2distill.models.load import load_tokenizer
from pos2distill.sampling.postprocess import response_processor
from tests.support.tiny import CHAT_TEMPLATE


def test_end_of_turn_id_is_read_from_the_template(tiny_model_path: str) -> None:
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    tokenizer.eos_token = "<s>"
    assert tokenizer.convert_ids_to_tokens(end_of_turn_id(tokenizer)) == "<|end|>"


def test_end_of_turn_id_falls_back_to_the_end_of_sequence(tiny_model_path: str) -> None:
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert tokenizer.convert_ids_to_tokens(end_of_turn_id(tokenizer)) == "<|end|>"
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="closes no assistant turn and the tokenizer has no eos_token"):
        end_of_turn_id(tokenizer)


def test_end_of_turn_id_is_the_next_turns_opening_where_generation_ends_with_it(tiny_model_path: str) -> None:
    """As with GLM, whose template writes nothing after an answer; its model then writes `<|user|>`."""
    tokenizer: Any = load_tokenizer(ModelSection(path=tiny_model_path))
    tokenizer.chat_template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    user, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    assert end_of_turn_id(tokenizer, [user, end]) == user
    assert end_of_turn_id(tokenizer, [end]) == end
    assert end_of_turn_id(tokenizer) == end


def test_end_of_turn_id_accepts_a_template_of_one_question(tiny_model_path: str) -> None:
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    tokenizer.chat_template = (
        "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    assert tokenizer.convert_ids_to_tokens(end_of_turn_id(tokenizer, [1])) == "<|end|>"


def test_response_processor_ends_responses_as_the_model_does(
    copy_model: Callable[..., ModelSection], make_recipe: Callable[..., Recipe]
) -> None:
    model = copy_model()
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    Path(model.path, "chat_template.jinja").write_text(template)
    tokenizer: Any = load_tokenizer(model)
    user, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    Path(model.path, "generation_config.json").write_text(json.dumps({"eos_token_id": [end, user]}))
    assert response_processor(make_recipe(model={"path": model.path}).study, tokenizer).end_of_turn == user


@pytest.mark.parametrize("listed", [7, [7, 4], None])
def test_stop_token_ids_include_those_of_the_generation_config(
    copy_model: Callable[..., ModelSection], listed: object
) -> None:
    model = copy_model()
    Path(model.path, "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    tokenizer = load_tokenizer(model)
    end = end_of_turn_id(tokenizer)
    assert end == 4
    tokenizer.eos_token = "<s>"
    assert stop_token_ids(model, tokenizer) == ([1, 4] if listed is None else [1, 4, 7])


THINKING = (
    CHAT_TEMPLATE.removesuffix("{% endif %}")
    + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)


def test_response_opening_is_that_of_the_template(tiny_model_path: str) -> None:
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    assert response_opening(tokenizer, {}) == ""
    tokenizer.chat_template = THINKING
    assert response_opening(tokenizer, {}) == "<think>"
    assert response_opening(tokenizer, {"enable_thinking": False}) == ""


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"enable_thinkin": False}, "enable_thinkin: the chat template of {} has no such variable; did you mean "),
        ({"tokenize": False}, "tokenize: is not for a user to set; leave it out"),
        ({"messages": []}, "messages: is not for a user to set; leave it out"),
    ],
)
def test_check_template_rejects_unknown_variables(tiny_model_path: str, kwargs: dict[str, Any], words: str) -> None:
    model = ModelSection(path=tiny_model_path, chat_template_kwargs=kwargs)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = THINKING
    with pytest.raises(UserError) as caught:
        check_template(tokenizer, model)
    assert str(caught.value).startswith(f"model.chat_template_kwargs: {words.format(tiny_model_path)}")
    check_template(tokenizer, model.model_copy(update={"chat_template_kwargs": {"enable_thinking": True}}))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        # As that of Gemma 2, and one that leaves the message out.
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}", True),
        ("{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}", False),
    ],
)
def test_check_template_rejects_a_system_message_that_is_not_shown(
    tiny_model_path: str, template: str, why: bool
) -> None:
    model = ModelSection(path=tiny_model_path)
    tokenizer = load_tokenizer(model)
    check_template(tokenizer, model, has_system=True)
    tokenizer.chat_template = template + CHAT_TEMPLATE
    check_template(tokenizer, model)
    with pytest.raises(UserError) as caught:
        check_template(tokenizer, model, has_system=True)
    reason = " (System role not supported)" if why else ""
    assert str(caught.value) == (
        f"data.template.system: the chat template of {tiny_model_path} takes no system message{reason}; write its text "
        f"into data.template.user"
    )
