"""What an engine is: token ids in, token ids and a finish reason out, one seed a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pos2distill.records import Tokens, TopKLogprobs


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `stop_ids` end a response and are part of it.

    stored_top_k: so many of the likeliest tokens are told at each position.
    """

    temperature: float
    top_p: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stored_top_k: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated response. `stop`: its last token is a stop token; `length`: it was cut at `max_new_tokens`.

    top: the likeliest tokens at each of its positions, where they were asked for.
    """

    token_ids: Tokens
    finish_reason: Literal["stop", "length"]
    top: TopKLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that the engine could not answer, while it goes on answering others. `error`: why, in one line."""

    error: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure that an exception tells of, or the exception behind it."""
        cause = error.__cause__ or error
        text = str(cause).strip()
        return cls(f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__)


GenerationResult = Completion | Failure


class EngineDied(Exception):
    """The engine is gone and answers nothing any more: its process must end, so that another takes its place."""


class Engine(Protocol):
    """Generates responses. Several calls may be under way at once."""

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        """One reply a prompt, in order. A prompt's sample depends on its own seed alone.

        Raises:
            EngineDied: if no further call can succeed.
        """

    def shutdown(self) -> None:
        """End every process and thread the engine started."""
