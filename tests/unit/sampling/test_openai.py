"""The engine `openai` against a server on loopback that has no model and fails at random."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pos2distill.config import EndpointSection, ModelSection
from pos2distill.config.base import HashableMapping
from pos2distill.records import Tokens
from pos2distill.sampling.engines.openai import OpenAiEngine, _RateLimiter
from pos2distill.sampling.engines.protocol import Failure, GenerationResult, SamplingParams, TextCompletion
from pos2distill.tasks.prompts import Messages
from tests.support.endpoint import FAULTS, MALFORMED, SLOW_SECONDS, FakeServer, serve

GREEDY = SamplingParams(0.0, 1.0, 8, ())
CHAT = ModelSection(path="tiny", engine="openai")
COMPLETIONS = ModelSection(path="tiny", engine="openai", api="completions")


def ask(
    server: FakeServer, prompts: Sequence[Tokens | Messages | str], model: ModelSection = CHAT, **settings: object
) -> list[GenerationResult]:
    engine = OpenAiEngine(model, EndpointSection.model_validate({"base_url": server.url, **settings}))
    asked = [user(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return asyncio.run(engine.generate(asked, GREEDY, [0] * len(prompts)))


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def errors(results: Sequence[GenerationResult]) -> list[str]:
    return [result.error for result in results if isinstance(result, Failure)]


def test_openai_answers_every_prompt_once_in_spite_of_faults() -> None:
    prompts = [f"What is the number {number}?" for number in range(1000)]
    server = FakeServer(answer=lambda prompt: f"It is {prompt.split()[-1][:-1]}.", fault_probability=0.1)
    with serve(server):
        results = ask(server, prompts, concurrency=64, timeout_s=SLOW_SECONDS / 2)
    assert [result.text for result in results if isinstance(result, TextCompletion)] == [
        f"It is {number}." for number in range(1000)
    ]
    # The server agrees: every prompt succeeded once, after about a hundred faults of every kind.
    assert set(server.answered) == set(prompts)
    assert set(server.answered.values()) == {1}
    assert set(server.faults) == set(FAULTS)
    assert server.faults.total() > 70
    assert len(server.bodies) == 1000 + server.faults.total()
    assert server.most_running <= 64 + server.faults["slow"]  # a request that timed out here may still run there
    tokens = sum(result.prompt_tokens or 0 for result in results if isinstance(result, TextCompletion))
    assert tokens == sum(len(prompt.split()) for prompt in prompts)


def test_openai_gives_up_on_a_prompt_after_the_last_retry() -> None:
    server = FakeServer(fault_probability=1.0, kinds=("500",))
    with serve(server):
        results = ask(server, ["What?"], max_retries=2)
    assert errors(results) == ["InternalServerError: Error code: 500 - broken"]
    assert len(server.bodies) == 3


@pytest.mark.parametrize(("status", "passes"), [(400, False), (404, False), (429, True), (500, False), (503, True)])
def test_openai_says_whether_a_failure_may_pass(status: int, passes: bool) -> None:
    with serve(FakeServer(instead=lambda prompt: (status, {"error": {"message": "no"}}))) as server:
        (result,) = ask(server, ["What?"], max_retries=0)
    assert isinstance(result, Failure)
    assert result.is_transient == passes


def test_openai_says_that_a_server_that_is_gone_may_come_back() -> None:
    with serve(FakeServer()) as server:
        pass
    (result,) = ask(server, ["What?"], max_retries=0)
    assert isinstance(result, Failure)
    assert result.error.startswith("ConnectError: ")
    assert result.is_transient


def test_openai_does_not_expect_another_form_of_answers() -> None:
    with serve(FakeServer(fault_probability=1.0, kinds=("page",))) as server:
        (result,) = ask(server, ["What?"], max_retries=0)
    assert isinstance(result, Failure)
    assert not result.is_transient


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize(("model", "field"), [(CHAT, "choices[0].message.content"), (COMPLETIONS, "choices[0].text")])
def test_openai_records_a_malformed_answer_as_a_failure(model: ModelSection, field: str, kind: str) -> None:
    prompt = "What?" if model is CHAT else np.arange(5, dtype=np.int32)
    with serve(FakeServer(fault_probability=1.0, kinds=(kind,))) as server:
        (error,) = errors(ask(server, [prompt], model, max_retries=0))
    assert error.startswith(f"MalformedAnswerError: expected JSON with the text {field}, got HTTP 200 with ")
    assert error.endswith("; check the server (runtime.endpoint.base_url)")
    assert "\n" not in error


@pytest.mark.parametrize("kind", ["page", "empty object", "error", "no choices", "choices null"])
def test_openai_sends_a_request_again_after_a_malformed_answer(kind: str) -> None:
    with serve(FakeServer(fault_probability=1.0, kinds=(kind,))) as server:
        assert len(errors(ask(server, ["What?"], max_retries=1))) == 1
    assert len(server.bodies) == 2


def test_openai_names_the_error_of_an_answer_with_success() -> None:
    with serve(FakeServer(fault_probability=1.0, kinds=("error",))) as server:
        assert errors(ask(server, ["What?"], max_retries=0)) == [
            "MalformedAnswerError: expected JSON with the text choices[0].message.content, got HTTP 200 with the error "
            "'overloaded'; check the server (runtime.endpoint.base_url)"
        ]


def test_openai_records_an_answer_without_a_choice_as_a_failure() -> None:
    with serve(FakeServer(fault_probability=1.0, kinds=("no choice",))) as server:
        assert errors(ask(server, ["What?"])) == ["the server returned no answer: 'filtered'"]
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        "many",
        {"prompt_tokens": "2"},
        {"prompt_tokens": 10**12},
        {"prompt_tokens": 2},
        {"prompt_tokens": 2, "completion_tokens": "x"},
        {"completion_tokens": 2},
    ],
)
def test_openai_takes_an_answer_without_a_usable_usage(usage: object) -> None:
    with serve(FakeServer(usage=usage)) as server:
        assert ask(server, ["What?"]) == [TextCompletion("42", "stop", None, None)]


@pytest.mark.parametrize("reason", [None, "content_filter", ["stop"], {"reason": "stop"}])
def test_openai_records_an_unknown_end_as_a_failure(reason: object) -> None:
    with serve(FakeServer(finish_reason=reason)) as server:
        assert errors(ask(server, ["What?"])) == [f"the server ended the answer with {reason!r}"]


@pytest.mark.parametrize("reason", ["abort", "error", "insufficient_system_resource"])
@pytest.mark.parametrize("model", [CHAT, COMPLETIONS])
def test_openai_sends_a_request_again_where_the_server_gave_up(model: ModelSection, reason: str) -> None:
    prompt = "What?" if model is CHAT else np.arange(5, dtype=np.int32)
    with serve(FakeServer(finish_reason=reason)) as server:
        (result,) = ask(server, [prompt], model, max_retries=1)
    assert isinstance(result, Failure)
    assert result.error == f"RemoteProtocolError: the server ended the answer with {reason!r}"
    assert result.is_transient
    assert len(server.bodies) == 2


def test_openai_replaces_half_a_character_of_an_answer() -> None:
    """JSON can escape half of a pair of UTF-16, which Parquet and UTF-8 cannot hold."""
    with serve(FakeServer(answer=lambda prompt: "Zürich \ud83d")) as server:
        (result,) = ask(server, ["What?"])
    assert isinstance(result, TextCompletion)
    assert result.text == "Zürich \ufffd"


def refusals(results: Sequence[GenerationResult]) -> list[bool]:
    return [result.is_refusal for result in results if isinstance(result, Failure)]


# The errors of servers as users of them report them; that of a gateway comes with success.
FILTERED = [
    (400, {"code": "content_filter", "param": "prompt", "type": None, "message": "filtered"}),
    (400, {"code": 400, "param": "prompt", "type": "content_filter", "message": "high risk"}),
    (400, {"code": "invalid_prompt", "param": None, "type": "invalid_request_error", "message": "Invalid prompt"}),
    (400, {"code": "data_inspection_failed", "type": "data_inspection_failed", "message": "inappropriate"}),
    (400, {"code": "sensitive_words_detected", "type": "new_api_error", "message": "sensitive words"}),
    (400, {"code": "invalid_request_error", "type": "invalid_request_error", "message": "Content Exists Risk"}),
    (403, {"code": "content_policy_violation", "message": "flagged"}),
    (200, {"code": "content_policy_violation", "message": "flagged"}),
]


@pytest.mark.parametrize(("status", "error"), FILTERED)
@pytest.mark.parametrize("model", [CHAT, COMPLETIONS])
def test_openai_takes_a_filtered_prompt_for_refused(model: ModelSection, status: int, error: dict[str, object]) -> None:
    prompt = "What?" if model is CHAT else np.arange(5, dtype=np.int32)
    with serve(FakeServer(instead=lambda prompt: (status, {"error": error}))) as server:
        results = ask(server, [prompt], model)
    assert refusals(results) == [True]
    assert str(error["message"]) in errors(results)[0]
    assert len(server.bodies) == 1


def test_openai_takes_a_filtered_answer_for_refused() -> None:
    with serve(FakeServer(finish_reason="content_filter")) as server:
        assert refusals(ask(server, ["What?"])) == [True]
    with serve(FakeServer(instead=lambda prompt: (200, {"choices": [], "error": FILTERED[0][1]}))) as server:
        assert refusals(ask(server, ["What?"])) == [True]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"code": "context_length_exceeded", "param": "messages", "message": "too long"}),
        (400, {"code": "unsupported_value", "param": "temperature", "message": "content_filter is no temperature"}),
        (400, {"code": None, "type": "invalid_request_error", "message": "Your credit balance is too low"}),
        (400, {"code": ["content_filter"], "message": None}),
        (400, "content_filter"),
        (401, {"code": "invalid_api_key", "message": "wrong key"}),
        (404, {"code": "model_not_found", "message": "no such model"}),
        (500, {"code": None, "message": "broken"}),
    ],
)
def test_openai_takes_other_errors_for_failures(status: int, error: object) -> None:
    with serve(FakeServer(instead=lambda prompt: (status, {"error": error}))) as server:
        assert refusals(ask(server, ["What?"], max_retries=0)) == [False]


@pytest.mark.parametrize("reason", [None, "error", ["content_filter"]])
def test_openai_takes_other_finish_reasons_for_failures(reason: object) -> None:
    with serve(FakeServer(finish_reason=reason)) as server:
        assert refusals(ask(server, ["What?"], max_retries=0)) == [False]


def test_openai_sends_greedy_requests_with_the_prompt() -> None:
    server = FakeServer(answer=lambda prompt: " 42\n")
    with serve(server):
        chat = ask(server, ["Which code?"], served_model="alias")
        completed = ask(server, [np.arange(5, dtype=np.int32)], COMPLETIONS)
    greedy = {"temperature": 0.0, "max_tokens": 8}
    assert server.bodies[0] == {
        "model": "alias",
        "messages": [{"role": "user", "content": "Which code?"}],
        **greedy,
    }
    assert server.bodies[1] == {"model": "tiny", "prompt": [0, 1, 2, 3, 4], **greedy}
    assert chat == [TextCompletion(" 42\n", "stop", 2, 1)]
    assert completed == [TextCompletion(" 42\n", "stop", 5, 1)]


def test_openai_sends_a_system_message_and_counts_its_words() -> None:
    messages = [{"role": "system", "content": "one two three"}, {"role": "user", "content": "four"}]
    with serve(FakeServer(context=3)) as server:
        assert errors(ask(server, [messages])) == [
            "the server counts 3 tokens in a prompt of 4 words, so it cut the prompt; raise its context length or "
            "lower data.documents"
        ]
    assert server.bodies[0]["messages"] == messages


def test_openai_asks_servers_that_apply_the_models_penalty_not_to() -> None:
    """Others may refuse a field that is not OpenAI's."""
    with serve(FakeServer(owned_by="vllm")) as server:
        ask(server, ["Which code?"])
        ask(server, [np.arange(5, dtype=np.int32)], COMPLETIONS)
    assert [body["repetition_penalty"] for body in server.bodies] == [1.0, 1.0]
    with serve(FakeServer(owned_by="openai")) as server:
        ask(server, ["Which code?"])
    assert "repetition_penalty" not in server.bodies[0]


def test_openai_sends_variables_of_the_chat_template() -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    with serve(FakeServer()) as server:
        ask(server, ["Which code?"], ModelSection(path="tiny", engine="openai", **kwargs))  # type: ignore[arg-type]
    assert server.bodies[0]["chat_template_kwargs"] == kwargs["chat_template_kwargs"]


@pytest.mark.parametrize("model", [CHAT, COMPLETIONS])
def test_openai_sends_additional_fields_and_leaves_out_others(model: ModelSection) -> None:
    fields = {"max_tokens": None, "temperature": 1, "max_completion_tokens": 4000, "repetition_penalty": None}
    prompt: Any = "Which code?" if model.api == "chat" else np.arange(5, dtype=np.int32)
    with serve(FakeServer()) as server:
        ask(server, [prompt], model.model_copy(update={"extra_body": HashableMapping(fields)}))
        ask(server, [prompt], model)
    sent, usual = server.bodies
    assert (usual["max_tokens"], usual["temperature"]) == (8, 0)
    assert sent.keys() - usual.keys() == {"max_completion_tokens"}
    assert {"max_tokens", "repetition_penalty"}.isdisjoint(sent)
    assert (sent["max_completion_tokens"], sent["temperature"]) == (4000, 1)


def test_openai_rejects_a_prompt_that_the_server_cut() -> None:
    with serve(FakeServer(context=4)) as server:
        chat = ask(server, ["one two three", "one two three four five six"])
        completed = ask(server, [np.arange(5, dtype=np.int32)], COMPLETIONS)
        limited = ask(server, ["one two three"], CHAT.model_copy(update={"max_length": 10}))
    assert isinstance(chat[0], TextCompletion)
    assert errors(chat) == [
        "the server counts 4 tokens in a prompt of 6 words, so it cut the prompt; raise its context length or lower "
        "data.documents"
    ]
    assert errors(completed) == [
        "the server counts 4 tokens in a prompt of 5: it cut the prompt, or has another tokenizer than model.path"
    ]
    assert errors(limited) == [
        "prompt of 3 tokens + 8 for the response exceed model.max_length (10), so the server may have cut it; lower "
        "data.documents"
    ]


def test_openai_rejects_a_prompt_that_fills_the_context_of_the_server() -> None:
    with serve(FakeServer(max_model_len=10)) as server:
        results = ask(server, ["one two", "one two three"])
    assert isinstance(results[0], TextCompletion)
    assert errors(results) == [
        "prompt of 3 tokens + 8 for the response exceed the server's max_model_len (10), so the server may have cut "
        "it; lower data.documents"
    ]


def test_openai_limits_concurrency_and_rate() -> None:
    with serve(FakeServer()) as server:
        ask(server, ["What?"] * 50, concurrency=3)
        assert server.most_running <= 3

    async def timed() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        settings = EndpointSection(base_url=server.url, requests_per_minute=600)
        await OpenAiEngine(CHAT, settings).generate([user("What?")] * 6, GREEDY, [0] * 6)
        return loop.time() - start

    with serve(server):
        assert asyncio.run(timed()) >= 0.5  # the sixth request starts five tenths of a second after the first


def test_openai_limits_the_rate_of_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of the sender: a request may be slow to arrive. The server asks for pauses of 20 ms."""
    starts: list[float] = []
    wait = _RateLimiter.wait

    async def note(limiter: _RateLimiter) -> None:
        await wait(limiter)
        starts.append(limiter.next_s - limiter.interval_s)
        assert asyncio.get_running_loop().time() > starts[-1] - 0.001

    monkeypatch.setattr(_RateLimiter, "wait", note)
    with serve(FakeServer(fault_probability=1.0, kinds=("429",))) as server:
        ask(server, ["What?"], requests_per_minute=600, max_retries=5)
    assert len(starts) == len(server.starts) == 6
    assert all(later - earlier > 0.0999 for earlier, later in itertools.pairwise(starts))


def test_openai_reads_the_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    monkeypatch.setenv("MY_KEY", "right")
    with serve(FakeServer(key="right")) as server:
        assert isinstance(ask(server, ["What?"], api_key_env="MY_KEY")[0], TextCompletion)
        assert errors(ask(server, ["What?"])) == ["AuthenticationError: Error code: 401 - wrong key"]


@pytest.mark.parametrize("reason", ["eos", "eos_token"])
def test_openai_takes_other_names_of_stop(reason: str) -> None:
    with serve(FakeServer(finish_reason=reason)) as server:
        assert ask(server, ["What?"]) == [TextCompletion("42", "stop", 1, 1)]
