"""The connection to the hub: SignalR over one WebSocket (B-01, B-07; docs/explanation/signalr.md).

One object is one connection: negotiate, upgrade, handshake, then frames until it ends.  When to
connect again is the owner's decision; this file knows nothing of backoff.

    NEW ──start()──▶ OPENING ──handshake──▶ OPEN ──stop(), Close, silence, broken──▶ CLOSED
                        └──refused, unavailable, stop()──────────────────────────────▶ CLOSED

The message classes are pysignalr's, the WebSocket is the ``websockets`` library's; the life of
the connection is ours, because a daemon must notice a frozen hub, fail its pending calls at once
and never be blocked by its own handlers.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from enum import Enum
from traceback import extract_tb

import anyio
import anyio.abc
import anyio.lowlevel
from pysignalr.messages import (
    CloseMessage,
    CompletionMessage,
    InvocationMessage,
    Message,
    PingMessage,
)
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from forge_core.errors import (
    ForgeError,
    HubConnectionLost,
    HubError,
    HubUnavailable,
    RefusedError,
)

from . import signalr_codec as codec
from .signalr_opening import MAX_HUB_TEXT_CHARACTERS, open_websocket
from .signalr_settings import SignalRSettings, no_token

__all__ = ["SignalRConnection", "SignalRConnectionFactory", "SignalRSettings", "no_token"]

Handler = Callable[[object], None]
CloseHandler = Callable[[ForgeError | None], None]

# Before silence is called silence, the event loop gets so long to read what has arrived.
LATE_READ_GRACE_MS = 50
LOGGED_RECORDS = 10
YIELD_EVERY_RECORDS = 256

_log = logging.getLogger(__name__)
_PING = codec.encode(PingMessage())


class Phase(Enum):
    """Where in its one life a connection is."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class _Call:
    """One invocation that waits for its completion."""

    __slots__ = ("done", "error", "result")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.result: object = None
        self.error: ForgeError | None = None


class SignalRConnection:
    """One connection to the hub, never reused.

    Handlers are called in the receive path: they get the single decoded argument, must not wait
    and should only validate and enqueue.  What a handler raises is logged, without its text,
    which could quote the message; the connection goes on.

    :param task_group: owns the connection's tasks; cancelling it closes the socket at once.
    """

    def __init__(self, settings: SignalRSettings, task_group: anyio.abc.TaskGroup) -> None:
        self._settings = settings
        self._task_group = task_group
        self._phase = Phase.NEW
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._websocket: ClientConnection | None = None
        self._handlers: dict[str, Handler] = {}
        self._close_handler: CloseHandler | None = None
        self._calls: dict[str, _Call] = {}
        self._invocation_ids = map(str, itertools.count(1))
        self._received_at = 0.0
        self._sent_at = 0.0
        self._silence: HubConnectionLost | None = None
        self._ignored = 0

    @property
    def ignored_records(self) -> int:
        """How many records were set aside: malformed, unknown, unexpected, or badly handled."""
        return self._ignored

    def on_close(self, handler: CloseHandler) -> None:
        """Set what is called exactly once when a started connection has ended.

        It gets None after :meth:`stop` or the owner's cancellation, else why the connection
        ended; ``allow_reconnect`` false in it means that the hub asked not to hurry back.  A
        :meth:`start` that raised is not followed by this call.
        """
        self._close_handler = handler

    def on_dispatch(self, handler: Handler) -> None:
        """Set what receives ``Dispatch`` (protocol v1)."""
        self._handlers["dispatch"] = handler

    def on_offer(self, handler: Handler) -> None:
        """Set what receives ``Offer``."""
        self._handlers["offer"] = handler

    def on_start(self, handler: Handler) -> None:
        """Set what receives ``Start``."""
        self._handlers["start"] = handler

    def on_lease_update(self, handler: Handler) -> None:
        """Set what receives ``LeaseUpdate``."""
        self._handlers["leaseupdate"] = handler

    def on_cancel(self, handler: Handler) -> None:
        """Set what receives ``Cancel``."""
        self._handlers["cancel"] = handler

    def on_reap(self, handler: Handler) -> None:
        """Set what receives ``Reap``."""
        self._handlers["reap"] = handler

    def on_runner_settings(self, handler: Handler) -> None:
        """Set what receives ``RunnerSettings``."""
        self._handlers["runnersettings"] = handler

    async def start(self) -> None:
        """Connect; returns when calls can be made.

        A token that the hub refuses with 401 is read anew from its source once.

        :raises HubRefused: the hub answered, with no; status and Retry-After as it gave them.
        :raises HubUnavailable: no answer within the bounds, or none that makes sense.
        :raises RefusedError: code ``invalid_token``.
        """
        assert self._phase is Phase.NEW, "a connection is never reused"
        self._phase = Phase.OPENING
        await self._task_group.start(self._live)

    async def stop(self) -> None:
        """End the connection in order, within ``close_timeout_ms``; a second call only waits."""
        if self._phase is Phase.NEW:
            self._phase = Phase.CLOSED
            self._ended.set()
        self._scope.cancel()
        await self._ended.wait()

    async def invoke(
        self, method: str, payload: Mapping[str, object], *, timeout_ms: int | None = None
    ) -> object:
        """Call a hub method with one object and return its completion's result (B-07).

        :param timeout_ms: for sending and answer together; None: the settings' bound.
        :raises HubUnavailable: nothing was sent.
        :raises HubConnectionLost: sent, outcome unknown: the connection ended, or time ran out.
        :raises HubError: the hub completed the call with an error.
        :raises RefusedError: code ``message_too_large`` or ``not_encodable``; nothing was sent.
        """
        websocket = self._websocket
        if self._phase is not Phase.OPEN or websocket is None:
            raise HubUnavailable(f"cannot call {method}: there is no connection to the hub")
        if len(self._calls) >= self._settings.max_pending_calls:
            raise HubUnavailable(f"cannot call {method}: {len(self._calls)} calls wait already")
        invocation_id = next(self._invocation_ids)
        record = self._encode_call(invocation_id, method, payload)
        within_ms = self._settings.invoke_timeout_ms if timeout_ms is None else timeout_ms
        call = self._calls[invocation_id] = _Call()
        try:
            with anyio.fail_after(within_ms / 1000):
                await self._send(websocket, record)
                await call.done.wait()
        except TimeoutError as error:
            raise HubConnectionLost(
                f"cannot tell the outcome of {method}: no answer within {within_ms} ms"
            ) from error
        except ConnectionClosed as error:
            raise HubConnectionLost(
                f"cannot tell the outcome of {method}: the connection ended while it was sent"
            ) from error
        finally:
            self._calls.pop(invocation_id, None)
        if call.error is not None:
            raise call.error
        return call.result

    async def _live(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """The connection's whole life, as one task of the owner's group."""
        was_open, orderly = False, False
        reason: ForgeError | None = None
        try:
            with self._scope:
                self._websocket, early = await open_websocket(self._settings)
                self._phase, was_open = Phase.OPEN, True
                task_status.started()
                reason = await self._serve(self._websocket, early)
            orderly = True
        finally:
            self._phase = Phase.CLOSED
            self._fail_calls(reason)
            await self._hang_up(orderly)
            self._ended.set()
            if was_open:
                self._tell_owner(reason)
        if not was_open:
            raise HubUnavailable("cannot connect to the hub: the connection was stopped meanwhile")

    # ---- open

    async def _serve(self, websocket: ClientConnection, early: bytes) -> ForgeError:
        """Receive until the connection ends; return why it did."""
        self._received_at = self._sent_at = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_alive, websocket)
            tasks.start_soon(self._watch_silence, websocket)
            reason = await self._receive(websocket, early)
            tasks.cancel_scope.cancel()
        return self._silence or reason

    async def _receive(self, websocket: ClientConnection, early: bytes) -> ForgeError:
        try:
            if early:
                await self._take(early)
            while True:
                frame = await websocket.recv(decode=False)
                self._received_at = anyio.current_time()
                await self._take(frame)
        except _EndedByHub as ended:
            return ended.reason
        except codec.FramingError as error:
            return HubConnectionLost(f"cannot go on with the hub: {error}")
        except ConnectionClosed as closed:
            return self._why_closed(closed)

    async def _take(self, frame: bytes) -> None:
        records = codec.decode_frame(frame, max_record_bytes=self._settings.max_inbound_bytes)
        for count, message in enumerate(records, start=1):
            self._handle(message)
            if count % YIELD_EVERY_RECORDS == 0:
                await anyio.lowlevel.checkpoint()

    def _handle(self, message: codec.Decoded) -> None:
        match message:
            case PingMessage():
                pass
            case CompletionMessage():
                self._complete(message)
            case InvocationMessage():
                self._deliver(message)
            case CloseMessage():
                raise _EndedByHub(message)
            case codec.MalformedRecord(reason=reason):
                self._ignore(f"a malformed record: {reason}")
            case codec.UnknownRecord(type=kind):
                self._ignore(f"a record of unknown type {kind}")
            case Message():
                self._ignore(f"an unexpected {type(message).__name__}")

    def _complete(self, message: CompletionMessage) -> None:
        call = self._calls.pop(message.invocation_id, None)
        if call is None:
            self._ignore("a completion that nothing waits for")
            return
        if message.error is None:
            call.result = message.result
        else:
            call.error = HubError(message.error[:MAX_HUB_TEXT_CHARACTERS])
        call.done.set()

    def _deliver(self, message: InvocationMessage) -> None:
        target = message.target[:MAX_HUB_TEXT_CHARACTERS]
        handler = self._handlers.get(target.lower())
        if handler is None:
            self._ignore(f"an invocation of {target!r}, which nothing handles")
        elif len(message.arguments) != 1:
            self._ignore(f"an invocation of {target} with {len(message.arguments)} arguments")
        else:
            try:
                handler(message.arguments[0])
            except Exception as error:  # noqa: BLE001 - one bad message must not end the link
                place = extract_tb(error.__traceback__)[-1]
                self._ignore(
                    f"an invocation of {target}: its handler raised {type(error).__name__}"
                    f" at {place.name}:{place.lineno}"
                )

    def _ignore(self, what: str) -> None:
        self._ignored += 1
        if self._ignored <= LOGGED_RECORDS:
            _log.warning("ignored from the hub: %s", what)
        if self._ignored == LOGGED_RECORDS:
            _log.warning("more ignored records on this connection are counted, not logged")

    async def _send(self, websocket: ClientConnection, record: bytes) -> None:
        self._sent_at = anyio.current_time()
        await websocket.send(record, text=True)

    def _encode_call(self, invocation_id: str, method: str, payload: Mapping[str, object]) -> bytes:
        record = codec.encode(InvocationMessage(invocation_id, method, [payload]))
        if len(record) > self._settings.max_outbound_bytes:
            raise RefusedError(
                f"cannot call {method}: the message of {len(record)} bytes is over the"
                f" {self._settings.max_outbound_bytes} that a hub accepts; split it",
                code="message_too_large",
            )
        return record

    # ---- liveness

    async def _keep_alive(self, websocket: ClientConnection) -> None:
        """Ping after a while without sending: the hub ends clients that it does not hear."""
        every = self._settings.keep_alive_ms / 1000
        while True:
            await anyio.sleep_until(self._sent_at + every)
            if anyio.current_time() < self._sent_at + every:
                continue
            try:
                await self._send(websocket, _PING)
            except ConnectionClosed:
                return

    async def _watch_silence(self, websocket: ClientConnection) -> None:
        """Abort the transport when the hub is silent: its close handshake would never end."""
        limit = self._settings.server_timeout_ms / 1000
        while self._silence is None:
            await anyio.sleep_until(self._received_at + limit)
            if anyio.current_time() < self._received_at + limit:
                continue
            received_at = self._received_at
            await anyio.sleep(LATE_READ_GRACE_MS / 1000)
            if self._received_at == received_at:
                self._silence = HubConnectionLost(
                    "cannot go on with the hub: nothing came for"
                    f" {self._settings.server_timeout_ms} ms"
                )
        websocket.transport.abort()

    # ---- ending

    def _why_closed(self, closed: ConnectionClosed) -> HubConnectionLost:
        if closed.sent is not None and closed.sent.code == CloseCode.MESSAGE_TOO_BIG:
            return HubConnectionLost(
                "cannot go on with the hub: it sent a message over"
                f" {self._settings.max_inbound_bytes} bytes"
            )
        if closed.rcvd is None:
            return HubConnectionLost("cannot go on with the hub: the connection broke off")
        code, text = int(closed.rcvd.code), closed.rcvd.reason
        return HubConnectionLost(f"cannot go on with the hub: it closed with code {code} {text!r}")

    def _fail_calls(self, reason: ForgeError | None) -> None:
        why = reason or "the connection was stopped"
        allow_reconnect = getattr(reason, "allow_reconnect", True)
        for call in self._calls.values():
            call.error = HubConnectionLost(
                f"cannot tell the outcome of a call to the hub: {why}",
                allow_reconnect=allow_reconnect,
            )
            call.done.set()
        self._calls.clear()

    async def _hang_up(self, orderly: bool) -> None:
        websocket = self._websocket
        if websocket is None:
            return
        if orderly:
            within = self._settings.close_timeout_ms / 1000
            with anyio.move_on_after(within, shield=True):
                await websocket.close()
                return
        websocket.transport.abort()

    def _tell_owner(self, reason: ForgeError | None) -> None:
        if self._close_handler is None:
            return
        try:
            self._close_handler(reason)
        except Exception:  # noqa: BLE001 - the connection has ended all the same
            _log.exception("the handler of a closed hub connection failed")


class _EndedByHub(Exception):  # noqa: N818 - the hub said so; nothing went wrong
    """The hub sent Close."""

    def __init__(self, message: CloseMessage) -> None:
        super().__init__()
        text = "" if message.error is None else f": {message.error[:MAX_HUB_TEXT_CHARACTERS]!r}"
        self.reason = HubConnectionLost(
            f"cannot go on with the hub: it closed the connection{text}",
            allow_reconnect=bool(message.allow_reconnect),
        )


class SignalRConnectionFactory:
    """Makes connections to one hub; another transport stands in by standing in for this (B-01)."""

    def __init__(self, settings: SignalRSettings) -> None:
        self._settings = settings

    def create(self, task_group: anyio.abc.TaskGroup) -> SignalRConnection:
        """Return a new connection, not yet started, whose tasks the group owns."""
        return SignalRConnection(self._settings, task_group)
