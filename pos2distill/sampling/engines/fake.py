"""An engine without a model, for tests: a delay, a reply that is known beforehand, and faults."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from pos2distill.config import FakeSection
from pos2distill.records import Tokens, TopKLogprobs
from pos2distill.sampling.engines.protocol import Completion, EngineDied, Failure, GenerationResult, SamplingParams


class FakeEngine:
    """Replies with the prompt's last tokens, then a stop token, after `delay_s`; or fails as its settings say."""

    def __init__(self, settings: FakeSection) -> None:
        self.settings = settings
        self.calls = 0

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        self.calls += 1
        if self.settings.die_at_call and self.calls >= self.settings.die_at_call:
            raise EngineDied(f"the fake engine ends at call {self.settings.die_at_call}")
        await asyncio.sleep(self.settings.delay_s)
        return [self._reply(prompt, params, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def _reply(self, prompt: Tokens, params: SamplingParams, seed: int) -> GenerationResult:
        if self.settings.fail_every and seed % self.settings.fail_every == 0:
            return Failure(f"the fake engine fails at every seed that {self.settings.fail_every} divides")
        length = min(self.settings.reply_tokens, params.max_new_tokens - 1)
        token_ids = np.append(prompt[len(prompt) - length :], params.stop_ids[0]).astype(np.int32)
        return Completion(token_ids, "stop", _top_tokens(len(token_ids), params.stored_top_k))

    def shutdown(self) -> None:
        """Nothing to end."""


def _top_tokens(places: int, k: int) -> TopKLogprobs | None:
    """The first k tokens of any vocabulary, each as likely as all that are not told together."""
    if not k:
        return None
    return TopKLogprobs(
        np.tile(np.arange(k, dtype=np.int32), (places, 1)), np.full((places, k), -math.log(k + 1), np.float32)
    )
