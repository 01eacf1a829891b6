"""Parts for the SignalR tests: a scripted hub, our hub on a real socket, a proxy that freezes."""

from __future__ import annotations

import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import orjson
import uvicorn
from aiohttp import WSMsgType, web
from starlette.applications import Starlette

from forge_core.errors import ForgeError
from forge_edges.signalr import SignalRConnection, SignalRSettings
from forge_hub.signalr import UVICORN_SETTINGS, SignalRHub, expose_transport

HUB_PATH = "/hubs/runner"
HUB_PROCESS = Path(__file__).with_name("signalr_hub_process.py")

Script = Callable[["Peer"], Awaitable[None]]


def record(**fields: object) -> str:
    """One record as a hub writes it."""
    return orjson.dumps(fields).decode() + "\x1e"


class Peer:
    """The scripted hub's end of one WebSocket, after the handshake."""

    def __init__(self, websocket: web.WebSocketResponse) -> None:
        self.websocket = websocket

    async def send(self, text: str) -> None:
        await self.websocket.send_str(text)

    async def next_call(self) -> dict[str, object]:
        """The next invocation of the client; pings are skipped."""
        while True:
            message = await self.websocket.receive()
            assert message.type is WSMsgType.TEXT, message
            for text in message.data.split("\x1e"):
                fields = orjson.loads(text) if text else {"type": 6}
                if fields["type"] == 1:
                    return dict(fields)

    async def wait_closed(self) -> None:
        while not self.websocket.closed:
            await self.websocket.receive()


class ScriptedHub:
    """A SignalR server that does what its script says; what it was asked is in ``requests``."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Peer.wait_closed
        self.negotiate: Callable[[web.Request], Awaitable[web.Response]] = self.negotiate_plainly
        self.upgrade: Callable[[web.Request], Awaitable[web.StreamResponse]] = self.converse
        self.handshake_answer = "{}\x1e"
        self.requests: list[web.Request] = []
        self.received: list[str] = []
        self.url = ""

    async def negotiate_plainly(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "negotiateVersion": 1,
                "connectionId": "public",
                "connectionToken": "ticket",
                "availableTransports": [{"transport": "WebSockets", "transferFormats": ["Text"]}],
            }
        )

    async def converse(self, request: web.Request) -> web.WebSocketResponse:
        websocket = web.WebSocketResponse(max_msg_size=0)
        await websocket.prepare(request)
        message = await websocket.receive()
        if message.type is WSMsgType.TEXT:
            self.received.append(message.data)
            if self.handshake_answer:
                await websocket.send_str(self.handshake_answer)
            await self.script(Peer(websocket))
        await websocket.close()
        return websocket

    async def _negotiate(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        return await self.negotiate(request)

    async def _upgrade(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        return await self.upgrade(request)

    @asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post(f"{HUB_PATH}/negotiate", self._negotiate)
        app.router.add_get(HUB_PATH, self._upgrade)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}{HUB_PATH}"
        try:
            yield self.url
        finally:
            await runner.cleanup()


@asynccontextmanager
async def connected(
    settings: SignalRSettings, **handlers: Callable[[object], None]
) -> AsyncIterator[tuple[SignalRConnection, list[ForgeError | None]]]:
    """A started connection and the list that its end is written to."""
    ends: list[ForgeError | None] = []
    async with anyio.create_task_group() as tasks:
        connection = SignalRConnection(settings, tasks)
        connection.on_close(ends.append)
        for name, handler in handlers.items():
            getattr(connection, name)(handler)
        await connection.start()
        try:
            yield connection, ends
        finally:
            await connection.stop()


async def wait_until(condition: Callable[[], bool], within_s: float = 10) -> None:
    """Return as soon as the condition holds."""
    with anyio.fail_after(within_s):
        while not condition():
            await anyio.sleep(0.005)


@asynccontextmanager
async def serving(hub: SignalRHub[str]) -> AsyncIterator[str]:
    """Our hub under uvicorn on a real socket; yields the hub's URL."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with hub.running():
            yield

    app = expose_transport(Starlette(routes=hub.routes(), lifespan=lifespan))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **UVICORN_SETTINGS))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            await wait_until(lambda: server.started)
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}{HUB_PATH}"
            finally:
                server.should_exit = True


@asynccontextmanager
async def hub_process() -> AsyncIterator[tuple[anyio.abc.Process, str]]:
    """Our hub in a process of its own, to be stopped or killed; yields it and the hub's URL."""
    process = await anyio.open_process([sys.executable, str(HUB_PROCESS)], stderr=None)
    try:
        assert process.stdout is not None
        line = await process.stdout.receive()
        yield process, f"http://127.0.0.1:{int(line)}{HUB_PATH}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()


class FreezingProxy:
    """A TCP proxy that can stop forwarding without closing anything: a half-open connection."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._flowing = anyio.Event()
        self._flowing.set()

    def freeze(self) -> None:
        self._flowing = anyio.Event()

    def thaw(self) -> None:
        self._flowing.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, self._serve)
            yield listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610
            tasks.cancel_scope.cancel()
        await listener.aclose()

    async def _serve(self, client: anyio.abc.SocketStream) -> None:
        server = await anyio.connect_tcp("127.0.0.1", self._target_port)
        async with client, server, anyio.create_task_group() as tasks:
            tasks.start_soon(self._copy, client, server)
            await self._copy(server, client)
            tasks.cancel_scope.cancel()

    async def _copy(self, source: anyio.abc.SocketStream, sink: anyio.abc.SocketStream) -> None:
        try:
            async for data in source:
                await self._flowing.wait()
                await sink.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return
