"""A proxy before Ray's dashboard that delays requests and closes streams, as one between a user and a cluster may."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from aiohttp import ClientSession, WSMsgType, web

_NOT_FORWARDED = ("host", "content-length", "transfer-encoding", "content-encoding", "connection", "upgrade")


class DashboardProxy:
    """Passes requests to a dashboard and its answers back.

    Attributes:
        early_ends: how many of the next streams of a log end after their first message: the first one as a stream that
            is complete, the second one as a broken connection, and so on in turn.
        streams: how many were opened. broken: how many of these ended by a broken connection.
        submissions: how many requests to submit a job were received.
        together: requests to submit a job wait until there are so many.
    """

    def __init__(self, dashboard: str) -> None:
        self.dashboard = dashboard
        self.early_ends = 0
        self.streams = self.broken = 0
        self.submissions = 0
        self.together = 1
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._forward_stream(request)
        if request.method == "POST" and request.path == "/api/jobs/":
            self.submissions += 1
            while self.submissions < self.together:
                await asyncio.sleep(0.05)
        async with (
            ClientSession() as session,
            session.request(
                request.method,
                self.dashboard + request.path_qs,
                headers=_forwarded(request.headers.items()),
                data=await request.read(),
            ) as answer,
        ):
            headers = _forwarded(answer.headers.items())
            return web.Response(status=answer.status, headers=headers, body=await answer.read())

    async def _forward_stream(self, request: web.Request) -> web.StreamResponse:
        self.streams += 1
        number = self.streams
        ends_early = number <= self.early_ends
        to_user = web.WebSocketResponse(max_msg_size=0)
        await to_user.prepare(request)
        headers = _forwarded((name, value) for name, value in request.headers.items() if not name.startswith("Sec-"))
        async with (
            ClientSession() as session,
            session.ws_connect(self.dashboard + request.path_qs, headers=headers, max_msg_size=0) as from_head,
        ):
            async for message in from_head:
                if message.type != WSMsgType.TEXT:
                    break
                await to_user.send_str(message.data)
                if ends_early:
                    break
        if ends_early and number % 2 == 0 and request.transport is not None:
            self.broken += 1
            request.transport.abort()
        else:
            await to_user.close(code=1000)
        return to_user

    def serve(self) -> None:
        """Run until `stop`, in a thread of its own."""
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    def wait_for_start(self) -> None:
        """Wait until `address` is set."""
        assert self._started.wait(30)

    def stop(self) -> None:
        """End `serve`."""
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def dashboard_proxy(dashboard: str) -> Iterator[DashboardProxy]:
    """A running proxy."""
    proxy = DashboardProxy(dashboard)
    thread = threading.Thread(target=proxy.serve, daemon=True)
    thread.start()
    proxy.wait_for_start()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(30)


def _forwarded(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in _NOT_FORWARDED}
