"""Prompts as token ids, through the model's own chat template.

A prompt is made of parts, cut where a document's number begins and ends. Where a tokenizer cuts there too, whatever
stands around (see `cuts_at_numbers`), a part is tokenised once and used at every placement that shows it.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pos2distill.errors import UserError
from pos2distill.records import Document, Example, Slots, Tokens
from pos2distill.tasks.permutations import arrange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Parts in memory; those of one example are asked for one after the other.
_KNOWN = 4096
# What stands before a number, and before the part after it.
_GUARDS = ("[", "[1")
_OVER_A_CUT = re.compile(r"\[\d|(^|\[)\d+\]")
_TRIAL = ["A list:\n\nDocument [", "1", "](Title: a 1) b  \n\nDocument [", "23", "]( Title: 2) [3] \u00e9\u4e2d  \n"]


def _listed(before: str, documents: Sequence[Document], after: str) -> list[str]:
    # As the benchmark shows search results (Liu et al. 2024, figure 2): one a line, `Document [1](Title: …) …`.
    parts = [f"{before}Document ["]
    for number, document in enumerate(documents, start=1):
        end = "\nDocument [" if number < len(documents) else after
        parts += [str(number), f"](Title: {document.title}) {document.text}{end}"]
    return parts


# The benchmark's published wording too, so that numbers can be compared.
_ANSWER_FROM_RESULTS = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)


def _question_answering(question: str, documents: Sequence[Document]) -> list[str]:
    return _listed(f"{_ANSWER_FROM_RESULTS}\n\n", documents, f"\n\nQuestion: {question}\nAnswer:")


_ANSWER_BY_REASONING = "Answer the given question using only the documents below (some of which might be irrelevant). "
_END_WITH_THE_ANSWER = (
    'End with one line that begins with "The answer is: " and gives nothing but the answer, as short as possible.'
)


def _reasoning(question: str, documents: Sequence[Document]) -> list[str]:
    before = (
        f"{_ANSWER_BY_REASONING}First identify the information in the documents that is relevant to the question and "
        f"list it. Then reason step by step. {_END_WITH_THE_ANSWER}\n\n"
    )
    return _listed(before, documents, f"\n\nQuestion: {question}")


def _chain_of_citation(question: str, documents: Sequence[Document]) -> list[str]:
    before = (
        f"{_ANSWER_BY_REASONING}Reason step by step, and after every claim name the document that supports it by its "
        f"number, for example [3]. {_END_WITH_THE_ANSWER}\n\n"
    )
    return _listed(before, documents, f"\n\nQuestion: {question}")


def _key_value(question: str, documents: Sequence[Document]) -> list[str]:
    # Published wording too (Liu et al. 2024, figure 6): one record a line, inside one JSON object.
    pairs = ",\n ".join(f"{json.dumps(d.title)}: {json.dumps(d.text)}" for d in documents)
    return [
        f"Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{{{pairs}}}"
        f'\n\nKey: "{question}"\nCorresponding value:'
    ]


def _plain(question: str, documents: Sequence[Document]) -> list[str]:
    shown = "".join(f"Title: {d.title}\n{d.text}\n" for d in documents)
    return [f"{shown}Question: {question}"]


# The user's message in parts, cut at the documents' numbers if it has any.
_STYLES: dict[str, Callable[[str, Sequence[Document]], list[str]]] = {
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
        self.joint = JointParts(tokenizer) if cuts_at_numbers(tokenizer) else None

    def __call__(
        self,
        example: Example,
        documents: int,
        slots: Slots,
        *,
        order: Literal["fixed", "reshuffled"] = "fixed",
        seed: int = 0,
        built: tuple[Slots, Tokens] | None = None,
    ) -> Tokens:
        """Token ids of the chat prompt, up to and including the start of the assistant's turn.

        Args:
            slots: of the gold documents, 0-based, in hop order.
            order: of the distractors around them; see `arrange`.
            built: other slots, and the ids of the same example's prompt with them and the fixed order; where they show
                what a document's ids are, it is not tokenised again.
        Raises:
            PromptTooLong: if prompt and response do not fit the model's context.
        """
        parts = self._parts(example, arrange(example, documents, slots, order=order, seed=seed))
        if self.joint is None or len(parts) == 1:
            ids = _tokenize(self.tokenizer, "".join(parts))
        else:
            if built and not self.joint.knows(parts):
                self.joint.learn(self._parts(example, arrange(example, documents, built[0])), built[1])
            ids = self.joint(parts)
        if len(ids) + self.reserve > self.max_length:
            raise PromptTooLong(
                f"example {example.example_id}: prompt of {len(ids)} tokens ({documents} documents) + "
                f"{self.reserve} for the response exceed the model's context of {self.max_length}; "
                f"lower data.documents or max_new_tokens, or use a model with a longer context"
            )
        return ids

    def _parts(self, example: Example, documents: Sequence[Document]) -> list[str]:
        """The chat, cut at its numbers; or whole, where its style has none or its template changes the message."""
        parts = _STYLES[self.style](example.question, documents)
        content = "".join(parts)
        message = {"role": "user", "content": content}
        chat = str(self.tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
        before, found, after = chat.partition(content)
        if len(parts) == 1 or not found:
            return [chat]
        return [before + parts[0], *parts[1:-1], parts[-1] + after]


class JointParts:
    """Token ids of texts in parts: text, number, text, number, …, text. Each part is tokenised once.

    Right for tokenizers of which `cuts_at_numbers` is true.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self.known: dict[tuple[str, str], Tokens] = {}
        # Tokenised behind what ends the part before it, a part is in the midst of a text; the first part has no such.
        self.guards = {guard: len(_tokenize(tokenizer, guard)) for guard in _GUARDS} | {"": 0}

    def __call__(self, parts: Sequence[str]) -> Tokens:
        """The ids of the whole text."""
        return np.concatenate(self._tokenized(_guarded(parts)))

    def knows(self, parts: Sequence[str]) -> bool:
        """Whether nothing has to be tokenised."""
        return all(part in self.known for part in _guarded(parts))

    def learn(self, parts: Sequence[str], ids: Tokens) -> None:
        """Find the parts in the ids of their whole text, if its numbers stand in brackets once each, and in order."""
        guarded = _guarded(parts)
        first, *numbers = (part.tolist() for part in self._tokenized([guarded[0], *guarded[1::2]]))
        opens, closes = self._brackets[:, ids]
        starts = np.flatnonzero(opens) + 1
        starts = starts[starts >= len(first)]
        ends = np.append(np.flatnonzero(closes), len(ids))
        spans = zip(starts, ends[np.searchsorted(ends, starts)], strict=True)
        cuts = [span for span in spans if ids[slice(*span)].tolist() in numbers]
        if [ids[slice(*span)].tolist() for span in cuts] == numbers:
            # A copy, since the ids may be a view of a whole block of samples.
            self.known |= dict(zip(guarded, np.split(ids.copy(), np.ravel(cuts)), strict=True))

    def _tokenized(self, guarded: Sequence[tuple[str, str]]) -> list[Tokens]:
        if len(self.known) > _KNOWN:
            self.known.clear()
        if new := [part for part in dict.fromkeys(guarded) if part not in self.known]:
            encoded = self._encode([guard + text for guard, text in new])
            self.known |= {part: ids[self.guards[part[0]] :] for part, ids in zip(new, encoded, strict=True)}
        return [self.known[part] for part in guarded]

    def _encode(self, texts: list[str]) -> list[Tokens]:
        # Without the characters that each token stands for, which transformers asks for and which take as long again.
        encoded = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(each.ids, np.int32) for each in encoded]

    @functools.cached_property
    def _brackets(self) -> npt.NDArray[np.bool_]:
        """(2, V) whether a token ends with an opening bracket, whether it begins with a closing one."""
        vocabulary = self.tokenizer.get_vocab()
        brackets = np.zeros((2, max(vocabulary.values()) + 1), bool)  # some ids may be nobody's
        for token, token_id in vocabulary.items():
            brackets[:, token_id] = token.endswith("["), token.startswith("]")
        return brackets


def _guarded(parts: Sequence[str]) -> list[tuple[str, str]]:
    """Each part with what certainly stands before it."""
    return [(_GUARDS[(number - 1) % 2] if number else "", part) for number, part in enumerate(parts)]


def cuts_at_numbers(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the ids of `…[`, `3` and `](…` follow each other in the ids of `…[3](…`, whatever the dots stand for.

    So it is if the tokenizer merges pairs (BPE, without dropout), and no token of its vocabulary reaches over one of
    these two cuts: then no merge does, and merges on one side do not see the other. What splits texts before (regular
    expressions that scan from left to right) looks ahead at white space alone, of which there is none beside the cuts.
    That it does so, and what it adds at the beginning of a text, is tried out.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE" or backend.model.dropout:
        return False
    if any(_OVER_A_CUT.search(token) for token in tokenizer.get_vocab()):
        return False
    whole, parts = _tokenize(tokenizer, "".join(_TRIAL)), JointParts(tokenizer)(_TRIAL)
    return bool(np.array_equal(whole, parts))


def _tokenize(tokenizer: "PreTrainedTokenizerBase", text: str) -> Tokens:
    encoded: Any = tokenizer(text, add_special_tokens=False)
    return np.asarray(encoded["input_ids"], np.int32)
