"""A client that speaks SignalR to our hub by hand, and one that never reads."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import anyio
import orjson
from starlette.requests import HTTPConnection

from forge_hub.signalr import Connection, HubOptions, SignalRHub
from signalr_parts import record

FAST = HubOptions(
    keep_alive_ms=100,
    client_timeout_ms=400,
    handshake_timeout_ms=300,
    write_timeout_ms=300,
    close_timeout_ms=300,
    tick_ms=20,
    max_queued_invocations=2,
)


async def authenticate(token: str | None, _request: HTTPConnection) -> str | None:
    return token if token in {"ann", "bob"} else None


def make_hub(options: HubOptions | None = None) -> SignalRHub[str]:
    hub: SignalRHub[str] = SignalRHub("/hubs/runner", authenticate, options)

    @hub.method("Echo")
    async def echo(_connection: Connection[str], payload: object) -> object:
        return payload

    @hub.method("Void")
    async def void(_connection: Connection[str], _payload: object) -> object:
        return None

    return hub


class Client:
    """A WebSocket client that speaks SignalR by hand."""

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self.websocket = websocket
        self._records: list[dict[str, object]] = []

    async def send(self, **fields: object) -> None:
        await self.websocket.send_str(record(**fields))

    async def call(self, target: str, *arguments: object, id: str | None = None) -> None:  # noqa: A002
        await self.send(type=1, target=target, arguments=arguments, invocationId=id)

    async def next(self) -> dict[str, object]:
        """The next record, pings left out; {} once the connection has ended."""
        while not self._records:
            message = await self.websocket.receive(timeout=10)
            if message.type is not aiohttp.WSMsgType.TEXT:
                return {}
            parts = message.data.split("\x1e")
            assert parts.pop() == ""
            self._records = [r for r in map(orjson.loads, parts) if r != {"type": 6}]
        return self._records.pop(0)


def bearer(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


async def negotiate(session: aiohttp.ClientSession, url: str, who: str = "ann") -> str:
    async with session.post(f"{url}/negotiate?negotiateVersion=1", headers=bearer(who)) as answer:
        assert answer.status == 200
        return str((await answer.json())["connectionToken"])


async def upgrade_status(
    session: aiohttp.ClientSession, url: str, ticket: str, who: str | None = "ann"
) -> int:
    try:
        async with session.ws_connect(f"{url}?id={ticket}", headers=bearer(who)):
            return 101
    except aiohttp.WSServerHandshakeError as error:
        return error.status


@asynccontextmanager
async def client(url: str, who: str = "ann") -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        ticket = await negotiate(session, url, who)
        async with session.ws_connect(f"{url}?id={ticket}", headers=bearer(who)) as websocket:
            await websocket.send_str('{"protocol":"json","version":1}\x1e')
            assert (await websocket.receive()).data == "{}\x1e"
            yield Client(websocket)


async def read_until_end(raw: socket.socket) -> bytes:
    """What a peer gets that begins to read at last, and finds its connection dropped."""
    got = b""
    with anyio.fail_after(5):
        while True:
            await anyio.wait_readable(raw)
            try:
                chunk = raw.recv(1 << 20)
            except ConnectionResetError:
                return got
            if not chunk:
                return got
            got += chunk


@asynccontextmanager
async def raw_client(url: str) -> AsyncIterator[socket.socket]:
    """A connected client that never reads: a bare socket."""
    async with aiohttp.ClientSession() as session:
        ticket = await negotiate(session, url, "bob")
    port = urlsplit(url).port or 0
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.setblocking(False)
        request = (
            f"GET /hubs/runner?id={ticket} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            "Sec-WebSocket-Version: 13\r\nAuthorization: Bearer bob\r\n\r\n"
        )
        handshake = b'{"protocol":"json","version":1}\x1e'
        frame = bytes([0x81, 0x80 | len(handshake), 0, 0, 0, 0]) + handshake  # RFC 6455, 5.2
        raw.sendall(request.encode())
        await anyio.wait_readable(raw)
        assert b" 101 " in raw.recv(4096)
        raw.sendall(frame)
        yield raw


def peer_holds(raw: socket.socket) -> bool:
    """Whether the other end of a TCP connection on this machine is still established (proc(5))."""
    ours, theirs = raw.getsockname()[1], raw.getpeername()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        ports = (int(local.split(":")[1], 16), int(remote.split(":")[1], 16))
        if ports == (theirs, ours):
            return state == "01"
    return False
