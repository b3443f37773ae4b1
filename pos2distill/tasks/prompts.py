"""Prompts as token ids, through the model's own chat template."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pos2distill.errors import UserError
from pos2distill.records import Document, Example, Slots, Tokens
from pos2distill.tasks.encoding import text_encoder
from pos2distill.tasks.permutations import arrange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class _Message:
    """The user's message in parts, which are joined as they are. documents: each with what separates it."""

    before: str
    documents: Sequence[str]
    after: str

    @property
    def text(self) -> str:
        return self.before + "".join(self.documents) + self.after


def _listed(documents: Sequence[Document]) -> list[str]:
    # As the benchmark shows search results (Liu et al. 2024, figure 2): one a line, `Document [1](Title: …) …`.
    lines = [f"Document [{n}](Title: {d.title}) {d.text}" for n, d in enumerate(documents, start=1)]
    return _separated(lines, "\n")


def _separated(parts: Sequence[str], separator: str) -> list[str]:
    """The parts, each but the last with the separator after it."""
    return [*(part + separator for part in parts[:-1]), *parts[-1:]]


# The benchmark's published wording too, so that numbers can be compared.
_ANSWER_FROM_RESULTS = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)


def _question_answering(question: str, documents: Sequence[Document]) -> _Message:
    return _Message(f"{_ANSWER_FROM_RESULTS}\n\n", _listed(documents), f"\n\nQuestion: {question}\nAnswer:")


_ANSWER_BY_REASONING = "Answer the given question using only the documents below (some of which might be irrelevant). "
_END_WITH_THE_ANSWER = (
    'End with one line that begins with "The answer is: " and gives nothing but the answer, as short as possible.'
)


def _reasoning(question: str, documents: Sequence[Document]) -> _Message:
    instruction = (
        f"{_ANSWER_BY_REASONING}First identify the information in the documents that is relevant to the question and "
        f"list it. Then reason step by step. {_END_WITH_THE_ANSWER}"
    )
    return _Message(f"{instruction}\n\n", _listed(documents), f"\n\nQuestion: {question}")


def _chain_of_citation(question: str, documents: Sequence[Document]) -> _Message:
    instruction = (
        f"{_ANSWER_BY_REASONING}Reason step by step, and after every claim name the document that supports it by its "
        f"number, for example [3]. {_END_WITH_THE_ANSWER}"
    )
    return _Message(f"{instruction}\n\n", _listed(documents), f"\n\nQuestion: {question}")


def _key_value(question: str, documents: Sequence[Document]) -> _Message:
    # Published wording too (Liu et al. 2024, figure 6): one record a line, inside one JSON object.
    pairs = _separated([f"{json.dumps(d.title)}: {json.dumps(d.text)}" for d in documents], ",\n ")
    instruction = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
    return _Message(instruction, pairs, f'}}\n\nKey: "{question}"\nCorresponding value:')


def _plain(question: str, documents: Sequence[Document]) -> _Message:
    return _Message("", [f"Title: {d.title}\n{d.text}\n" for d in documents], f"Question: {question}")


BEFORE, AFTER = -1, -2
"""Parts of a prompt around its documents, as `PromptBuilder.locate` numbers them."""


PromptStyle = Literal["qa", "kv", "plain", "coc", "reasoning"]

# The user's message.
_STYLES: dict[str, Callable[[str, Sequence[Document]], _Message]] = {
    "qa": _question_answering,
    "kv": _key_value,
    "plain": _plain,
    "coc": _chain_of_citation,
    "reasoning": _reasoning,
}


class PromptTooLong(UserError):
    """A prompt and its response do not fit the model's context."""


class PromptBuilder:
    """Builds the prompt of an example with its gold documents at any slots.

    Args:
        tokenizer: with a chat template.
        style: the wording around the documents.
        max_length: the model's context in tokens.
        reserve: tokens kept free for the response.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        style: PromptStyle,
        *,
        max_length: int,
        reserve: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.style = style
        self.max_length = max_length
        self.reserve = reserve
        self.encode = text_encoder(tokenizer)

    def __call__(
        self,
        example: Example,
        documents: int,
        slots: Slots,
        *,
        order: Literal["fixed", "reshuffled"] = "fixed",
        seed: int = 0,
        slot_of_rank: Slots = (),
    ) -> Tokens:
        """Token ids of the chat prompt, up to and including the start of the assistant's turn.

        Args:
            slots: of the gold documents, 0-based, in hop order.
            order, slot_of_rank: see `arrange`.
        Raises:
            PromptTooLong: if prompt and response do not fit the model's context.
        """
        # The template's text already holds its special tokens, so none may be added around it.
        shown = arrange(example, documents, slots, order=order, seed=seed, slot_of_rank=slot_of_rank)
        ids = self.encode(self._chat(example, shown))
        if len(ids) + self.reserve > self.max_length:
            raise PromptTooLong(
                f"example {example.example_id}: prompt of {len(ids)} tokens ({documents} documents) + "
                f"{self.reserve} for the response exceed the model's context of {self.max_length}; "
                f"lower data.documents or max_new_tokens, or use a model with a longer context"
            )
        return ids

    def _chat(self, example: Example, shown: Sequence[Document]) -> str:
        message = {"role": "user", "content": _STYLES[self.style](example.question, shown).text}
        return str(self.tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))

    def locate(self, example: Example, documents: int, slots: Slots) -> tuple[Tokens, npt.NDArray[np.int32]]:
        """The prompt of these slots, and which part of it each of its L tokens belongs to.

        Returns: token ids (L,), and parts (L,): the slot of the document that holds the token's first character (its
            title and the line breaks around it belong to a document), `BEFORE` or `AFTER` for tokens around them.
        Raises:
            UserError: if the tokenizer does not say where its tokens are in the text, or the chat template does not
                contain the message as it is.
        """
        shown = arrange(example, documents, slots)
        message = _STYLES[self.style](example.question, shown)
        text = self._chat(example, shown)
        # Templates may strip the message, whose first part never begins with white space.
        start = text.find(message.text.rstrip())
        if start < 0:
            raise UserError(
                f"example {example.example_id}: its documents cannot be located in the prompt, because the chat "
                f"template changes the message"
            )
        encoded: Any = self._encode_with_offsets(text)
        starts = start + len(message.before) + np.cumsum([0, *map(len, message.documents)])
        # The index of the last boundary at or before each token's first character.
        first_character_L = np.asarray(encoded["offset_mapping"])[:, 0]
        part_L = np.searchsorted(starts, first_character_L, side="right") - 1
        part_L[part_L == documents] = AFTER
        return np.asarray(encoded["input_ids"], np.int32), part_L.astype(np.int32)

    def _encode_with_offsets(self, text: str) -> Any:
        try:
            return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:  # of tokenizers in Python (transformers 5.19)
            raise UserError(
                f"{type(self.tokenizer).__name__} does not say where its tokens are in the text; set "
                f"analysis.attention to false"
            ) from None


class MessageBuilder:
    """Builds the user's message of an example, for a server that applies the chat template itself.

    Args:
        style, reserve: as of `PromptBuilder`.
        max_length: the model's context in tokens; None if it is not known.
    """

    def __init__(self, style: PromptStyle, *, max_length: int | None, reserve: int) -> None:
        self.style = style
        self.max_length = max_length
        self.reserve = reserve

    def __call__(
        self,
        example: Example,
        documents: int,
        slots: Slots,
        *,
        order: Literal["fixed", "reshuffled"] = "fixed",
        seed: int = 0,
        slot_of_rank: Slots = (),
    ) -> str:
        """The message.

        Args:
            slots, order, seed, slot_of_rank: as of `PromptBuilder`.
        Raises:
            PromptTooLong: if even a token for each word would not fit the context. A prompt that is slightly too long
                is for the server to refuse.
        """
        shown = arrange(example, documents, slots, order=order, seed=seed, slot_of_rank=slot_of_rank)
        message = _STYLES[self.style](example.question, shown).text
        if self.max_length and fewest_tokens(message) + self.reserve > self.max_length:
            raise PromptTooLong(
                f"example {example.example_id}: prompt of at least {fewest_tokens(message)} tokens ({documents} "
                f"documents) + {self.reserve} for the response exceed the model's context of {self.max_length}; "
                f"lower data.documents or max_new_tokens, or raise model.max_length"
            )
        return message


def fewest_tokens(text: str) -> int:
    """A lower bound on the tokens of a text whatever the tokenizer: its words.

    Tokenizers of language models split at white space before anything else, so no token holds two words.
    """
    return len(text.split())
