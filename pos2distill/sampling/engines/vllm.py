"""The production engine: the asynchronous engine of vLLM, so that batches overlap."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic

from pos2distill.config import ModelSection, VllmSection
from pos2distill.environment import set_vllm_variables
from pos2distill.errors import MachineError, UserError
from pos2distill.models.architecture import context_length, load_config
from pos2distill.models.rope.layer_scales import resolve_scales
from pos2distill.records import Tokens, TopKLogprobs
from pos2distill.sampling.engines.protocol import (
    Completion,
    EngineDied,
    Failure,
    GenerationResult,
    SamplingParams,
    engine_error_text,
)
from pos2distill.sampling.engines.vllm_arguments import engine_arguments
from pos2distill.sampling.reaper import start_reaper

# vLLM 0.32 accepts signed 64-bit seeds, but the torch generators of some backends take 32 bits.
_SEED_MASK = 2**31 - 1


class _RequestLost(Exception):
    """The engine gave up a request, and the prompt was not the reason."""


@dataclass(frozen=True, slots=True)
class VllmClasses:
    """The classes of vLLM that calls need. `VllmEngine.start` imports them, as importing vllm takes seconds.

    Attributes:
        params: the sampling parameters of a request.
        prompt: a prompt of token ids.
        output_kind: which outputs of a request are returned.
        request_errors: raised for a prompt that the engine cannot use.
        engine_error: raised for any other failure, and also for such a prompt, which is then the cause.
        dead_error: raised by an engine that has ended.
    """

    params: Any
    prompt: Any
    output_kind: Any
    request_errors: tuple[type[Exception], ...]
    engine_error: type[Exception]
    dead_error: type[Exception]


class VllmEngine:
    """Generates with vLLM, on token ids only: vLLM neither tokenizes nor decodes text.

    Args:
        engine: vLLM's own engine.
        classes: the classes of the same vLLM.
        scales: RoPE scales that the engine was built with; empty for none.
        stall_s: seconds without a finished answer after which the engine counts as dead.
    """

    def __init__(self, engine: Any, classes: VllmClasses, *, scales: tuple[float, ...], stall_s: float) -> None:
        self.engine = engine
        self._classes = classes
        self._scales = scales
        self._stall_s = stall_s
        self._request_numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop in which calls run
        self._calls = 0  # number of running calls
        self._calls_changed = asyncio.Condition()
        self._deadlines: set[asyncio.Timeout] = set()  # one for each running call

    @classmethod
    def start(
        cls, model: ModelSection, settings: VllmSection, *, threads: int = 1, device: str = "cpu"
    ) -> "VllmEngine":
        """Start vLLM's processes on a model.

        Raises:
            MachineError: if vLLM could not start.
            UserError: if vLLM refuses the model with these settings.
        """
        set_vllm_variables(device=device, threads=threads, cpu_kv_cache_gib=settings.cpu_kv_cache_gib)
        from vllm import SamplingParams as VllmParams
        from vllm import TokensPrompt
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        classes = VllmClasses(
            params=VllmParams,
            prompt=TokensPrompt,
            output_kind=RequestOutputKind,
            request_errors=(VLLMClientError, ValueError),
            engine_error=EngineGenerateError,
            dead_error=EngineDeadError,
        )
        # The scales of the study replace those of the model's folder, which vLLM reads by itself.
        scales = resolve_scales(model.rope_scales, load_config(model), model.path)
        start_reaper()  # before the engine starts processes
        try:
            arguments = engine_arguments(model, settings, scales, device=device)
            # The usage context of vLLM's offline class `LLM`: vLLM 0.32 gives it more tokens in a step than a server.
            engine = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        except RuntimeError as error:
            # Only the log of the engine's process holds the reason.
            raise MachineError(_start_error(model, device)) from error
        except ValueError as error:
            hint = "; correct model.engine_args" if model.engine_args else ""
            raise UserError(f"{model.path}: vLLM rejects these settings ({_reason(error)}){hint}") from error
        return cls(engine, classes, scales=scales, stall_s=60 * settings.stall_minutes)

    async def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        self._loop = asyncio.get_running_loop()
        async with self._unless_stalled(), self._scaled(params.rope_scales):
            tasks = [self._generate_one(prompt, params, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
            return list(await asyncio.gather(*tasks))

    @asynccontextmanager
    async def _unless_stalled(self) -> AsyncIterator[None]:
        """Run the body as long as the engine finishes answers, whether to this call or to another.

        Raises:
            EngineDied: the engine has not finished any answer for `runtime.vllm.stall_minutes`. vLLM itself would wait
                forever for a kernel or a collective operation that hangs.
        """
        deadline = asyncio.timeout(self._stall_s)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise EngineDied(
                f"vLLM finished no answer in {self._stall_s / 60:.3g} minutes (runtime.vllm.stall_minutes; raise it if "
                f"answers take longer)"
            ) from error
        finally:
            self._deadlines.discard(deadline)

    def _postpone_deadlines(self) -> None:
        """Give every running call its full time again, because an answer is finished."""
        later = asyncio.get_running_loop().time() + self._stall_s
        for deadline in self._deadlines:
            # A deadline that has expired ends its call and cannot be changed.
            if not deadline.expired():
                deadline.reschedule(later)

    @asynccontextmanager
    async def _scaled(self, scales: tuple[float, ...]) -> AsyncIterator[None]:
        """Run the body with these RoPE scales, once calls with other scales have ended.

        Args:
            scales: empty to leave the engine's scales as they are.
        Raises:
            ValueError: the engine was built without scales, so its layers share one table of rotations.
        """
        if scales and not self._scales:
            raise ValueError("this engine was built without RoPE scales, so it cannot change them; build it with some")
        async with self._calls_changed:
            await self._calls_changed.wait_for(lambda: not self._calls or scales in ((), self._scales))
            if scales not in ((), self._scales):
                await self._change_scales(scales)
            self._calls += 1
        try:
            yield
        finally:
            async with self._calls_changed:
                self._calls -= 1
                self._calls_changed.notify_all()

    async def _change_scales(self, scales: tuple[float, ...]) -> None:
        try:
            await self.engine.collective_rpc("set_rope_scales", args=(list(scales),))
            # Cached prefixes were computed with other scales, those that a connector has moved off the GPU too.
            cleared = await self.engine.reset_prefix_cache(reset_connector=True)
        except self._classes.dead_error as error:
            raise EngineDied(str(error)) from error
        if not cleared:
            raise EngineDied("vLLM kept prefixes that were computed with other RoPE scales")
        self._scales = scales

    async def _generate_one(self, prompt: Tokens, params: SamplingParams, seed: int) -> GenerationResult:
        """Ask again where the engine fails and not the prompt: such a failure may pass, and must not be stored.

        Raises:
            EngineDied: the engine is dead, or lost the request twice.
        """
        last_error: _RequestLost | None = None
        for _attempt in (1, 2):
            try:
                return await self._complete(prompt, params, seed)
            except _RequestLost as error:
                last_error = error
        raise EngineDied(f"vLLM lost a request twice ({last_error}); run the same command again") from last_error

    async def _complete(self, prompt: Tokens, params: SamplingParams, seed: int) -> GenerationResult:
        """Ask once.

        Raises:
            EngineDied: the engine is dead.
            _RequestLost: the engine gave up the request, and the prompt was not the reason.
        """
        try:
            return await self._request(prompt, params, seed)
        except self._classes.dead_error as error:
            raise EngineDied(str(error)) from error
        except self._classes.request_errors as error:
            return Failure.of(error)
        except self._classes.engine_error as error:
            # vLLM 0.32 raises this for any failure, and also for a prompt that it cannot use.
            if isinstance(error.__cause__, self._classes.request_errors):
                return Failure.of(error)
            raise _RequestLost(engine_error_text(error)) from error

    async def _request(self, prompt: Tokens, params: SamplingParams, seed: int) -> Completion:
        request = self._classes.params(
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_new_tokens,
            seed=seed & _SEED_MASK,
            stop_token_ids=list(params.stop_ids),
            detokenize=False,
            logprobs=params.stored_top_k or None,
            flat_logprobs=True,  # lists of numbers instead of one object for each token
            output_kind=self._classes.output_kind.FINAL_ONLY,
        )
        vllm_prompt = self._classes.prompt(prompt_token_ids=prompt.tolist())
        stream = self.engine.generate(vllm_prompt, request, request_id=str(next(self._request_numbers)))
        # FINAL_ONLY: the whole response comes as one output.
        async for output in stream:
            last = output.outputs[0]
        self._postpone_deadlines()
        if last.finish_reason not in ("stop", "length"):
            raise _RequestLost(f"it ended with {last.finish_reason!r}")
        token_ids = np.asarray(last.token_ids, np.int32)
        return Completion(token_ids, last.finish_reason, _to_top_k(last.logprobs, len(token_ids)))

    def shutdown(self) -> None:
        """Shut down the engine's processes and close its sockets."""
        self.engine.shutdown()
        # vLLM 0.32 closes the sockets in the loop of the calls. If a socket stayed open, the garbage collector would
        # wait forever, in whichever thread it runs.
        if self._loop is not None and not self._loop.is_running() and not self._loop.is_closed():
            # In a thread, since this one may run another loop, as a notebook's does.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._loop.run_until_complete, asyncio.sleep(0)).result()


def _start_error(model: ModelSection, device: str) -> str:
    """What to do about an engine that does not start: the usual reasons, since vLLM's error does not name its own."""
    memory = "runtime.vllm.cpu_kv_cache_gib" if device == "cpu" else "runtime.vllm.gpu_memory_utilization"
    engine_args = "correct model.engine_args; or, " if model.engine_args else ""
    # vLLM 0.32 raises if less memory is free than it is set to use.
    neighbors = "" if device == "cpu" else f"; if another process uses memory of the GPU, lower {memory}"
    return (
        f"vLLM could not start; {engine_args}if its cache is too small for one prompt of the whole context "
        f"({context_length(model)} tokens), lower model.max_length or raise {memory}{neighbors}; POS2DISTILL_DEBUG=1 "
        f"shows its log"
    )


def _reason(error: ValueError) -> str:
    """The reason in an error of vLLM's settings, with their names; pydantic's own text has documentation too."""
    if isinstance(error, pydantic.ValidationError):
        reasons = []
        for each in error.errors():
            names = [".".join(map(str, each["loc"]))] if each["loc"] else []
            reasons.append(": ".join([*names, each["msg"].removeprefix("Value error, ")]))
        return "; ".join(reasons)
    return next(iter(str(error).splitlines()), type(error).__name__)


def _to_top_k(flat: Any, positions: int) -> TopKLogprobs | None:
    """The most likely tokens from vLLM's flat lists, or None if they were not requested.

    At each position, vLLM 0.32 lists the sampled token and then the k most likely ones, which may include it.
    """
    if flat is None:
        return None
    ids_SK = np.asarray(flat.token_ids).reshape(positions, -1)[:, 1:]
    logprobs_SK = np.asarray(flat.logprobs).reshape(positions, -1)[:, 1:]
    return TopKLogprobs(ids_SK.astype(np.int32), logprobs_SK.astype(np.float32))
