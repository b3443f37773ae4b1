"""The reference engine: `generate` of transformers, with one seed for each prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from pos2distill.config import ModelSection
from pos2distill.config.inference import InferenceSection
from pos2distill.errors import UserError
from pos2distill.models.load import load_model
from pos2distill.models.memory import is_out_of_memory, model_must_fit
from pos2distill.models.padding import pad_left
from pos2distill.models.rope.attention_buckets import MixBases, use_bases
from pos2distill.models.rope.layer_scales import scale_layers
from pos2distill.models.rope.ms_poe import apply_ms_poe
from pos2distill.models.trainable import longest_with_fixed_rope
from pos2distill.records import Tokens, TopKLogprobs
from pos2distill.sampling.engines.protocol import (
    Completion,
    EngineDied,
    Failure,
    GenerationResult,
    SamplingParams,
    engine_error_text,
)

# What torch raises because of one batch: RuntimeError when out of memory (torch.OutOfMemoryError is a subclass),
# IndexError for token ids outside the vocabulary. Later batches may succeed. A torch.AcceleratorError is a RuntimeError
# too, but unless memory was the cause, no later batch can succeed.
_BATCH_ERRORS = (RuntimeError, IndexError)

# How many prompt tokens a model reads in the time of one step of generation, by device: an upper estimate, so that a
# batch is divided only where that surely saves time. On GPUs, launching the kernels of a small model takes most of a
# step.
_STEP_TOKENS = {"cpu": 100, "cuda": 2000}


class HfEngine:
    """Generates with transformers. Simple and exact rather than fast.

    `evaluate --model` uses it unless a setting names another engine; elsewhere the default is vLLM.
    """

    def __init__(
        self,
        model: ModelSection,
        inference: InferenceSection,
        *,
        threads: int,
        device: str,
    ) -> None:
        torch.set_num_threads(threads)
        self.device = device
        self.path = model.path
        if inference.method == "ms_poe" and model.attention == "auto":
            # flash-attn's kernel in transformers 5.19 looks itself up by the name of the implementation, which changes.
            model = model.replace(attention="sdpa")
        with model_must_fit(
            f"{model.path}: does not fit in the memory of one GPU, or in its part of it (runtime.samplers.gpus); set "
            f"model.engine to vllm and runtime.vllm.tensor_parallel_size, or use larger GPUs"
        ):
            self.model: Any = load_model(model, device=device)
        self.longest_with_fixed_rope = longest_with_fixed_rope(self.model.config.get_text_config())
        self.ms_poe = None
        if inference.method == "ms_poe":
            self.ms_poe = apply_ms_poe(self.model, inference.ms_poe, model.path)
        self.bases = 1
        if inference.method == "attention_buckets":
            use_bases(self.model, inference.bases, model.path)
            self.bases = len(inference.bases)

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        if params.rope_scales:
            scale_layers(self.model, params.rope_scales, self.path)
        # How prompts are grouped does not change their responses, except by rounding.
        results: dict[int, GenerationResult] = {}
        for rows in self._groups([len(prompt) for prompt in prompts], params.max_new_tokens):
            group = self._generate_or_halve([prompts[row] for row in rows], params, [seeds[row] for row in rows])
            results |= dict(zip(rows, group, strict=True))
        return [results[row] for row in range(len(prompts))]

    def _groups(self, lengths: Sequence[int], max_new_tokens: int) -> list[list[int]]:
        """The indices of prompts that are generated for together."""
        # With several bases, each token of padding is computed once for each base.
        min_saving = _STEP_TOKENS[self.device] * max_new_tokens // self.bases
        groups = []
        for rows in group_by_rope(lengths, max_new_tokens, self.longest_with_fixed_rope):
            for group in group_by_length([lengths[row] for row in rows], min_saving):
                groups.append([rows[index] for index in group])
        return groups

    def _generate_or_halve(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        """Generate for the whole batch, or for each half if that fails: a prompt is invalid, or memory too small."""
        try:
            return list(self._generate(prompts, params, seeds))
        except _BATCH_ERRORS as error:
            if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
                # An illegal access or a lost GPU: this process cannot use the device again.
                reason = engine_error_text(error)
                raise EngineDied(f"the device failed ({reason}); run the same command again") from error
            # Failed samples are not asked for again, so a machine's memory must not decide which these are.
            if len(prompts) == 1 and is_out_of_memory(error):
                raise UserError(
                    f"the sampler has too little memory for one prompt of {len(prompts[0])} tokens; give it a larger "
                    f"GPU, or one of its own (runtime.samplers.gpus), or lower data.documents or the new tokens"
                ) from error
            if len(prompts) == 1:
                return [Failure.of(error)]
        half = len(prompts) // 2
        first = self._generate_or_halve(prompts[:half], params, seeds[:half])
        return first + self._generate_or_halve(prompts[half:], params, seeds[half:])

    def _generate(self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        # Each prompt is one row for each base. These rows are next to each other, and all get the mixture's next token.
        input_ids_BL, attention_mask_BL = (each.repeat_interleave(self.bases, 0) for each in pad_left(prompts))
        processors = LogitsProcessorList()
        if self.bases > 1:
            processors.append(MixBases(self.bases))
        recorder = TopKRecorder(params.stored_top_k)
        if params.stored_top_k:
            processors.append(recorder)  # before the others, so that it sees the model's own scores
        if params.temperature > 0:
            processors += [TemperatureLogitsWarper(params.temperature), TopPLogitsWarper(params.top_p)]
            processors.append(SeededGumbel(np.repeat(seeds, self.bases).tolist()))
        if self.ms_poe:
            self.ms_poe.begin(attention_mask_BL)
        with torch.inference_mode():
            output: Tensor = self.model.generate(
                input_ids_BL.to(self.device),
                attention_mask=attention_mask_BL.to(self.device),
                # Greedy: SeededGumbel has added noise to the scores, so their argmax is a sample. transformers 5.19
                # itself samples a whole batch from torch's global generator, so rows cannot have their own seeds.
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=params.max_new_tokens,
                eos_token_id=list(params.stop_ids),
                # Any id will do: `_cut_at_stop` removes all padding.
                pad_token_id=params.stop_ids[0],
                logits_processor=processors,
            )
        generated = output[:: self.bases, input_ids_BL.shape[1] :].cpu().numpy().astype(np.int32)
        completions = [_cut_at_stop(row, params.stop_ids) for row in generated]
        return recorder.attach(completions, every=self.bases) if params.stored_top_k else completions

    def shutdown(self) -> None:
        """Nothing to shut down: the model is in this process."""


class TopKRecorder(LogitsProcessor):
    """Records the k most likely tokens of every step, before temperature and noise change the scores."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record, and return the (B, V) scores of the next token unchanged."""
        logprobs_BK, ids_BK = scores.float().log_softmax(-1).topk(self.k)
        self.steps.append((ids_BK.int().cpu(), logprobs_BK.cpu()))
        return scores

    def attach(self, completions: Sequence[Completion], *, every: int = 1) -> list[Completion]:
        """Add the most likely tokens at their positions to the batch's completions.

        Args:
            every: number of rows of each completion.
        """
        ids_BSK = torch.stack([ids_BK[::every] for ids_BK, _ in self.steps], dim=1).numpy()
        logprobs_BSK = torch.stack([logprobs_BK[::every] for _, logprobs_BK in self.steps], dim=1).numpy()
        attached = []
        for completion, ids_SK, logprobs_SK in zip(completions, ids_BSK, logprobs_BSK, strict=True):
            # The batch runs until its longest response ends; positions after a response's own end are not part of it.
            top = TopKLogprobs(ids_SK, logprobs_SK)[: len(completion.token_ids)]
            attached.append(replace(completion, top=top))
        return attached


class SeededGumbel(LogitsProcessor):
    """Adds Gumbel noise to the scores: argmax(scores + noise) is a sample from softmax(scores).

    Each row has its own generator. Gumbel noise is -log(e) with e from the exponential distribution of rate 1.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The (B, V) scores of the next token plus noise."""
        # On the CPU, so that a seed gives the same noise whatever the device of the model.
        exponential_BV = torch.empty(scores.shape)
        for row_V, generator in zip(exponential_BV, self.generators, strict=True):
            row_V.exponential_(generator=generator)
        return scores - exponential_BV.log().to(scores.device)


def group_by_rope(lengths: Sequence[int], max_new_tokens: int, longest: int | None) -> list[list[int]]:
    """Group the indices of prompts so that RoPE's frequencies are those that each prompt has alone.

    The frequencies of `longrope` change once the longest row of a batch has more than `longest` tokens. So prompts that
    stay within them are apart from those that are longer from the start, and those that become longer are alone.

    Args:
        longest: see `longest_with_fixed_rope`.
    """
    if longest is None:
        return [list(range(len(lengths)))]
    within, beyond, alone = [], [], []
    for row, length in enumerate(lengths):
        if length + max_new_tokens <= longest:
            within.append(row)
        elif length > longest:
            beyond.append(row)
        else:
            alone.append([row])
    return [group for group in (within, beyond, *alone) if group]


def group_by_length(lengths: Sequence[int], min_saving: int) -> list[list[int]]:
    """Group the indices of prompts so that little padding is needed. Groups of short prompts come first.

    One batch may hold prompts without documents, with one and with twenty, and padding costs as much as real tokens. A
    group is divided where that saves the most padding, as long as it saves `min_saving` tokens, the cost of a group.
    """
    shortest_first = sorted(range(len(lengths)), key=lengths.__getitem__)
    return _divide(shortest_first, lengths, min_saving) if lengths else []


def _divide(rows: list[int], lengths: Sequence[int], min_saving: int) -> list[list[int]]:
    longest = lengths[rows[-1]]
    saved = [count * (longest - lengths[rows[count - 1]]) for count in range(1, len(rows))]
    if not saved or max(saved) < min_saving:
        return [rows]
    cut = saved.index(max(saved)) + 1
    return _divide(rows[:cut], lengths, min_saving) + _divide(rows[cut:], lengths, min_saving)


def _cut_at_stop(row: Tokens, stop_ids: Sequence[int]) -> Completion:
    """One row up to its first stop token. `generate` pads rows that end before the longest one."""
    stops = np.flatnonzero(np.isin(row, stop_ids))
    if len(stops) == 0:
        return Completion(row, "length")
    return Completion(row[: stops[0] + 1], "stop")
