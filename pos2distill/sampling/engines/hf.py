"""The reference engine: transformers' own `generate`, with one seed a request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from pos2distill.config import ModelSection
from pos2distill.models.load import load_model
from pos2distill.records import Tokens, TopKLogprobs
from pos2distill.sampling.engines.protocol import Completion, Failure, GenerationResult, SamplingParams

# What torch raises for one batch and not for the next: out of memory, and token ids that the model does not know.
_TROUBLE = (RuntimeError, IndexError)


class HfEngine:
    """Generates with transformers. Simple and exact rather than fast; the default on a laptop."""

    def __init__(self, model: ModelSection, *, threads: int = 1, device: str = "cpu") -> None:
        torch.set_num_threads(threads)
        self.device = device
        self.model: Any = load_model(model, device=device)

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        try:
            return list(self._generate(prompts, params, seeds))
        except _TROUBLE as error:
            if len(prompts) == 1:
                return [Failure.of(error)]
        # One bad prompt, or too many for the memory: each on its own gives the same samples.
        alone = [self.generate([prompt], params, [seed]) for prompt, seed in zip(prompts, seeds, strict=True)]
        return [reply for each in alone for reply in await each]

    def _generate(self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        input_ids_BL, attention_mask_BL = _pad_left(prompts)
        told = TopKRecorder(params.stored_top_k) if params.stored_top_k else None
        processors = LogitsProcessorList([told] if told else [])
        if params.temperature > 0:
            processors += [TemperatureLogitsWarper(params.temperature), TopPLogitsWarper(params.top_p)]
            processors.append(SeededGumbel(seeds))
        with torch.inference_mode():
            output: Tensor = self.model.generate(
                input_ids_BL.to(self.device),
                attention_mask=attention_mask_BL.to(self.device),
                # Drawn by the processors, so that each row has its own seed; the argmax of what they leave is the draw.
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=params.max_new_tokens,
                eos_token_id=list(params.stop_ids),
                pad_token_id=params.stop_ids[0],
                logits_processor=processors,
            )
        generated = output[:, input_ids_BL.shape[1] :].cpu().numpy().astype(np.int32)
        completions = [_until_stop(row, params.stop_ids) for row in generated]
        return told.beside(completions) if told else completions

    def shutdown(self) -> None:
        """Nothing to end: the model lives in this process."""


class TopKRecorder(LogitsProcessor):
    """Keeps the k likeliest tokens of every step, from scores that nothing has changed yet: it stands first."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) of the next token, as they came."""
        logprobs_BK, ids_BK = scores.float().log_softmax(-1).topk(self.k)
        self.steps.append((ids_BK.int().cpu(), logprobs_BK.cpu()))
        return scores

    def beside(self, completions: Sequence[Completion]) -> list[Completion]:
        """The batch's completions, each with the likeliest tokens at its positions."""
        ids_BSK, logprobs_BSK = (torch.stack(each, dim=1).numpy() for each in zip(*self.steps, strict=True))
        rows = zip(completions, ids_BSK, logprobs_BSK, strict=True)
        return [replace(each, top=TopKLogprobs(ids, logprobs)[: len(each.token_ids)]) for each, ids, logprobs in rows]


class SeededGumbel(LogitsProcessor):
    """Adds Gumbel noise from one generator a row: argmax(logits + noise) is a draw from softmax(logits)."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) of the next token, with each row's own noise."""
        shape = scores.shape[1:]
        noise = torch.stack([torch.empty(shape).exponential_(generator=each) for each in self.generators])
        return scores - noise.log().to(scores.device)


def _pad_left(prompts: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    input_ids_BL = torch.zeros(len(prompts), longest, dtype=torch.long)
    attention_mask_BL = torch.zeros_like(input_ids_BL)
    for row, prompt in enumerate(prompts):
        input_ids_BL[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        attention_mask_BL[row, longest - len(prompt) :] = 1
    return input_ids_BL, attention_mask_BL


def _until_stop(row: Tokens, stop_ids: Sequence[int]) -> Completion:
    stops = np.flatnonzero(np.isin(row, stop_ids))
    if len(stops) == 0:
        return Completion(row, "length")
    return Completion(row[: stops[0] + 1], "stop")
