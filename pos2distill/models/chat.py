"""What a chat template writes: which tokens end an assistant's turn and generation, and how a response begins."""

import contextlib
import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from pos2distill.config import ModelSection
from pos2distill.errors import UserError, collapse_whitespace, did_you_mean_one
from pos2distill.models.architecture import load_config
from pos2distill.models.files import local_folder
from pos2distill.tasks.thoughts import begun_thought

_PROBE = "pos2distill-probe"
"""An assistant's message that no chat template contains."""


def check_template(tokenizer: PreTrainedTokenizerBase, model: ModelSection, *, has_system: bool = False) -> None:
    """Render a question and its answer with the chat template of a model.

    Args:
        has_system: prompts have a system message.
    Raises:
        UserError: if the template is not valid, does not show what the messages say, or does not know a variable of
            `model.chat_template_kwargs`.
    """
    model_name = model.path
    kwargs: Mapping[str, Any] = model.chat_template_kwargs
    if kwargs:
        _check_kwargs(tokenizer, model_name, kwargs)
    turns = [{"role": "user", "content": f"{_PROBE}-1"}, {"role": "assistant", "content": f"{_PROBE}-2"}]
    try:
        rendered = str(tokenizer.apply_chat_template(turns, tokenize=False, **kwargs))
    except Exception as error:  # a template is a program of the model's authors, and can raise anything
        reason = collapse_whitespace(error)
        raise UserError(
            f"{model_name}: its chat template cannot be used ({reason}); correct it or copy it again"
        ) from error
    for message in (f"{_PROBE}-1", f"{_PROBE}-2"):
        if message not in rendered:
            raise UserError(f"{model_name}: its chat template leaves out a message; correct it or copy it again")
    if has_system:
        _check_system(tokenizer, model_name, turns, kwargs)


def _check_system(
    tokenizer: PreTrainedTokenizerBase, model_name: str, turns: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]
) -> None:
    """Reject a chat template, which is valid otherwise, that takes no system message, as that of Gemma 2."""
    messages = [{"role": "system", "content": f"{_PROBE}-3"}, *map(dict, turns)]
    why = ""
    try:
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))
    except Exception as error:  # as above
        rendered, why = "", f" ({collapse_whitespace(error)})"
    if f"{_PROBE}-3" not in rendered:
        raise UserError(
            f"data.template.system: the chat template of {model_name} takes no system message{why}; write its text "
            f"into data.template.user"
        )


def _check_kwargs(tokenizer: PreTrainedTokenizerBase, model_name: str, kwargs: Mapping[str, Any]) -> None:
    """Reject variables that the chat template does not name: jinja would ignore a misspelled one."""
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    words = set(re.findall(r"[A-Za-z_]\w*", tokenizer.get_chat_template())) - reserved
    for name in kwargs:
        if name in reserved:
            raise UserError(f"model.chat_template_kwargs: {name}: is not for a user to set; leave it out")
        if name not in words:
            raise UserError(
                f"model.chat_template_kwargs: {name}: the chat template of {model_name} has no such variable"
                f"{did_you_mean_one(name, words)}"
            )


def response_opening(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> str:
    """`<think>` if the chat template begins each response with a thought, so that no response contains it; else ""."""
    turns = [{"role": "user", "content": "?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **kwargs)
    return begun_thought(str(prompt))


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase, listed: Collection[int] = ()) -> int:
    """The token that closes an assistant's turn, which often is not `eos_token`.

    Read from the chat template: the first special token after the assistant's message. Where there is none, the one
    that opens the user's next turn, if generation ends with it (GLM); otherwise `eos_token`.

    Args:
        listed: the tokens of generation_config.json that end generation.
    Raises:
        UserError: if there is none of these.
    """
    closing = _first_special_id(tokenizer, [])
    if closing is not None:
        return closing
    # A template may take a single question alone.
    with contextlib.suppress(TemplateError):
        opening = _first_special_id(tokenizer, [{"role": "user", "content": "?"}])
        if opening is not None and opening in listed:
            return opening
    if tokenizer.eos_token_id is None:
        raise UserError("the chat template closes no assistant turn and the tokenizer has no eos_token")
    return int(tokenizer.eos_token_id)


def _first_special_id(tokenizer: PreTrainedTokenizerBase, next_turns: Sequence[Mapping[str, str]]) -> int | None:
    """The first special token that the template writes after an assistant's message; None if it writes none."""
    # With a user's message, since some templates reject a conversation that the assistant begins.
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}, *map(dict, next_turns)]
    rendered = str(tokenizer.apply_chat_template(turns, tokenize=False))
    # The template can repeat a message, so the last occurrence counts.
    after_message = rendered.rpartition(_PROBE)[2]
    # Many tokenizers add their turn markers as tokens without listing them as special ones.
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for token in tokenizer(after_message, add_special_tokens=False)["input_ids"]:
        if token in special:
            return int(token)
    return None


def model_end_of_turn_id(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that closes an assistant's turn of a model (`end_of_turn_id`)."""
    return end_of_turn_id(tokenizer, _listed_stop_ids(model))


def stop_token_ids(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends generation: end of turn, end of sequence, and those of generation_config.json."""
    # Some instruct models list several end tokens there, and only one of them is `eos_token`.
    listed = _listed_stop_ids(model)
    stops = {*listed, end_of_turn_id(tokenizer, listed), tokenizer.eos_token_id}
    return sorted(stop for stop in stops if stop is not None)


def _listed_stop_ids(model: ModelSection) -> set[int]:
    """The tokens that end generation by a model's generation_config.json.

    Raises:
        UserError: if the file is not valid.
    """
    stops: set[int] = set()
    path = Path(local_folder(model, weights=False)) / "generation_config.json"
    if path.exists():
        try:
            listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError):
            raise UserError(f"{path}: expected a JSON object; correct it or copy it again") from None
        vocabulary = load_config(model).get_text_config().vocab_size
        ids = listed if isinstance(listed, list) else [listed]
        for token in ids if listed is not None else []:
            # In Python, True is an int.
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
                raise UserError(
                    f"{path}: expected as eos_token_id a whole number from 0 to {vocabulary - 1}, or a list of them, "
                    f"got {listed!r:.80}; correct it or copy it again"
                )
            stops.add(token)
    return stops
