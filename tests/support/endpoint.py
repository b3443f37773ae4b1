"""A server with OpenAI's API on loopback, without a model, which fails at random: aiohttp in a thread."""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MALFORMED = (
    *("cut JSON", "page", "list", "text", "empty object", "error", "no choices", "choices null"),
    *("list of texts", "no message", "message null", "list content"),
)
FAULTS = ("429", "500", "dropped", "slow", *MALFORMED)
# What is answered instead of the object with the choices. A gateway may repeat the request before it names the error.
_OTHER_BODIES: dict[str, Any] = {
    "list": [],
    "text": "ok",
    "empty object": {},
    "error": {"id": "1" * 300, "error": "overloaded"},
    "no choice": {"choices": [], "error": "filtered"},
}
_OTHER_CHOICES: dict[str, Any] = {"choices null": None, "list of texts": ["42"]}
_COUNTED = object()
SLOW_SECONDS = 10.0  # twice the time limit of the client, which must notice also on a busy machine


@dataclass
class FakeServer:
    """Answers every prompt with `answer(prompt)`; fails requests with `fault_probability`, before or after answering.

    answered: how often each prompt was answered with success, as the server sees it. faults: by kind.
    key: if set, other keys are refused. names: if set, other names of models are unknown.
    context: prompts are silently cut to so many words.
    counts_tokens: whether answers report their usage. max_model_len: the context that the list of models names.
    models_body: what is answered instead of the list of models, and its type.
    instead: the status and the body that a prompt is answered with instead; None: as others.
    usage: what answers report instead of the tokens. starts: seconds at which the prompts of `bodies` came.
    """

    answer: Callable[[Any], str] = lambda prompt: "42"
    fault_probability: float = 0.0
    kinds: tuple[str, ...] = FAULTS
    key: str | None = None
    names: tuple[str, ...] | None = None
    context: int | None = None
    lists_models: bool = True
    counts_tokens: bool = True
    max_model_len: int | None = None
    owned_by: str | None = None
    models_body: tuple[str, str] | None = None
    instead: Callable[[Any], tuple[int, Any] | None] = lambda prompt: None
    finish_reason: Any = "stop"
    usage: Any = _COUNTED
    seed: int = 0
    url: str = ""
    answered: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    async def models(self, request: web.Request) -> web.Response:
        if self._refuses(request):
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if not self.lists_models:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        if self.models_body is not None:
            text, content_type = self.models_body
            return web.Response(text=text, content_type=content_type)
        model: dict[str, Any] = {"id": "tiny", "object": "model"}
        if self.max_model_len is not None:
            model["max_model_len"] = self.max_model_len
        if self.owned_by is not None:
            model["owned_by"] = self.owned_by
        return web.json_response({"object": "list", "data": [model]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = "\n\n".join(message["content"] for message in body["messages"])
        return await self._respond(request, body, text)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._respond(request, body, body["prompt"])

    async def _respond(self, request: web.Request, body: dict[str, Any], prompt: Any) -> web.StreamResponse:
        refusal = self._refusal(request, body)
        if refusal is not None:
            return refusal
        self.bodies.append(body)
        self.starts.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.001)
            instead = self.instead(prompt)
            if instead is not None:
                status, content = instead
                return web.json_response(content, status=status)
            fault = ""
            if self.random.random() < self.fault_probability:
                fault = self.random.choice(self.kinds)
                self.faults[fault] += 1
            if fault == "429":
                headers = {"Retry-After-Ms": "20"}
                return web.json_response({"error": {"message": "too many"}}, status=429, headers=headers)
            if fault == "500":
                return web.json_response({"error": {"message": "broken"}}, status=500, headers={"Retry-After-Ms": "10"})
            if fault == "dropped":
                assert request.transport is not None
                request.transport.abort()
            if fault == "slow":
                await asyncio.sleep(SLOW_SECONDS)
            response = self._answer(body, prompt, counts=not fault)
            if fault in (*MALFORMED, "no choice"):
                return _malformed(response, fault)
            return web.json_response(response)
        finally:
            self.running -= 1

    def _answer(self, body: dict[str, Any], prompt: Any, *, counts: bool) -> dict[str, Any]:
        tokens = prompt.split() if isinstance(prompt, str) else prompt
        used = min(len(tokens), self.context or len(tokens))
        text = self.answer(prompt)
        if counts:
            self.answered[str(prompt)] += 1
        usage = self.usage
        if usage is _COUNTED:
            usage = {"prompt_tokens": used, "completion_tokens": len(text.split()), "total_tokens": 0}
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason, "logprobs": None}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        response = {"id": "1", "object": "x", "created": 0, "model": "tiny", "choices": [choice]}
        return response | {"usage": usage} if self.counts_tokens else response

    def _refusal(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if self._refuses(request):
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if self.names is not None and body["model"] not in self.names:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        return None

    def _refuses(self, request: web.Request) -> bool:
        return self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}"


def _malformed(response: dict[str, Any], kind: str) -> web.Response:
    """An answer with HTTP 200 in a form that OpenAI's API does not have."""
    choice = response["choices"][0]
    text = json.dumps(response)
    if kind == "cut JSON":
        return web.Response(text=text[: len(text) // 2], content_type="application/json")
    if kind == "page":
        return web.Response(text="<html>Please log in</html>", content_type="text/html")
    if kind in _OTHER_BODIES:
        return web.json_response(_OTHER_BODIES[kind])
    if kind == "no choices":
        del response["choices"]
    elif kind in _OTHER_CHOICES:
        response["choices"] = _OTHER_CHOICES[kind]
    elif kind == "no message":
        choice.pop("message", None)
        choice.pop("text", None)
    elif kind == "message null":
        choice.update(dict.fromkeys(choice.keys() & {"message", "text"}))
    elif "text" in choice:
        choice["text"] = [choice["text"]]
    else:
        choice["message"]["content"] = [{"type": "text", "text": choice["message"]["content"]}]
    return web.json_response(response)


@contextmanager
def serve(server: FakeServer) -> Iterator[FakeServer]:
    """The server on a free port of loopback, until the block ends. `server.url` is its base URL."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/chat/completions", server.chat)
        app.router.add_post("/v1/completions", server.completions)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}/v1"
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=run, name="fake server")
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
