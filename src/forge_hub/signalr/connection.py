"""One client's connection: a bounded queue of what it is to be told, and who writes it."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio
from pysignalr.messages import CloseMessage, InvocationMessage, Message, PingMessage
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from forge_edges import signalr_codec as codec

from .options import HubOptions
from .transport import transport_of

P = TypeVar("P")

JOINED_RECORDS_BYTES = 64 * 1024
# What Starlette raises when the peer went away while, or before, something was sent to it.
_GONE = (WebSocketDisconnect, WebSocketDisconnected)
_PING = codec.encode(PingMessage())


class Connection(Generic[P]):
    """One established connection, from the handshake to its end.

    :ivar id: public name of the connection; new for every connection.
    :ivar principal: who the authentication said this is.
    :ivar state: for whoever owns the hub's methods; dropped with the connection.
    """

    def __init__(
        self, connection_id: str, principal: P, websocket: WebSocket, options: HubOptions
    ) -> None:
        self.id = connection_id
        self.principal = principal
        self.state: dict[str, object] = {}
        self._websocket = websocket
        self._options = options
        self._transport = transport_of(websocket.scope)
        self._scope = anyio.CancelScope()
        self._outbound: deque[bytes] = deque()
        self._outbound_bytes = 0
        self._wake = anyio.Event()
        self._closing = False
        self._ended = False
        self._sent_at = anyio.current_time()
        self._writing_since: float | None = None
        self._reading_since: float | None = None
        self._written = anyio.Event()

    @property
    def is_open(self) -> bool:
        """Whether what is sent now may still arrive."""
        return not (self._closing or self._ended)

    def send(self, target: str, payload: object) -> bool:
        """Queue one invocation of a client target.

        :returns: whether it was queued; False: the connection ends or has ended.  A client that
            reads too slowly for the queue's bound is cut off: it will come back and be told anew.
        :raises RefusedError: code ``not_encodable``.
        """
        return self.post(InvocationMessage(None, target, [payload]))

    def post(self, message: Message) -> bool:
        """Queue one message; see :meth:`send`."""
        return self._queue(codec.encode(message))

    def close(self, error: str | None = None, *, allow_reconnect: bool = False) -> None:
        """End the connection after what is queued; the client learns the reason."""
        if self.is_open:
            self._queue(codec.encode(CloseMessage(error, allow_reconnect or None)))
            self._closing = True
            self._wake.set()

    def abort(self) -> None:
        """Drop the connection now, whatever the peer does."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()
        self._scope.cancel()

    def _queue(self, record: bytes) -> bool:
        if not self.is_open:
            return False
        if (
            self._outbound_bytes + len(record) > self._options.max_outbound_bytes
            or len(self._outbound) >= self._options.max_outbound_messages
        ):
            self.abort()
            return False
        self._outbound.append(record)
        self._outbound_bytes += len(record)
        self._wake.set()
        return True

    # ---- for the hub

    @property
    def scope(self) -> anyio.CancelScope:
        """Covers everything that is done for this connection."""
        return self._scope

    async def answer_handshake(self, error: str | None) -> None:
        """Send the handshake response; an error closes the connection."""
        try:
            await self._websocket.send_text(codec.handshake_response(error).decode())
            if error is not None:
                await self._websocket.close(1000)
        except _GONE:
            self._ended = True

    async def write(self) -> None:
        """Send what is queued until the connection ends; a burst goes out as one frame."""
        try:
            while not self._ended:
                if self._outbound:
                    await self._write_frame()
                elif self._closing:
                    self._writing_since = anyio.current_time()
                    await self._websocket.close(1000)
                    return
                else:
                    self._wake = anyio.Event()
                    await self._wake.wait()
        except _GONE:
            self._ended = True
        finally:
            self._written.set()

    async def finish(self) -> None:
        """Wait until a close that was asked for is written; :meth:`tick` bounds it."""
        if self._closing and not self._ended:
            await self._written.wait()

    async def _write_frame(self) -> None:
        frame = self._outbound.popleft()
        while self._outbound and len(frame) + len(self._outbound[0]) <= JOINED_RECORDS_BYTES:
            frame += self._outbound.popleft()
        self._writing_since = anyio.current_time()
        await self._websocket.send_text(frame.decode())
        self._outbound_bytes -= len(frame)
        self._writing_since = None
        self._sent_at = anyio.current_time()

    async def receive(self) -> bytes | None:
        """Return the next WebSocket message, or None at the end."""
        self._reading_since = anyio.current_time()
        event = await self._websocket.receive()
        self._reading_since = None
        if event["type"] == "websocket.disconnect":
            self._ended = True
            return None
        text: str | None = event.get("text")
        if text is not None:
            return text.encode()
        data: bytes = event.get("bytes") or b""
        return data

    def tick(self, now: float, *, judge_silence: bool) -> None:
        """Ping when due; cut off a client that is silent, does not read, or does not close.

        A client is silent only while it is listened to, not while its calls wait for their turn.

        :param now: seconds, anyio's clock.
        :param judge_silence: False after the event loop was held up, when silence may be ours.
        """
        options = self._options
        silent_ms = _elapsed_ms(self._reading_since, now) if judge_silence else 0.0
        writing_ms = _elapsed_ms(self._writing_since, now)
        patience_ms = options.close_timeout_ms if self._closing else options.write_timeout_ms
        if silent_ms >= options.client_timeout_ms or writing_ms >= patience_ms:
            self.abort()
        elif not self._outbound and _elapsed_ms(self._sent_at, now) >= options.keep_alive_ms:
            self._queue(_PING)


def _elapsed_ms(since: float | None, now: float) -> float:
    return 0.0 if since is None else (now - since) * 1000
