"""Post-processing of generated responses: truncate, score, filter."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pos2distill.config import Study
from pos2distill.config.data import Metric
from pos2distill.records import Tokens, TopKLogprobs
from pos2distill.sampling.engines.protocol import Completion, Failure, GenerationResult, TextCompletion
from pos2distill.tasks.metrics import score
from pos2distill.tasks.thoughts import SPECIAL_MARKS, answer_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ProcessedResponse:
    """A response after truncation, scoring and filtering.

    Attributes:
        text: the generated text, after the `<think>` that the chat template may have written before it.
        truncated_text: the part that is kept; its answer is scored. A thought before the answer is kept with it.
        response_ids: token ids of the truncated text and the end-of-turn token; the student is distilled on these. A
            text that was cut at `max_new_tokens` has no end-of-turn token, so that no student learns to stop there.
        outcome: `kept`, or the reason why not: `wrong`, `empty` (no text) or `failed` (no response). Where a model on a
            server is evaluated also `refused` (the server refuses the prompt for its content) or `unanswered` (the
            server did not answer, and may later).
        top: the most likely tokens at the first S positions of `response_ids`; None if the engine recorded none or the
            response is not kept. The engine's distribution at a position is valid only if the engine generated the same
            tokens before that position, so S is the length of the common prefix of generated and kept tokens, plus 1. S
            is less than the length of `response_ids` if a truncated line was tokenized again.
    """

    text: str
    truncated_text: str
    response_ids: Tokens
    correct: bool
    f1: float
    outcome: Literal["kept", "wrong", "empty", "failed", "refused", "unanswered"]
    top: TopKLogprobs | None = None


_NO_TOKENS = np.empty(0, np.int32)
_FAILED = ProcessedResponse("", "", _NO_TOKENS, False, 0.0, "failed")
_REFUSED = ProcessedResponse("", "", _NO_TOKENS, False, 0.0, "refused")
_UNANSWERED = ProcessedResponse("", "", _NO_TOKENS, False, 0.0, "unanswered")


def process_text(
    result: GenerationResult, gold_answers: Sequence[str], *, metric: Metric, opening: str = ""
) -> ProcessedResponse:
    """Truncate and score a server's response as `ResponseProcessor` does. It has no token ids, so none are kept."""
    if isinstance(result, Failure):
        if result.is_refusal:
            return _REFUSED
        return _UNANSWERED if result.is_transient else _FAILED
    assert isinstance(result, TextCompletion)
    text = opening + result.text
    truncated_text = text[: _end(metric, text)].strip()
    correct, f1 = score(metric, truncated_text, gold_answers)
    outcome: Literal["kept", "empty"] = "kept" if truncated_text.removeprefix(opening).strip() else "empty"
    return ProcessedResponse(text, truncated_text, _NO_TOKENS, correct, f1, outcome)


def _end(metric: Metric, text: str) -> int | None:
    """The end of the kept part of a text: with `sub_em` the first line of the answer that has text.

    Returns: None if the whole text is kept.
    """
    if metric != "sub_em":
        return None
    start = answer_start(text)
    start += len(text[start:]) - len(text[start:].lstrip())
    end = text.find("\n", start)
    return end if end >= 0 else None


class ResponseProcessor:
    """Truncates, scores and filters generation results.

    With the metric of questions among documents (`sub_em`), only the first line of an answer is kept, since the
    benchmarks score that line; with other metrics, that of key-value retrieval too, the whole answer is kept. A thought
    before the answer is kept as it is, since the answer depends on it, but it is not scored.

    Args:
        tokenizer: decodes token ids, and encodes a truncated line that ends inside a token.
        metric: the metric of the data set.
        end_of_turn: the id that ends an assistant's turn.
        stop_ids: all ids that end generation.
        keep: `correct` keeps correct answers only (paper), `all` keeps every response with text.
        opening: the start of the response that the chat template has already written (`begun_thought`).
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        metric: Metric,
        end_of_turn: int,
        stop_ids: Sequence[int],
        keep: Literal["correct", "all"],
        opening: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.metric = metric
        self.end_of_turn = end_of_turn
        self.stop_ids = frozenset(stop_ids)
        self.keep = keep
        self.opening = opening
        # Not `all_special_tokens`, which has the named ones only.
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.marks = {number: SPECIAL_MARKS[token] for number, token in special.items() if token in SPECIAL_MARKS}

    def __call__(self, result: GenerationResult, gold_answers: Sequence[str]) -> ProcessedResponse:
        """Process one result.

        Args:
            gold_answers: accepted answers to the question.
        """
        if isinstance(result, Failure):
            return _FAILED
        assert isinstance(result, Completion)
        ids = result.token_ids
        # The stop token is not part of the text. `end_of_turn` replaces it below, whichever stop token it was.
        if len(ids) and int(ids[-1]) in self.stop_ids:
            ids = ids[:-1]
        text = self.opening + self._decode(ids)
        end = _end(self.metric, text)
        truncated_text = text[:end].strip()
        # A line is complete when the next one has begun.
        is_complete = result.finish_reason != "length" or end is not None
        kept_ids = ids if end is None else self._truncate_ids(ids, text[len(self.opening) : end])
        # After truncation, so that a correct answer on a later line does not count.
        correct, f1 = score(self.metric, truncated_text, gold_answers)
        outcome: Literal["kept", "wrong", "empty"] = "kept"
        if not truncated_text.removeprefix(self.opening).strip():
            outcome = "empty"
        elif not correct and self.keep == "correct":
            outcome = "wrong"
        closing = [self.end_of_turn] if is_complete else []
        response_ids = np.append(kept_ids, closing).astype(np.int32)
        top = None
        if result.top is not None and outcome == "kept":
            top = result.top[: _known_positions(result.token_ids, response_ids)]
        return ProcessedResponse(text, truncated_text, response_ids, correct, f1, outcome, top)

    def _truncate_ids(self, ids: Tokens, kept: str) -> Tokens:
        """The generated tokens up to the line break that follows the kept text.

        If a token crosses the line break, the text is tokenized again, but for a thought between special tokens.
        """

        # Decoded from the beginning each time, since one character can consist of several tokens.
        def reaches_line_break(count: int) -> bool:
            return "\n" in self._decode(ids[: count + 1])[len(kept) :]

        count = bisect.bisect_left(range(len(ids)), True, key=reaches_line_break)
        if self._decode(ids[:count]).strip() == kept.strip():
            return ids[:count]
        marks = np.flatnonzero(np.isin(ids[:count], list(self.marks)))
        thought = ids[: int(marks[-1]) + 1] if len(marks) else ids[:0]
        rest = kept[len(self._decode(thought)) :]
        return np.append(thought, self.tokenizer(rest, add_special_tokens=False)["input_ids"]).astype(np.int32)

    def _decode(self, ids: Tokens) -> str:
        """The text without special tokens, but with the marks of a thought."""
        if not self.marks:
            return self._decode_plain(ids)
        parts, start = [], 0
        for position in np.flatnonzero(np.isin(ids, list(self.marks))).tolist():
            parts += [self._decode_plain(ids[start:position]), self.marks[int(ids[position])]]
            start = position + 1
        return "".join([*parts, self._decode_plain(ids[start:])])

    def _decode_plain(self, ids: Tokens) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def response_processor(study: Study, tokenizer: "PreTrainedTokenizerBase") -> ResponseProcessor:
    """Build the processor of a study's responses.

    Args:
        tokenizer: the tokenizer of the study's model.
    """
    from pos2distill.models.chat import model_end_of_turn_id, response_opening, stop_token_ids

    return ResponseProcessor(
        tokenizer,
        metric=study.data.metric,
        end_of_turn=model_end_of_turn_id(study.model, tokenizer),
        stop_ids=stop_token_ids(study.model, tokenizer),
        keep=study.sampling.keep,
        opening=response_opening(tokenizer, study.model.chat_template_kwargs),
    )


def _known_positions(sampled_ids: Tokens, response_ids: Tokens) -> int:
    """Number of leading positions of a response at which the engine's distribution is valid.

    A distribution is valid if all tokens before its position are equal, so the last valid one is at the first
    difference.
    """
    length = min(len(sampled_ids), len(response_ids))
    differences = np.flatnonzero(sampled_ids[:length] != response_ids[:length])
    if len(differences) == 0:
        return length
    return int(differences[0]) + 1
