"""Prompts as token ids, through the model's own chat template."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from pos2distill.errors import UserError
from pos2distill.records import Document, Example
from pos2distill.tasks.permutations import arrange


def _question_answering(question: str, documents: Sequence[Document]) -> str:
    # The benchmark's published wording (Liu et al. 2024, figure 2), so that numbers can be compared.
    shown = "\n".join(f"Document [{i}](Title: {d.title}) {d.text}" for i, d in enumerate(documents, start=1))
    return (
        "Write a high-quality answer for the given question using only the provided search results "
        f"(some of which might be irrelevant).\n\n{shown}\n\nQuestion: {question}\nAnswer:"
    )


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


_STYLES: dict[str, Callable[[str, Sequence[Document]], str]] = {
    "qa": _question_answering,
    "kv": _key_value,
    "plain": _plain,
}


class PromptBuilder:
    """Builds the prompt of an example with its gold document at any slot.

    Args:
        tokenizer: with a chat template.
        style: the wording around the documents.
        max_length: the model's context in tokens.
        reserve: tokens kept free for the response.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, style: Literal["qa", "kv", "plain"], *, max_length: int, reserve: int
    ) -> None:
        self.tokenizer = tokenizer
        self.style = style
        self.max_length = max_length
        self.reserve = reserve

    def __call__(
        self,
        example: Example,
        documents: int,
        slot: int,
        *,
        order: Literal["fixed", "reshuffled"] = "fixed",
        seed: int = 0,
    ) -> npt.NDArray[np.int32]:
        """Token ids of the chat prompt, up to and including the start of the assistant's turn.

        Raises:
            UserError: if prompt and response do not fit the model's context.
        """
        shown = arrange(example, documents, slot, order=order, seed=seed)
        message = {"role": "user", "content": _STYLES[self.style](example.question, shown)}
        encoded: Any = self.tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        if len(ids) + self.reserve > self.max_length:
            raise UserError(
                f"example {example.example_id}: prompt of {len(ids)} tokens ({documents} documents) + "
                f"{self.reserve} for the response exceed the model's context of {self.max_length}; "
                f"lower data.documents or max_new_tokens, or use a model with a longer context"
            )
        return ids
