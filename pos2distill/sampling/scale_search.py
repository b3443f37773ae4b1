"""Measures candidates in the search of LPES: accuracy by slot with given RoPE scales, all with one engine."""

import asyncio

import numpy as np
import pyarrow as pa

from pos2distill.config import Runtime, Study
from pos2distill.sampling.blocks import batches_of
from pos2distill.sampling.generate import GenerationOperator, require_responses
from pos2distill.sampling.operators import fetch_examples, greedy_params
from pos2distill.sampling.prompting import PromptSpec, build_evaluation_prompts
from pos2distill.store.artifacts import Artifact


class ScaledAccuracy:
    """Measures greedy responses to the same prompts, with other scales at every call."""

    def __init__(
        self, study: Study, runtime: Runtime, examples: Artifact, file: str, count: int, spec: PromptSpec
    ) -> None:
        """Build the prompts, and the operator that answers them.

        Args:
            study: its model must have scales; their values do not matter.
            examples, file: the artifact and its file; prompts are built from its first `count` examples.
        """
        params = greedy_params(study)
        index = pa.table({"index": np.arange(count)})
        prompts = build_evaluation_prompts(fetch_examples(index, examples, file), study, [spec], params.max_new_tokens)
        self.batches = batches_of(prompts, runtime.samplers.batch_size)
        self.generate = GenerationOperator(study, runtime, params)

    async def __call__(self, scales: tuple[float, ...]) -> list[float]:
        """The accuracy at each placement.

        Raises:
            UserError: the engine failed on a prompt.
        """
        responses = pa.concat_tables(
            await asyncio.gather(*(self.generate(batch, rope_scales=scales) for batch in self.batches))
        )
        require_responses(responses)
        placement_N = responses["placement"].to_numpy()
        correct_N = responses["correct"].to_numpy(zero_copy_only=False).astype(float)
        return [float(correct_N[placement_N == placement].mean()) for placement in np.unique(placement_N)]

    def close(self) -> None:
        """End the engine's processes."""
        self.generate.close()
