"""The endpoint: who may connect, whose turn it is, and the one clock for all connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from pysignalr.messages import (
    CloseMessage,
    CompletionMessage,
    InvocationMessage,
    StreamInvocationMessage,
)
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from forge_edges import signalr_codec as codec

from .connection import Connection
from .methods import Method, Methods, log_failure
from .options import HubOptions
from .tickets import TicketError, Tickets
from .transport import transport_of

P = TypeVar("P")

Authenticate = Callable[[str | None, HTTPConnection], Awaitable[P | None]]
Hook = Callable[[Connection[P]], Awaitable[None]]


class SignalRHub(Generic[P]):
    """A SignalR hub below one path.

    Methods take one object and return one.  Calls of one client start in order, at most
    ``max_parallel_invocations`` at a time; they are cancelled when its connection ends, so what
    must last is committed by the method itself.

    :param authenticate: gets the bearer token (None without one) and the request, before the
        WebSocket is accepted; returns who it is, or None for 401.  Tokens in the query are not
        read: access logs keep them.
    """

    def __init__(
        self, path: str, authenticate: Authenticate[P], options: HubOptions | None = None
    ) -> None:
        self._path = path
        self._authenticate = authenticate
        self._options = options or HubOptions()
        self._methods: Methods[P] = Methods()
        self._connected_hook: Hook[P] | None = None
        self._disconnected_hook: Hook[P] | None = None
        self._connections: dict[str, Connection[P]] = {}
        self._tickets: Tickets[P] = Tickets(
            ttl_ms=self._options.ticket_ttl_ms, max_tickets=self._options.max_tickets
        )
        self._sockets = 0
        self._closing_transports: dict[asyncio.WriteTransport, float] = {}
        self._is_running = False
        self._all_gone = anyio.Event()

    @property
    def connections(self) -> Mapping[str, Connection[P]]:
        """The established connections by id; a live view."""
        return MappingProxyType(self._connections)

    def method(self, name: str) -> Callable[[Method[P]], Method[P]]:
        """Register a hub method; names are compared without case, as ASP.NET Core does."""

        def register(function: Method[P]) -> Method[P]:
            self._methods.register(name, function)
            return function

        return register

    def on_connected(self, hook: Hook[P]) -> Hook[P]:
        """Set what runs after the handshake and before the first call; raising ends it."""
        self._connected_hook = hook
        return hook

    def on_disconnected(self, hook: Hook[P]) -> Hook[P]:
        """Set what runs once for each connection that was established, however it ended."""
        self._disconnected_hook = hook
        return hook

    def routes(self) -> list[BaseRoute]:
        """The two routes of the hub."""
        return [
            Route(f"{self._path}/negotiate", self._negotiate, methods=["POST"]),
            WebSocketRoute(self._path, self._websocket),
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept connections while the context is open; then tell them all to come back."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tick_for_ever)
            self._is_running = True
            try:
                yield
            finally:
                await self.shut_down()
                tasks.cancel_scope.cancel()

    async def shut_down(self) -> None:
        """Accept nobody any more and tell all clients to come back; bounded, idempotent.

        To be called before the server is told to stop: it closes the sockets without a word.
        """
        self._is_running = False
        self._all_gone = anyio.Event()
        for connection in list(self._connections.values()):
            connection.close("the hub is shutting down", allow_reconnect=True)
        with anyio.move_on_after(self._options.close_timeout_ms / 1000, shield=True):
            if self._connections:
                await self._all_gone.wait()
        for connection in list(self._connections.values()):
            connection.abort()
        for transport in self._closing_transports:
            transport.abort()
        self._closing_transports.clear()

    async def _tick_for_ever(self) -> None:
        every = self._options.tick_ms / 1000
        while True:
            due = anyio.current_time() + every
            await anyio.sleep_until(due)
            now = anyio.current_time()
            for connection in list(self._connections.values()):
                connection.tick(now, judge_silence=now - due < every)
            for transport, deadline in list(self._closing_transports.items()):
                if transport.is_closing() and not transport.get_write_buffer_size():
                    del self._closing_transports[transport]
                elif now >= deadline:
                    del self._closing_transports[transport]
                    transport.abort()

    # ---- HTTP

    async def _who(self, request: HTTPConnection) -> P | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return await self._authenticate(token if scheme.lower() == "bearer" else None, request)

    def _no_room(self) -> Response | None:
        if self._is_running and self._sockets < self._options.max_connections:
            return None
        return PlainTextResponse("no room", status_code=503, headers={"Retry-After": "5"})

    async def _negotiate(self, request: Request) -> Response:
        principal = await self._who(request)
        if principal is None:
            return _unauthorized()
        if (refusal := self._no_room()) is not None:
            return refusal
        if request.query_params.get("negotiateVersion") != "1":
            return PlainTextResponse("negotiateVersion 1 is required", status_code=400)
        ticket = self._tickets.issue(principal, _now_ms())
        if ticket is None:
            return PlainTextResponse("no room", status_code=503, headers={"Retry-After": "5"})
        answer = {
            "negotiateVersion": 1,
            "connectionId": ticket.connection_id,
            "connectionToken": ticket.token,
            "availableTransports": [{"transport": "WebSockets", "transferFormats": ["Text"]}],
        }
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})

    async def _websocket(self, websocket: WebSocket) -> None:
        principal = await self._who(websocket)
        if principal is None:
            await websocket.send_denial_response(_unauthorized())
            return
        if (refusal := self._no_room()) is not None:
            await websocket.send_denial_response(refusal)
            return
        token = websocket.query_params.get("id", "")
        ticket = self._tickets.redeem(token, principal, _now_ms())
        if isinstance(ticket, TicketError):
            await websocket.send_denial_response(
                PlainTextResponse("no such connection", status_code=ticket.value)
            )
            return
        self._sockets += 1
        try:
            await websocket.accept()
            await self._serve(Connection(ticket.connection_id, principal, websocket, self._options))
        finally:
            self._sockets -= 1
            self._tickets.release(token)
            self._let_close(websocket)

    def _let_close(self, websocket: WebSocket) -> None:
        """Watch a transport whose orderly close the peer may never let finish."""
        transport = transport_of(websocket.scope)
        if transport is not None:
            deadline = anyio.current_time() + self._options.close_timeout_ms / 1000
            self._closing_transports[transport] = deadline

    # ---- one connection

    async def _serve(self, connection: Connection[P]) -> None:
        with connection.scope:
            early = await self._shake_hands(connection)
            if early is None or not self._is_running:
                return
            self._connections[connection.id] = connection
            try:
                await self._converse(connection, early)
            finally:
                del self._connections[connection.id]
                if not self._connections:
                    self._all_gone.set()
                await self._tell_disconnected(connection)

    async def _shake_hands(self, connection: Connection[P]) -> bytes | None:
        """Return what followed the handshake in its frame; None: there was no handshake."""
        with anyio.move_on_after(self._options.handshake_timeout_ms / 1000):
            frame = await connection.receive()
            if frame is None:
                return None
            record, separator, early = frame.partition(codec.SEPARATOR)
            if separator and codec.is_handshake_request(record):
                await connection.answer_handshake(None)
                return early
            await connection.answer_handshake("The protocol must be json, version 1.")
        return None

    async def _converse(self, connection: Connection[P], early: bytes) -> None:
        options = self._options
        calls, turns = anyio.create_memory_object_stream[InvocationMessage](
            options.max_queued_invocations
        )
        async with calls, turns, anyio.create_task_group() as tasks:
            tasks.start_soon(connection.write)
            if await self._tell_connected(connection):
                tasks.start_soon(self._run_calls, connection, turns)
                error = await self._receive(connection, early, calls)
                if error is not None:
                    connection.close(error)
            await connection.finish()
            tasks.cancel_scope.cancel()

    async def _receive(
        self,
        connection: Connection[P],
        early: bytes,
        calls: MemoryObjectSendStream[InvocationMessage],
    ) -> str | None:
        """Queue the client's calls until it leaves; return what it did wrong, if anything."""
        frame: bytes | None = early or await connection.receive()
        while frame is not None:
            try:
                messages = list(
                    codec.decode_frame(frame, max_record_bytes=self._options.max_receive_bytes)
                )
            except codec.FramingError as error:
                return str(error)
            for message in messages:
                match message:
                    case InvocationMessage():
                        await calls.send(message)
                    case StreamInvocationMessage(invocation_id=invocation_id):
                        connection.post(
                            CompletionMessage(invocation_id, error="This hub does not stream.")
                        )
                    case CloseMessage():
                        return None
                    case codec.MalformedRecord(reason=reason):
                        return f"a malformed record: {reason}"
            frame = await connection.receive()
        return None

    async def _run_calls(
        self, connection: Connection[P], turns: MemoryObjectReceiveStream[InvocationMessage]
    ) -> None:
        """Start the calls in their order, as many at a time as there may be."""
        room = anyio.Semaphore(self._options.max_parallel_invocations)
        async with anyio.create_task_group() as tasks:
            async for message in turns:
                await room.acquire()
                tasks.start_soon(self._call, connection, message, room)

    async def _call(
        self, connection: Connection[P], message: InvocationMessage, room: anyio.Semaphore
    ) -> None:
        try:
            await self._methods.call(connection, message)
        finally:
            room.release()

    async def _tell_connected(self, connection: Connection[P]) -> bool:
        if self._connected_hook is None:
            return True
        try:
            with anyio.fail_after(self._options.hook_timeout_ms / 1000):
                await self._connected_hook(connection)
        except Exception as error:  # noqa: BLE001 - told to the client as any masked error
            log_failure("the hook of a new connection", error)
            connection.close("Connection closed with an error.", allow_reconnect=True)
            return False
        return True

    async def _tell_disconnected(self, connection: Connection[P]) -> None:
        if self._disconnected_hook is None:
            return
        with anyio.move_on_after(self._options.hook_timeout_ms / 1000, shield=True):
            try:
                await self._disconnected_hook(connection)
            except Exception as error:  # noqa: BLE001 - the connection has ended all the same
                log_failure("the hook of an ended connection", error)


def _unauthorized() -> Response:
    return Response(status_code=401, headers={"WWW-Authenticate": "Bearer"})


def _now_ms() -> int:
    return int(anyio.current_time() * 1000)
