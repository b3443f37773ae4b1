"""The production engine: vLLM's asynchronous engine, so that batches overlap. The only importer of vllm."""

import asyncio
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pos2distill.config import ModelSection, VllmSection
from pos2distill.models.files import local_folder
from pos2distill.models.load import context_length
from pos2distill.records import Tokens, TopKLogprobs
from pos2distill.sampling.engines.protocol import Completion, EngineDied, Failure, GenerationResult, SamplingParams
from pos2distill.sampling.reaper import start_reaper

# vLLM's seeds are signed 64-bit in name but torch generators of some backends take 32 bits.
_SEED_MASK = 2**31 - 1


class VllmEngine:
    """Generates with vLLM. Token ids go in and come out; no text is made or parsed."""

    def __init__(self, model: ModelSection, settings: VllmSection, *, threads: int = 1, device: str = "cpu") -> None:
        if device == "cpu":
            # Read by the CPU build when it starts.
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.cpu_kv_cache_gib)
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import SamplingParams as VllmParams
        from vllm import TokensPrompt
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError

        self._params, self._prompt, self._kind = VllmParams, TokensPrompt, RequestOutputKind
        self._dead, self._refused = EngineDeadError, (VLLMError, ValueError)
        self._numbers = itertools.count()
        arguments = AsyncEngineArgs(
            model=local_folder(model),
            dtype=model.dtype,
            max_model_len=context_length(model),
            trust_remote_code=model.trust_remote_code,
            skip_tokenizer_init=True,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel_size=settings.tensor_parallel_size,
            # Never Ray's executor, which would look for GPUs on other nodes: the actor has its own.
            distributed_executor_backend="mp" if settings.tensor_parallel_size > 1 else None,
            enforce_eager=settings.enforce_eager,
            enable_prefix_caching=settings.enable_prefix_caching,
            max_num_seqs=settings.max_num_seqs,
            logprobs_mode="raw_logprobs",  # of the model itself, before temperature and top-p
            max_logprobs=-1,  # as many as a request asks for
            # A seeded prompt that is read in two steps kills the CPU build: its generators cannot go back (vLLM 0.32).
            enable_chunked_prefill=False if device == "cpu" else None,
            generation_config="vllm",  # our sampling settings, not defaults from the model's folder
            disable_log_stats=True,
        )
        start_reaper()  # before there is anything that it could miss
        # As vLLM's own class for many prompts at once: more tokens in a step than a server takes.
        self.engine = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        tasks = (self._generate_one(prompt, params, seed) for prompt, seed in zip(prompts, seeds, strict=True))
        return list(await asyncio.gather(*tasks))

    async def _generate_one(self, prompt: Tokens, params: SamplingParams, seed: int) -> GenerationResult:
        try:
            return await self._complete(prompt, params, seed)
        except self._dead as error:
            raise EngineDied(str(error)) from error
        except self._refused as error:
            return Failure.of(error)

    async def _complete(self, prompt: Tokens, params: SamplingParams, seed: int) -> GenerationResult:
        request = self._params(
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_new_tokens,
            seed=seed & _SEED_MASK,
            stop_token_ids=list(params.stop_ids),
            detokenize=False,
            logprobs=params.stored_top_k or None,
            flat_logprobs=True,
            output_kind=self._kind.FINAL_ONLY,
        )
        stream = self.engine.generate(
            self._prompt(prompt_token_ids=prompt.tolist()), request, request_id=str(next(self._numbers))
        )
        async for output in stream:
            last = output.outputs[0]
        if last.finish_reason not in ("stop", "length"):
            return Failure(f"vLLM ended the request with {last.finish_reason!r}")
        token_ids = np.asarray(last.token_ids, np.int32)
        return Completion(token_ids, last.finish_reason, _top_tokens(last.logprobs, len(token_ids)))

    def shutdown(self) -> None:
        """End the engine's processes in good order."""
        self.engine.shutdown()


def _top_tokens(flat: Any, places: int) -> TopKLogprobs | None:
    """From vLLM's flat lists: at each position the token drawn, then the likeliest ones, which may hold it too."""
    if flat is None:
        return None
    ids, logprobs = (np.asarray(each).reshape(places, -1)[:, 1:] for each in (flat.token_ids, flat.logprobs))
    return TopKLogprobs(ids.astype(np.int32), logprobs.astype(np.float32))
