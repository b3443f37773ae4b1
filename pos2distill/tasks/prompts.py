"""Prompts as token ids, through the model's own chat template."""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pos2distill.config import TemplateSection
from pos2distill.config.data import PromptStyle
from pos2distill.config.template import DOCUMENTS
from pos2distill.errors import UserError
from pos2distill.records import Document, Example, Slots, Tokens
from pos2distill.tasks.encoding import text_encoder
from pos2distill.tasks.permutations import arrange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Messages = Sequence[Mapping[str, str]]
"""The messages of a chat, each with `role` and `content`."""

Wording = PromptStyle | TemplateSection
"""The name of a built-in template, or a custom one."""

# Some chat templates write today's date (`strftime_now`). Here it is always the day on which Llama 3's own templates
# fall back, so that prompts of a study are the same on another day.
_TODAY = datetime.date(2024, 7, 26)

# As the benchmark shows search results (Liu et al. 2024, figure 2): one a line.
_SEARCH_RESULT = "Document [{number}](Title: {title}) {text}"
# The benchmark's published wording too, so that numbers can be compared.
_ANSWER_FROM_RESULTS = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)
_ANSWER_BY_REASONING = "Answer the given question using only the documents below (some of which might be irrelevant). "
# The wording of the benchmark's closed-book setting.
_QUESTION_ALONE = "Question: {question}\nAnswer:"
_END_WITH_THE_ANSWER = (
    'End with one line that begins with "The answer is: " and gives nothing but the answer, as short as possible.'
)
_REASONING = (
    f"{_ANSWER_BY_REASONING}First identify the information in the documents that is relevant to the question and "
    f"list it. Then reason step by step. {_END_WITH_THE_ANSWER}"
)
_CHAIN_OF_CITATION = (
    f"{_ANSWER_BY_REASONING}Reason step by step, and after every claim name the document that supports it by its "
    f"number, for example [3]. {_END_WITH_THE_ANSWER}"
)
_REASON_WITHOUT_DOCUMENTS = (
    f"Answer the given question. Reason step by step. {_END_WITH_THE_ANSWER}\n\nQuestion: {{question}}"
)
# Published wording too (Liu et al. 2024, figure 6): one record a line, inside one JSON object.
_KEY_VALUE = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
_KEY = 'Key: "{question}"\nCorresponding value:'

_BUILT_IN: dict[PromptStyle, TemplateSection] = {
    "qa": TemplateSection(
        user=f"{_ANSWER_FROM_RESULTS}\n\n{DOCUMENTS}\n\n{_QUESTION_ALONE}",
        document=_SEARCH_RESULT,
        separator="\n",
        without_documents=_QUESTION_ALONE,
    ),
    "kv": TemplateSection(
        user=f"{_KEY_VALUE}{DOCUMENTS}}}\n\n{_KEY}",
        document="{title}: {text}",
        separator=",\n ",
        without_documents=_KEY,
        json_strings=True,
    ),
    "plain": TemplateSection(
        user=f"{DOCUMENTS}Question: {{question}}",
        document="Title: {title}\n{text}\n",
        separator="",
        without_documents="Question: {question}",
    ),
    "coc": TemplateSection(
        user=f"{_CHAIN_OF_CITATION}\n\n{DOCUMENTS}\n\nQuestion: {{question}}",
        document=_SEARCH_RESULT,
        separator="\n",
        without_documents=_REASON_WITHOUT_DOCUMENTS,
    ),
    "reasoning": TemplateSection(
        user=f"{_REASONING}\n\n{DOCUMENTS}\n\nQuestion: {{question}}",
        document=_SEARCH_RESULT,
        separator="\n",
        without_documents=_REASON_WITHOUT_DOCUMENTS,
    ),
}
_FIELD = re.compile(r"\{(question|number|title|text)\}")


def to_template(wording: Wording) -> TemplateSection:
    """The template of a wording."""
    return wording if isinstance(wording, TemplateSection) else _BUILT_IN[wording]


def raw_messages(template: TemplateSection) -> dict[str, str]:
    """The texts of the messages with documents, by role, before anything is filled in; none of them is empty."""
    texts = {"system": template.system, "user": template.user}
    return {role: text for role, text in texts.items() if text}


@dataclass(frozen=True, slots=True)
class _Message:
    """A message in parts, which are joined as they are.

    documents: each with its separator; empty in a message that does not show them.
    """

    role: str
    before: str
    documents: Sequence[str] = ()
    after: str = ""

    @property
    def text(self) -> str:
        return self.before + "".join(self.documents) + self.after


def _to_messages(template: TemplateSection, question: str, documents: Sequence[Document]) -> list[_Message]:
    texts = raw_messages(template)
    if not documents:
        texts["user"] = template.without_documents
        texts = {role: text for role, text in texts.items() if DOCUMENTS not in text}
    messages = []
    for role, text in texts.items():
        # Before the question is filled in, which may contain the name of a field.
        before, shows_documents, after = text.partition(DOCUMENTS)
        shown = _show(template, documents) if shows_documents else ()
        messages.append(_Message(role, _fill(before, question=question), shown, _fill(after, question=question)))
    return messages


def _show(template: TemplateSection, documents: Sequence[Document]) -> list[str]:
    """Each document with the separator before the next one."""
    shown = []
    for number, document in enumerate(documents, start=1):
        title, text = document.title, document.text
        if template.json_strings:
            title, text = (json.dumps(part, ensure_ascii=False) for part in (title, text))
        separator = template.separator if number < len(documents) else ""
        shown.append(_fill(template.document, number=str(number), title=title, text=text) + separator)
    return shown


def _fill(template: str, **values: str) -> str:
    # In one pass: a question or a document may itself contain the name of a field.
    return _FIELD.sub(lambda field: values[field[1]], template)


BEFORE, AFTER = -1, -2
"""Parts of a prompt around its documents, as `PromptBuilder.locate` numbers them."""


class PromptTooLong(UserError):
    """A prompt and its response do not fit the model's context.

    problem: the message without the example, for callers that name it in another way.
    """

    problem = ""

    @classmethod
    def of(cls, example: Example, problem: str) -> "PromptTooLong":
        """The error of an example's prompt."""
        error = cls(f"example {example.example_id}: {problem}")
        error.problem = problem
        return error


class PromptBuilder:
    """Builds the prompt of an example with its gold documents at any slots.

    Args:
        tokenizer: a tokenizer with a chat template.
        wording: the text around the documents.
        chat_template_kwargs: `model.chat_template_kwargs`.
        max_length: the model's context in tokens.
        reserve: tokens kept free for the response.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        wording: Wording,
        *,
        max_length: int,
        reserve: int,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = to_template(wording)
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        if "strftime_now" in str(tokenizer.chat_template):
            self.chat_template_kwargs["strftime_now"] = _TODAY.strftime
        self.max_length = max_length
        self.reserve = reserve
        self.encode = text_encoder(tokenizer)

    def __call__(
        self,
        example: Example,
        documents: int,
        slots: Slots,
        *,
        order: int | Literal["reshuffled"] = 0,
        seed: int = 0,
        slot_of_rank: Slots = (),
    ) -> Tokens:
        """Token ids of the chat prompt, up to and including the start of the assistant's turn.

        Args:
            documents: number of documents in the prompt; 0: the question alone.
            slots: slots of the gold documents, 0-based, in hop order.
            order, slot_of_rank: see `arrange`.
        Raises:
            PromptTooLong: if prompt and response do not fit the model's context.
        """
        # The template's text already holds its special tokens, so none may be added around it.
        shown = arrange(example, documents, slots, order=order, seed=seed, slot_of_rank=slot_of_rank)
        ids = self.encode(self._chat(example, shown))
        if len(ids) + self.reserve > self.max_length:
            raise PromptTooLong.of(
                example,
                f"prompt of {len(ids)} tokens ({documents} documents) + {self.reserve} for the response exceed the "
                f"model's context of {self.max_length}; lower data.documents or max_new_tokens, or use a model with a "
                f"longer context",
            )
        return ids

    def _chat(self, example: Example, shown: Sequence[Document]) -> str:
        return self._render_chat(
            {each.role: each.text for each in _to_messages(self.template, example.question, shown)}
        )

    def _render_chat(self, texts: Mapping[str, str]) -> str:
        """The text of these messages in the model's chat template. texts: text of each message, by role."""
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        return str(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self.chat_template_kwargs
            )
        )

    def chat_frame(self) -> tuple[str, str]:
        """The text that the chat template writes before and after the message with the documents.

        It includes the other message, in which `{question}` is not filled in.
        """
        probe = "pos2distill-probe"  # which no chat template contains
        texts = {role: probe if DOCUMENTS in text else text for role, text in raw_messages(self.template).items()}
        before, _, after = self._render_chat(texts).partition(probe)
        return before, after

    def locate(self, example: Example, documents: int, slots: Slots) -> tuple[Tokens, npt.NDArray[np.int32]]:
        """The prompt of these slots, and which part of it each of its L tokens belongs to.

        Returns: token ids (L,), and parts (L,): the slot of the document that holds the token's first character (its
            title and the line breaks around it belong to a document), `BEFORE` or `AFTER` for tokens around them.
        Raises:
            UserError: if the tokenizer does not say where its tokens are in the text, or the chat template does not
                contain the message as it is.
        """
        shown = arrange(example, documents, slots)
        messages = _to_messages(self.template, example.question, shown)
        (message,) = (each for each in messages if each.documents)
        text = self._chat(example, shown)
        # Chat templates may strip the message.
        content = message.text
        found = text.find(content.strip())
        start = found - (len(content) - len(content.lstrip()))
        if found < 0:
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
        except NotImplementedError:  # raised by tokenizers in Python (transformers 5.19)
            raise UserError(
                f"{type(self.tokenizer).__name__} does not say where its tokens are in the text; set "
                f"analysis.attention to false"
            ) from None


class MessageBuilder:
    """Builds the messages of an example, for a server that applies the chat template itself.

    Args:
        wording, reserve: as in `PromptBuilder`.
        max_length: the model's context in tokens; None if it is not known.
    """

    def __init__(self, wording: Wording, *, max_length: int | None, reserve: int) -> None:
        self.template = to_template(wording)
        self.max_length = max_length
        self.reserve = reserve

    def __call__(
        self,
        example: Example,
        documents: int,
        slots: Slots,
        *,
        order: int | Literal["reshuffled"] = 0,
        seed: int = 0,
        slot_of_rank: Slots = (),
    ) -> Messages:
        """The messages.

        Args:
            documents, slots, order, seed, slot_of_rank: as in `PromptBuilder`.
        Raises:
            PromptTooLong: if even a token for each word would not fit the context. A prompt that is slightly too long
                is for the server to refuse.
        """
        shown = arrange(example, documents, slots, order=order, seed=seed, slot_of_rank=slot_of_rank)
        parts = _to_messages(self.template, example.question, shown)
        messages = [{"role": each.role, "content": each.text} for each in parts]
        tokens = fewest_tokens(joined_text(messages))
        if self.max_length and tokens + self.reserve > self.max_length:
            raise PromptTooLong.of(
                example,
                f"prompt of at least {tokens} tokens ({documents} documents) + {self.reserve} for the response exceed "
                f"the model's context of {self.max_length}; lower data.documents or max_new_tokens, or raise "
                f"model.max_length",
            )
        return messages


def joined_text(messages: Messages) -> str:
    """The texts of messages one below the other, as people are shown them."""
    return "\n\n".join(message["content"] for message in messages)


def fewest_tokens(text: str) -> int:
    """A lower bound on the tokens of a text for nearly every tokenizer: its words.

    Most tokenizers split at white space before anything else, so that no token holds two words. The exceptions have
    tokens of several words (SuperBPE, SentencePiece with `split_by_whitespace=false`).
    """
    return len(text.split())
