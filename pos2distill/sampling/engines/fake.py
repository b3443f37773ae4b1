"""An engine without a model, for tests: a delay, a predictable response, and programmable faults."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from pos2distill.config import FakeSection
from pos2distill.records import Tokens, TopKLogprobs
from pos2distill.sampling.engines.protocol import Completion, EngineDied, Failure, GenerationResult, SamplingParams


class FakeEngine:
    """Responds with the last `reply_tokens` tokens of the prompt and a stop token, after `delay_s`.

    `fail_every` fails the prompts whose seed it divides; from call number `die_at_call` on, every call raises.
    """

    def __init__(self, settings: FakeSection) -> None:
        self.settings = settings
        self.calls = 0

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        self.calls += 1
        if self.settings.die_at_call and self.calls >= self.settings.die_at_call:
            raise EngineDied(f"the fake engine ends at call {self.settings.die_at_call}")
        # Asynchronous, so that calls overlap as with a real engine.
        await asyncio.sleep(self.settings.delay_s)
        return [self._generate_one(prompt, params, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def _generate_one(self, prompt: Tokens, params: SamplingParams, seed: int) -> GenerationResult:
        if self.settings.fail_every and seed % self.settings.fail_every == 0:
            return Failure(f"the fake engine fails at every seed that {self.settings.fail_every} divides")
        length = min(self.settings.reply_tokens, params.max_new_tokens - 1)
        token_ids = np.append(prompt[len(prompt) - length :], params.stop_ids[0]).astype(np.int32)
        return Completion(token_ids, "stop", _uniform_top_k(len(token_ids), params.stored_top_k))

    def shutdown(self) -> None:
        """Nothing to shut down."""


def _uniform_top_k(positions: int, k: int) -> TopKLogprobs | None:
    """Tokens 0 to k - 1 with probability 1 / (k + 1) each; the rest of the vocabulary shares the remainder."""
    if k == 0:
        return None
    ids_SK = np.tile(np.arange(k, dtype=np.int32), (positions, 1))
    logprobs_SK = np.full((positions, k), -math.log(k + 1), np.float32)
    return TopKLogprobs(ids_SK, logprobs_SK)
