import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.chat import end_of_turn_id, stop_token_ids
from pos2distill.models.load import load_tokenizer


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
