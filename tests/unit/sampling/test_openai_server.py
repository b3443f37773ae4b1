"""The checks of a server with OpenAI's API against a server on loopback that has no model."""

import socket
from contextlib import nullcontext

import pytest
from aiohttp import web

from pos2distill.config import EndpointSection, ModelSection
from pos2distill.errors import UserError
from pos2distill.sampling.engines.openai_server import check_endpoint, read_api_key, served_context
from tests.support.endpoint import FakeServer, serve

CHAT = ModelSection(path="tiny", engine="openai")
COMPLETIONS = ModelSection(path="tiny", engine="openai", api="completions")


def test_read_api_key_reads_the_variable_that_the_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert read_api_key(EndpointSection()) == "none"
    with pytest.raises(UserError, match=r"^runtime\.endpoint\.api_key_env: the environment variable MY_KEY is not set"):
        read_api_key(EndpointSection(api_key_env="MY_KEY"))
    monkeypatch.setenv("OPENAI_API_KEY", "usual")
    monkeypatch.setenv("MY_KEY", "mine")
    assert read_api_key(EndpointSection()) == "usual"
    assert read_api_key(EndpointSection(api_key_env="MY_KEY")) == "mine"


def test_check_endpoint_rejects_a_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with (
        serve(FakeServer(key="right")) as server,
        pytest.raises(UserError, match=r": refuses the key in OPENAI_API_KEY \(HTTP 401\)"),
    ):
        check_endpoint(CHAT, EndpointSection(base_url=server.url))


def test_served_context_is_that_of_the_model() -> None:
    with serve(FakeServer(max_model_len=77)) as server:
        settings = EndpointSection(base_url=server.url)
        assert served_context(CHAT, settings) == 77
        assert served_context(CHAT.model_copy(update={"path": "other"}), settings) is None
        server.max_model_len = None
        assert served_context(CHAT, settings) is None
        server.lists_models = False
        assert served_context(CHAT, settings) is None


@pytest.mark.parametrize("body", [("<html>Welcome</html>", "text/html"), ("{", "application/json")])
def test_check_endpoint_rejects_what_is_no_list_of_models(body: tuple[str, str]) -> None:
    with (
        serve(FakeServer(models_body=body)) as server,
        pytest.raises(UserError, match=r": answers, but not as an API of OpenAI's kind, .*/v1 \(runtime\.endpoint"),
    ):
        check_endpoint(CHAT, EndpointSection(base_url=server.url))


def test_check_endpoint_rejects_an_address_without_its_version() -> None:
    with serve(FakeServer()) as server:
        address = server.url.removesuffix("/v1")
        with pytest.raises(UserError, match=r": has no list of models \(HTTP 404\); .* often ends in /v1 \(runtime"):
            check_endpoint(CHAT, EndpointSection(base_url=address))
    with serve(FakeServer(lists_models=False)) as server:
        check_endpoint(CHAT, EndpointSection(base_url=server.url))  # some servers have no list


class CannotList(FakeServer):
    async def models(self, request: web.Request) -> web.Response:
        return web.Response(status=500)


@pytest.mark.parametrize("model", [CHAT, COMPLETIONS])
def test_check_endpoint_rejects_a_server_that_is_not_ready(model: ModelSection) -> None:
    with (
        serve(CannotList(fault_probability=1.0, kinds=("500",))) as server,
        pytest.raises(UserError, match=r"error of the server \(HTTP 500\); is it ready"),
    ):
        check_endpoint(model, EndpointSection(base_url=server.url))
    assert len(server.bodies) == 1


class Refuses(CannotList):
    """Answers every message with this status."""

    status = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=self.status)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, r"refuses the key in OPENAI_API_KEY \(HTTP 401\) \(runtime\.endpoint\.api_key_env\)"),
        (403, r"refuses the key in OPENAI_API_KEY \(HTTP 403\) \(runtime\.endpoint\.api_key_env\)"),
        (404, r": the server has no model 'tiny' \(model\.path\) or does not offer chat \(model\.api\)$"),
    ],
)
def test_check_endpoint_rejects_a_key_or_model_by_the_answer(status: int, message: str) -> None:
    refuses = Refuses()
    refuses.status = status
    with serve(refuses) as server, pytest.raises(UserError, match=message):
        check_endpoint(CHAT, EndpointSection(base_url=server.url))


@pytest.mark.parametrize("model", [CHAT, COMPLETIONS])
def test_check_endpoint_passes_a_server_that_answers_but_fails_to_list_its_models(model: ModelSection) -> None:
    with serve(CannotList()) as server:
        check_endpoint(model, EndpointSection(base_url=server.url, served_model="mine"))
    (body,) = server.bodies
    assert (body["model"], body["max_tokens"]) == ("mine", 1)


def test_check_endpoint_passes_a_server_that_takes_long_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pos2distill.sampling.engines.openai_server._CHECK_TIMEOUT_SECONDS", 0.5)
    with serve(CannotList(fault_probability=1.0, kinds=("slow",))) as server:
        check_endpoint(CHAT, EndpointSection(base_url=server.url))
    assert server.faults["slow"] == 1


def test_check_endpoint_gives_a_silent_server_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pos2distill.sampling.engines.openai_server._CHECK_TIMEOUT_SECONDS", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(UserError, match=r": no server answers \(.*timed out"),
    ):
        check_endpoint(CHAT, EndpointSection(base_url=f"http://127.0.0.1:{silent.getsockname()[1]}/v1"))


def test_check_endpoint_reads_a_list_without_an_object_around_it() -> None:
    listed = '[{"id": "tiny", "max_model_len": 90}, {"id": 3}, 4]'
    with serve(FakeServer(models_body=(listed, "application/json"), names=("tiny",))) as server:
        settings = EndpointSection(base_url=server.url)
        check_endpoint(CHAT, settings)
        assert served_context(CHAT, settings) == 90
        with pytest.raises(UserError, match="serves no model 'tiny2'"):
            check_endpoint(CHAT.model_copy(update={"path": "tiny2"}), settings)


@pytest.mark.parametrize("body", ["[1, 2]", "[]", "{}", "null", '"ok"', '{"data": null}', '{"data": {"id": "x"}}'])
def test_check_endpoint_does_not_check_without_a_list(body: str) -> None:
    with serve(FakeServer(models_body=(body, "application/json"))) as server:
        settings = EndpointSection(base_url=server.url)
        check_endpoint(CHAT, settings)
        assert served_context(CHAT, settings) is None


def test_served_context_prefers_the_exact_name() -> None:
    """Ollama lists `tiny:tag`, and accepts `tiny`."""
    listed = '{"data": [{}, {"id": "tiny:8b", "max_model_len": 10}, {"id": "tiny", "max_model_len": 90}]}'
    with serve(FakeServer(models_body=(listed, "application/json"))) as server:
        assert served_context(CHAT, EndpointSection(base_url=server.url)) == 90


def test_check_endpoint_finds_the_model() -> None:
    with serve(FakeServer(names=("tiny",))) as server:
        settings = EndpointSection(base_url=server.url)
        check_endpoint(CHAT, settings)
        check_endpoint(CHAT.model_copy(update={"path": "x"}), settings.model_copy(update={"served_model": "tiny"}))
        with pytest.raises(UserError, match=r": serves no model 'tiny2' \(model\.path\); did you mean 'tiny'\?$"):
            check_endpoint(CHAT.model_copy(update={"path": "tiny2"}), settings)
    with serve(FakeServer(lists_models=False)) as server:
        check_endpoint(CHAT.model_copy(update={"path": "tiny2"}), EndpointSection(base_url=server.url))


@pytest.mark.parametrize("model", [CHAT, COMPLETIONS])
def test_check_endpoint_passes_a_name_that_is_not_listed_but_answers(model: ModelSection) -> None:
    """Such as OpenRouter's `MODEL:nitro` and Azure's deployments."""
    with serve(FakeServer(names=("tiny", "tiny:nitro"))) as server:
        check_endpoint(model, EndpointSection(base_url=server.url, served_model="tiny:nitro"))
    (body,) = server.bodies
    assert (body["model"], body["max_tokens"]) == ("tiny:nitro", 1)


@pytest.mark.parametrize(
    ("status", "error", "known"),
    [
        (404, {"message": "no such deployment"}, False),
        (400, {"message": "no", "code": "model_not_found"}, False),
        (400, {"message": "tiny2 is not a valid model ID", "code": 400}, False),
        (400, {"message": "Invalid model name passed in model=tiny2", "code": "400"}, False),
        (400, {"message": "Model Not Exist", "code": "invalid_request_error"}, False),
        (400, {"message": "Invalid model: tiny2", "type": "invalid_model"}, False),
        (403, {"message": "no access", "code": "model_not_found"}, False),
        (503, {"message": "no channel for tiny2", "code": "model_not_found"}, False),
        (400, {"message": "Unsupported parameter: 'max_tokens'", "code": "unsupported_parameter"}, True),
        (429, {"message": "too many"}, True),
    ],
)
def test_check_endpoint_asks_for_a_name_that_is_not_listed(status: int, error: dict[str, object], known: bool) -> None:
    with serve(FakeServer(instead=lambda _: (status, {"error": error}))) as server:
        settings = EndpointSection(base_url=server.url, served_model="tiny2")
        expected = pytest.raises(UserError, match=r"serves no model 'tiny2' \(.*\); did you mean 'tiny'\?$")
        with nullcontext() if known else expected:
            check_endpoint(CHAT, settings)
        assert len(server.bodies) == 1


def test_check_endpoint_rejects_an_address_without_a_server() -> None:
    with serve(FakeServer()) as server:
        pass
    with pytest.raises(UserError, match=r": no server answers \(.+\) \(runtime\.endpoint\.base_url\)$"):
        check_endpoint(CHAT, EndpointSection(base_url=server.url))
