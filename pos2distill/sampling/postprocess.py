"""From a completion to a judged answer: cut, judge, keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pos2distill.records import Tokens, TopKLogprobs
from pos2distill.sampling.engines.protocol import Failure, GenerationResult
from pos2distill.tasks.metrics import first_line, score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ProcessedResponse:
    """A response cut, judged and sorted.

    response_ids: the tokens that were kept, closed by the end-of-turn token; this is what is distilled.
    outcome: `kept`, or why not: `wrong`, `empty` (no text in it), `failed` (no response at all).
    top: of a kept response, where the engine told them, the likeliest tokens at the first S of its positions: those
        before which the engine had generated the very same tokens. Where it cut the line itself, that is all of them:
        what it would have gone on with is the distribution at the closing token. There is none at the closing token of
        a response that was cut at its greatest length, nor behind a token that was made anew.
    """

    text: str
    truncated_text: str
    response_ids: Tokens
    correct: bool
    f1: float
    outcome: Literal["kept", "wrong", "empty", "failed"]
    top: TopKLogprobs | None = None


class ResponseProcessor:
    """Cuts and judges completions.

    Retrieval (`sub_em`) keeps the first line alone, as the benchmarks judge it; a chain of thought (`em`) stays whole.

    Args:
        metric: of the data set.
        tokenizer: decodes; and encodes a cut line whose end falls inside a token.
        end_of_turn: the id that closes an assistant's turn.
        stop_ids: all ids that end generation.
        keep: `correct` keeps right answers only (paper), `all` every response with text in it.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        metric: Literal["sub_em", "em"],
        end_of_turn: int,
        stop_ids: Sequence[int],
        keep: Literal["correct", "all"],
    ) -> None:
        self.tokenizer = tokenizer
        self.metric = metric
        self.end_of_turn = end_of_turn
        self.stop_ids = frozenset(stop_ids)
        self.keep = keep

    def __call__(self, reply: GenerationResult, answers: Sequence[str]) -> ProcessedResponse:
        """Cut, judge, keep: in this order, so that what is cut away does not count."""
        if isinstance(reply, Failure):
            return ProcessedResponse("", "", np.empty(0, np.int32), False, 0.0, "failed")
        ids = reply.token_ids
        if len(ids) and int(ids[-1]) in self.stop_ids:
            ids = ids[:-1]
        text = self._decode(ids)
        truncated_text = first_line(text) if self.metric == "sub_em" else text.strip()
        kept_ids = self._cut(ids, text) if self.metric == "sub_em" else ids
        correct, f1 = score(self.metric, truncated_text, answers)
        outcome: Literal["kept", "wrong", "empty"] = "kept"
        if not truncated_text:
            outcome = "empty"
        elif not correct and self.keep == "correct":
            outcome = "wrong"
        response_ids = self._close(kept_ids)
        top = reply.top[: _seen(reply.token_ids, response_ids)] if reply.top and outcome == "kept" else None
        return ProcessedResponse(text, truncated_text, response_ids, correct, f1, outcome, top)

    def _cut(self, ids: Tokens, text: str) -> Tokens:
        """The longest run of sampled tokens inside the first line; the line tokenised anew where a token straddles."""
        line = text.split("\n", 1)[0]
        if line == text:
            return ids
        count = next(n for n in range(len(ids) + 1) if "\n" in self._decode(ids[:n])) - 1
        if self._decode(ids[:count]).strip() == line.strip():
            return ids[:count]
        return np.asarray(self.tokenizer(line, add_special_tokens=False)["input_ids"], np.int32)

    def _close(self, ids: Tokens) -> Tokens:
        return np.append(ids, self.end_of_turn).astype(np.int32)

    def _decode(self, ids: Tokens) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _seen(sampled_ids: Tokens, response_ids: Tokens) -> int:
    """How many positions of a response, from its first, the engine predicted after the very same tokens."""
    length = min(len(sampled_ids), len(response_ids))
    same = np.cumprod(sampled_ids[:length] == response_ids[:length])
    return min(length, int(same.sum()) + 1)
