"""The engine protocol: token ids in, token ids and a finish reason out, one seed for each prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pos2distill.errors import MachineError
from pos2distill.records import Tokens, TopKLogprobs


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled.

    Attributes:
        temperature: 0 for greedy decoding.
        stop_ids: any of them ends a response and is its last token.
        stored_top_k: number of most likely tokens to return at each position.
        rope_scales: for a search: the scales of this call and of later calls that name none. The model must have been
            loaded with scales; otherwise vLLM's engine rejects the call.
    """

    temperature: float
    top_p: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stored_top_k: int = 0
    rope_scales: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated response of S tokens.

    Attributes:
        token_ids: (S,) int32, with the stop token.
        finish_reason: `stop`, or `length` if `max_new_tokens` was reached.
        top: the `stored_top_k` most likely tokens at each of the S positions; None if `stored_top_k` is 0.
    """

    token_ids: Tokens
    finish_reason: Literal["stop", "length"]
    top: TopKLogprobs | None = None


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """A response of a server, which returns text and no token ids.

    Attributes:
        prompt_tokens, answer_tokens: as counted by the server; both None unless it counts both.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int | None
    answer_tokens: int | None


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine failed on this prompt only and continues with others.

    Attributes:
        error: the reason, in one line.
        is_refusal: a server refuses this prompt for its content, and will refuse it again.
        is_transient: a server did not answer, and may answer later.
    """

    error: str
    is_refusal: bool = False
    is_transient: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """A failure whose reason is `engine_error_text`."""
        return cls(engine_error_text(error))


def engine_error_text(error: BaseException) -> str:
    """The type and the first line of an exception, or of its cause if it has one."""
    # An engine's own exception often says less than its cause.
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


GenerationResult = Completion | TextCompletion | Failure


class EngineDied(MachineError):
    """The engine cannot serve any further call. Its process must end, so that a new one replaces it."""


class Engine(Protocol):
    """Generates responses. Calls of `generate` may overlap."""

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        """One result for each prompt, in order. A response depends on its prompt and its seed, not on its batch.

        Args:
            prompts: 1-D int32 token ids.
            seeds: one for each prompt, 0 to 2^63 - 1.
        Raises:
            EngineDied: no further call can succeed.
        """

    def shutdown(self) -> None:
        """End every process and thread that the engine started."""
