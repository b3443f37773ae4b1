"""An engine without a model, for tests: a delay, and a reply that is known beforehand."""

import asyncio
from collections.abc import Sequence

import numpy as np

from pos2distill.config import FakeSection
from pos2distill.models.responses import Tokens
from pos2distill.sampling.engine import Completion, SamplingParams


class FakeEngine:
    """Replies with the prompt's last tokens, then a stop token, after `delay_s`."""

    def __init__(self, settings: FakeSection) -> None:
        self.settings = settings

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        await asyncio.sleep(self.settings.delay_s)
        length = min(self.settings.reply_tokens, params.max_new_tokens - 1)
        stop = params.stop_ids[0]
        return [
            Completion(np.append(prompt[len(prompt) - length :], stop).astype(np.int32), "stop") for prompt in prompts
        ]

    def shutdown(self) -> None:
        """Nothing to end."""
