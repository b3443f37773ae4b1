"""Prompts as token ids, through the model's own chat template."""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pos2distill.errors import UserError
from pos2distill.records import Document, Example, Slots, Tokens
from pos2distill.tasks.encoding import text_encoder
from pos2distill.tasks.permutations import arrange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _listed(documents: Sequence[Document]) -> str:
    # As the benchmark shows search results (Liu et al. 2024, figure 2): one a line, `Document [1](Title: …) …`.
    return "\n".join(f"Document [{n}](Title: {d.title}) {d.text}" for n, d in enumerate(documents, start=1))


# The benchmark's published wording too, so that numbers can be compared.
_ANSWER_FROM_RESULTS = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)


def _question_answering(question: str, documents: Sequence[Document]) -> str:
    return f"{_ANSWER_FROM_RESULTS}\n\n{_listed(documents)}\n\nQuestion: {question}\nAnswer:"


_ANSWER_BY_REASONING = "Answer the given question using only the documents below (some of which might be irrelevant). "
_END_WITH_THE_ANSWER = (
    'End with one line that begins with "The answer is: " and gives nothing but the answer, as short as possible.'
)


def _reasoning(question: str, documents: Sequence[Document]) -> str:
    instruction = (
        f"{_ANSWER_BY_REASONING}First identify the information in the documents that is relevant to the question and "
        f"list it. Then reason step by step. {_END_WITH_THE_ANSWER}"
    )
    return f"{instruction}\n\n{_listed(documents)}\n\nQuestion: {question}"


def _chain_of_citation(question: str, documents: Sequence[Document]) -> str:
    instruction = (
        f"{_ANSWER_BY_REASONING}Reason step by step, and after every claim name the document that supports it by its "
        f"number, for example [3]. {_END_WITH_THE_ANSWER}"
    )
    return f"{instruction}\n\n{_listed(documents)}\n\nQuestion: {question}"


def _key_value(question: str, documents: Sequence[Document]) -> str:
    # Published wording too (Liu et al. 2024, figure 6): one record a line, inside one JSON object.
    pairs = ",\n ".join(f"{json.dumps(d.title)}: {json.dumps(d.text)}" for d in documents)
    return (
        f"Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{{{pairs}}}"
        f'\n\nKey: "{question}"\nCorresponding value:'
    )


def _plain(question: str, documents: Sequence[Document]) -> str:
    shown = "".join(f"Title: {d.title}\n{d.text}\n" for d in documents)
    return f"{shown}Question: {question}"


# The user's message.
_STYLES: dict[str, Callable[[str, Sequence[Document]], str]] = {
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
        style: Literal["qa", "kv", "plain", "coc", "reasoning"],
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
        message = {"role": "user", "content": _STYLES[self.style](example.question, shown)}
        return str(self.tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
