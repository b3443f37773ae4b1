"""A model on a server with OpenAI's API (vLLM, SGLang, llama.cpp, Ollama, hosted models): text answers, greedy only."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import httpx2
import numpy as np
import openai

from pos2distill.config import EndpointSection, ModelSection
from pos2distill.faults import is_transient
from pos2distill.records import Tokens
from pos2distill.sampling.engines.openai_server import context_length, name_at_server, read_api_key, served_model
from pos2distill.sampling.engines.protocol import Failure, GenerationResult, SamplingParams, TextCompletion
from pos2distill.tasks.prompts import Messages, fewest_tokens, joined_text

_T = TypeVar("_T")

_STOP_REASONS = ("stop", "eos", "eos_token")  # servers' words for: the model ended its answer
# And for: the server itself gave up (vLLM when it shuts down, OpenRouter, DeepSeek when it is busy).
_GIVEN_UP = ("abort", "error", "insufficient_system_resource")
_CONTENT_FILTER = "content_filter"
# The code, the type or the whole message of an error with which a server refuses a prompt for its content: Azure and
# Moonshot; OpenAI; OpenRouter and LiteLLM; DashScope; New API; DeepSeek. Other errors of a request (400) may be caused
# by the settings, the account or the server, and so concern all prompts.
_REFUSALS = frozenset(
    {
        _CONTENT_FILTER,
        "invalid_prompt",
        "content_policy_violation",
        "data_inspection_failed",
        "sensitive_words_detected",
        "Content Exists Risk",
    }
)

# Servers that apply the repetition penalty of the model's generation_config.json unless a request names one. A penalty
# would punish a model for repeating what a document says. The other engines here do not apply it either.
_SERVERS_WITH_DEFAULT_PENALTY = ("vllm", "sglang")


class MalformedAnswerError(httpx2.RemoteProtocolError):
    """A server answered with success, but not in the form of OpenAI's API."""


class OpenAiEngine:
    """Sends one request for each prompt and at most `concurrency` at a time.

    The client of the package `openai` repeats a request after transient errors and after a malformed answer. Each
    prompt gets exactly one result, whether its attempts succeed or fail.
    """

    def __init__(self, model: ModelSection, settings: EndpointSection) -> None:
        self.model = model
        self.name = name_at_server(model, settings)
        self.client = openai.AsyncOpenAI(
            base_url=settings.base_url,
            api_key=read_api_key(settings),
            timeout=settings.timeout_s,
            max_retries=settings.max_retries,
            # openai 3.52 runs the hooks at every attempt, and tries again after any `httpx2.RequestError`.
            http_client=openai.DefaultAsyncHttpxClient(
                event_hooks={"request": [self._wait_for_turn], "response": [self._check_answer]}
            ),
        )
        self.running = asyncio.Semaphore(settings.concurrency)
        self.rate_limiter = _RateLimiter(settings.requests_per_minute)
        served = served_model(model, settings)
        limits = [limit for limit in (model.max_length, context_length(served)) if limit]
        self.context = min(limits, default=None)
        self.extra_body = _extra_body(model, served)

    async def generate(
        self, prompts: Sequence[Tokens | Messages], params: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationResult]:
        """See `Engine.generate`. A prompt is a list of messages where `model.api` is chat, else token ids."""
        return list(await asyncio.gather(*[self._generate_one(prompt, params) for prompt in prompts]))

    async def _generate_one(self, prompt: Tokens | Messages, params: SamplingParams) -> GenerationResult:
        async with self.running:
            try:
                if isinstance(prompt, np.ndarray):
                    return await self._complete(prompt, params)
                return await self._chat(prompt, params)
            except openai.APIError as error:
                refused = _is_refusal(error.body)
                # A 500 may well be caused by this prompt alone.
                is_bug = isinstance(error, openai.APIStatusError) and error.status_code == 500
                passing = not (refused or is_bug) and is_transient(error.__cause__ or error)
                return replace(Failure.of(error), is_refusal=refused, is_transient=passing)

    async def _wait_for_turn(self, request: httpx2.Request) -> None:
        await self.rate_limiter.wait()

    async def _check_answer(self, response: httpx2.Response) -> None:
        """Reject a successful response that does not hold an answer, so that the client sends the request again.

        Raises:
            MalformedAnswerError: a successful response does not have the form of an answer.
            RemoteProtocolError: the server gave up in the middle of the answer.
        """
        if not response.is_success:
            return
        await response.aread()
        try:
            body = response.json()
        except (ValueError, RecursionError):
            body = None
        if _is_answer(body, self.model.api) or _holds_refusal(body):
            reason = body["choices"][0].get("finish_reason") if body.get("choices") else None
            if reason in _GIVEN_UP:
                raise httpx2.RemoteProtocolError(f"the server ended the answer with {reason!r}")
            return
        expected = "choices[0].message.content" if self.model.api == "chat" else "choices[0].text"
        got = repr(response.text[:200])
        # Some gateways report the error of the server behind them as a success.
        if isinstance(body, dict) and body.get("error"):
            got = f"the error {body['error']!r:.200}"
        raise MalformedAnswerError(
            f"expected JSON with the text {expected}, got HTTP {response.status_code} with {got}; check the server "
            f"(runtime.endpoint.base_url)"
        )

    async def _chat(self, messages: Messages, params: SamplingParams) -> GenerationResult:
        listed: Any = messages
        response = await self.client.chat.completions.create(
            model=self.name,
            messages=listed,
            temperature=self._unless_left_out("temperature", params.temperature),
            max_tokens=self._unless_left_out("max_tokens", params.max_new_tokens),
            extra_body=self.extra_body,
        )
        if not getattr(response, "choices", None):
            return _no_choices(response)
        choice = response.choices[0]
        result = _to_completion(choice.message.content, choice, response)
        if isinstance(result, Failure) or result.prompt_tokens is None:
            return result
        fewest, most = fewest_tokens(joined_text(messages)), self.context
        if result.prompt_tokens < fewest:
            return Failure(
                f"the server counts {result.prompt_tokens} tokens in a prompt of {fewest} words, so it cut the prompt; "
                f"raise its context length or lower data.documents"
            )
        if most and result.prompt_tokens + params.max_new_tokens > most:
            return Failure(
                f"prompt of {result.prompt_tokens} tokens + {params.max_new_tokens} for the response exceed "
                f"{self._limit_name()} ({most}), so the server may have cut it; lower data.documents"
            )
        return result

    async def _complete(self, prompt: Tokens, params: SamplingParams) -> GenerationResult:
        response = await self.client.completions.create(
            model=self.name,
            prompt=prompt.tolist(),
            temperature=self._unless_left_out("temperature", params.temperature),
            max_tokens=self._unless_left_out("max_tokens", params.max_new_tokens),
            extra_body=self.extra_body,
        )
        if not getattr(response, "choices", None):
            return _no_choices(response)
        choice = response.choices[0]
        result = _to_completion(choice.text, choice, response)
        if isinstance(result, TextCompletion) and result.prompt_tokens not in (None, len(prompt)):
            return Failure(
                f"the server counts {result.prompt_tokens} tokens in a prompt of {len(prompt)}: it cut the prompt, or "
                f"has another tokenizer than model.path"
            )
        return result

    def _unless_left_out(self, name: str, value: _T) -> _T | openai.Omit:
        is_left_out = name in self.model.extra_body and self.model.extra_body[name] is None
        return openai.omit if is_left_out else value

    def _limit_name(self) -> str:
        return "model.max_length" if self.context == self.model.max_length else "the server's max_model_len"

    def shutdown(self) -> None:
        """Nothing to shut down: the server is not ours."""


def _extra_body(model: ModelSection, served: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of a request beside those that every request has; the client lets them replace those."""
    fields: dict[str, Any] = {}
    if model.api == "chat" and model.chat_template_kwargs:
        fields["chat_template_kwargs"] = dict(model.chat_template_kwargs)  # vLLM 0.32 passes it to the chat template
    if served.get("owned_by") in _SERVERS_WITH_DEFAULT_PENALTY:
        fields["repetition_penalty"] = 1.0
    fields.update(model.extra_body)
    return {name: value for name, value in fields.items() if value is not None} or None


class _RateLimiter:
    """Starts requests at regular intervals."""

    def __init__(self, per_minute: int | None) -> None:
        self.interval_s = 60 / per_minute if per_minute else 0.0
        self.next_s = 0.0  # on the clock of the event loop

    async def wait(self) -> None:
        now = asyncio.get_running_loop().time()
        start = max(now, self.next_s)
        self.next_s = start + self.interval_s
        await asyncio.sleep(start - now)


def _is_answer(body: Any, api: str) -> bool:
    """Whether a response's JSON holds a text, or an empty list of choices (see `_no_choices`)."""
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
        return False
    choices = body["choices"]
    if not choices:
        return True
    if not isinstance(choices[0], dict):
        return False
    if api == "completions":
        return isinstance(choices[0].get("text"), str)
    message = choices[0].get("message")
    return isinstance(message, dict) and isinstance(message.get("content"), str | None)


def _holds_refusal(body: Any) -> bool:
    """Whether a response's JSON holds a refusal of the prompt instead of choices, as some gateways send it."""
    return isinstance(body, dict) and not body.get("choices") and _is_refusal(body.get("error"))


def _to_completion(text: str | None, choice: Any, response: Any) -> TextCompletion | Failure:
    # The client's object lacks the fields that the server left out.
    finish_reason, usage = getattr(choice, "finish_reason", None), getattr(response, "usage", None)
    if finish_reason not in (*_STOP_REASONS, "length"):
        return Failure(f"the server ended the answer with {finish_reason!r}", finish_reason == _CONTENT_FILTER)
    # Servers without a tokenizer report 0, or no usage at all.
    prompt_tokens, answer_tokens = _count(usage, "prompt_tokens") or None, _count(usage, "completion_tokens")
    if prompt_tokens is None or answer_tokens is None:
        prompt_tokens = answer_tokens = None
    # A reasoning model whose thoughts were cut has no text at all. A gateway that cuts UTF-16 text may leave half of a
    # character, which no file could store.
    text = (text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return TextCompletion(text, "length" if finish_reason == "length" else "stop", prompt_tokens, answer_tokens)


def _count(usage: Any, name: str) -> int | None:
    value = getattr(usage, name, None)
    return value if isinstance(value, int) and 0 <= value < 2**31 else None


def _no_choices(response: Any) -> Failure:
    """The failure of an answer without a choice. Some servers add an error."""
    error = getattr(response, "error", None)
    return Failure(f"the server returned no answer: {error!r:.200}", _is_refusal(error))


def _is_refusal(error: Any) -> bool:
    """Whether the error object of a server says that it refuses this prompt for its content."""
    if not isinstance(error, dict):
        return False
    return any(isinstance(error.get(name), str) and error[name] in _REFUSALS for name in ("code", "type", "message"))
