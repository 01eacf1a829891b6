"""A hub on a real socket that a test scripts word by word: honest until it is told to lie.

It speaks through our own SignalR endpoint, so framing and limits are real: a message of the bridge
over 30,000 bytes ends its connection, and every message is held against its model as it arrives.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import uvicorn
from pysignalr.messages import InvocationMessage
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forge_core.errors import RefusedError
from forge_core.wire.base import parse
from forge_core.wire.from_bridge import HUB_METHODS
from forge_core.wire.lease_mac import lease_message, sign_lease
from forge_core.wire.limits import MAX_MESSAGE_BYTES
from forge_hub.signalr import (
    UVICORN_SETTINGS,
    Connection,
    HubException,
    HubOptions,
    SignalRHub,
    expose_transport,
)

__all__ = ["Call", "HubException", "ScriptedHub", "renewal"]

PATIENCE_S = 20.0
TOKEN = "token-of-the-scripted-hub-0123456789"
ISSUED_AT = "2026-11-29T14:00:00.000Z"
PERSISTED = {"accepted": True, "disposition": "persisted"}
OPTIONS = HubOptions(
    # More than one call at a time: a call that is never answered must not hold up the others.
    max_parallel_invocations=1024,
    max_queued_invocations=4096,
    max_receive_bytes=MAX_MESSAGE_BYTES,
    max_outbound_messages=50_000,
    max_outbound_bytes=256 << 20,
    close_timeout_ms=2_000,
)

Answer = Mapping[str, object] | Callable[[dict[str, Any]], object] | object
"""What a method answers: a value, or a function of the message that returns, awaits or raises."""


@dataclass(frozen=True, slots=True)
class Call:
    """One message of the bridge: on which connection (counted from 1), and what."""

    connection: int
    method: str
    payload: dict[str, Any]


@dataclass(slots=True)
class ScriptedHub:
    """See the module.

    :ivar calls: everything that the bridge has sent, in order of arrival.
    :ivar requests: path and Authorization header of each HTTP request.
    :ivar answers: by method; what is not here is answered honestly.
    :ivar refusals: HTTP answers given, one each, before anything else is looked at.
    :ivar snapshot: the attempts of ``ReadAttemptSnapshot``.
    """

    heartbeat_interval_ms: int = 600_000
    calls: list[Call] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    refusals: list[Response] = field(default_factory=list)
    snapshot: list[dict[str, object]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    url: str = ""
    connected: int = 0
    instance_id: str = ""
    runner_id: str = ""
    _arrived: anyio.Event = field(default_factory=anyio.Event)
    _hub: SignalRHub[str] = field(init=False)

    def __post_init__(self) -> None:
        self._hub = SignalRHub("/hubs/runner", self._authenticate, OPTIONS)
        self._hub.on_connected(self._number)
        for method in HUB_METHODS:
            self._hub.method(method)(partial(self._take, method))

    # -- what the bridge did --------------------------------------------------------------------

    def of(self, method: str, **fields: object) -> list[dict[str, Any]]:
        """The messages of this method that have these fields."""
        return [
            call.payload
            for call in self.calls
            if call.method == method
            and all(call.payload.get(name) == value for name, value in fields.items())
        ]

    async def until(self, condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
        """Return once the condition holds; looked at whenever the bridge did something."""
        try:
            with anyio.fail_after(within_s):
                while not condition():
                    await self._arrived.wait()
        except TimeoutError:
            what = inspect.getsource(condition).strip() if callable(condition) else ""
            told = [(c.method, c.payload.get("type")) for c in self.calls[-40:]]
            raise AssertionError(f"in vain: {what}; the last calls: {told}") from None

    async def next(self, method: str, *, count: int = 1, **fields: object) -> dict[str, Any]:
        """The ``count``-th message of this method with these fields, waited for."""
        await self.until(lambda: len(self.of(method, **fields)) >= count)
        return self.of(method, **fields)[count - 1]

    async def decision(self, offer: Mapping[str, Any], count: int = 1) -> dict[str, Any]:
        """The answer to this offer."""
        return await self.next("SubmitOfferDecision", count=count, offerId=offer["offerId"])

    async def event(self, attempt_id: str, event_type: str, count: int = 1) -> dict[str, Any]:
        """An event of this attempt."""
        return await self.next(
            "SubmitDispatchEvent", count=count, attemptId=attempt_id, type=event_type
        )

    async def over(self, attempt_id: str, **fields: Any) -> dict[str, Any]:
        """The result with the cleanup complete."""
        return await self.next(
            "SubmitDispatchResult", attemptId=attempt_id, cleanup="complete", **fields
        )

    # -- what the hub says ----------------------------------------------------------------------

    @property
    def connection(self) -> Connection[str]:
        """The newest connection of the bridge."""
        return list(self._hub.connections.values())[-1]

    @property
    def is_connected(self) -> bool:
        """Whether the bridge is there."""
        return bool(self._hub.connections)

    async def online(self, count: int = 1) -> None:
        """Wait until the bridge has registered, read the snapshot and sent a heartbeat."""
        await self.until(
            lambda: len({c.connection for c in self.calls if c.method == "Heartbeat"}) >= count
        )

    def send(self, target: str, *arguments: object) -> bool:
        """Send any target with any arguments over the newest connection."""
        return self.connection.post(InvocationMessage(None, target, list(arguments)))

    def send_raw(self, record: bytes) -> bool:
        """Send bytes that no encoder would make, separator included."""
        return self.connection._queue(record)

    def drop(self) -> None:
        """Every connection breaks, without a word."""
        for connection in tuple(self._hub.connections.values()):
            connection.abort()

    def close(self, error: str | None = None, *, allow_reconnect: bool = False) -> None:
        """Every connection is closed with a word."""
        for connection in tuple(self._hub.connections.values()):
            connection.close(error, allow_reconnect=allow_reconnect)

    def fall_silent(self) -> None:
        """Nothing is answered from here on."""
        self.answers.update(dict.fromkeys(HUB_METHODS, self.never))

    def speak_again(self) -> None:
        """Everything is answered honestly."""
        self.answers.clear()

    async def never(self, _payload: dict[str, Any]) -> object:
        """An answer that does not come while the connection lives."""
        await anyio.sleep_forever()
        raise AssertionError

    # -- private --------------------------------------------------------------------------------

    async def _authenticate(self, token: str | None, _request: HTTPConnection) -> str | None:
        return "runner" if token == TOKEN else None

    async def _number(self, connection: Connection[str]) -> None:
        self.connected += 1
        connection.state["number"] = self.connected
        self._notify()

    async def _take(self, method: str, connection: Connection[str], payload: Any) -> object:
        self._check(method, payload)
        number = connection.state["number"]
        assert isinstance(number, int)
        self.calls.append(Call(number, method, payload))
        if method == "RegisterRunner":
            self.runner_id, self.instance_id = payload["runnerId"], payload["runnerInstanceId"]
        self._notify()
        if method not in self.answers:
            return self._honest(method)
        answer = self.answers[method]
        if callable(answer):
            answer = answer(payload)
            if inspect.isawaitable(answer):
                answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _check(self, method: str, payload: object) -> None:
        """The message is exactly what its model says: nothing ill-typed, nothing more."""
        model = HUB_METHODS[method].request
        try:
            if parse(model, payload, what=method).to_wire() != payload:
                self.faults.append(f"{method} is not what its model says: {payload}")
        except RefusedError as error:
            self.faults.append(f"{method}: {error}")

    def _honest(self, method: str) -> object:
        match method:
            case "RegisterRunner":
                return {"accepted": True, "heartbeatIntervalMs": self.heartbeat_interval_ms}
            case "ReadAttemptSnapshot":
                return {"accepted": True, "attempts": list(self.snapshot), "parts": 1}
            case "Heartbeat" | "SubmitOfferDecision":
                return {"accepted": True}
            case "RedeemSecretGrant" | "RedeemPublishGrant":
                return {"accepted": False, "reason": "unknown_handle"}
            case _:
                return PERSISTED

    def _notify(self) -> None:
        self._arrived.set()
        self._arrived = anyio.Event()

    def _gate(self, app: ASGIApp) -> ASGIApp:
        """Note every request, and refuse the next one where the script says so."""

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] in ("http", "websocket"):
                headers = dict(scope["headers"])
                authorization = headers.get(b"authorization")
                self.requests.append(
                    (scope["path"], None if authorization is None else authorization.decode())
                )
                self._notify()
                if scope["type"] == "http" and self.refusals:
                    await self.refusals.pop(0)(scope, receive, send)
                    return
            await app(scope, receive, send)

        return gated

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedHub]:
        """Listen on a free port; at the end nothing that the bridge sent may have been wrong."""
        app = expose_transport(self._gate(Starlette(routes=self._hub.routes())))
        config = uvicorn.Config(app, log_level="error", lifespan="off", **UVICORN_SETTINGS)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.serve, [listener])
                while not server.started:
                    await anyio.sleep(0.005)
                try:
                    async with self._hub.running():
                        yield self
                finally:
                    # Not by its flag, which it looks at ten times a second only.
                    server.force_exit = True
                    with anyio.CancelScope(shield=True):
                        await server.shutdown([listener])
                    tasks.cancel_scope.cancel()
        assert self.faults == []


def renewal(
    attempt_id: str,
    fence: int,
    sequence: int,
    key: bytes,
    *,
    ttl_ms: int = 60_000,
) -> dict[str, object]:
    """A ``LeaseUpdate`` with its MAC."""
    message = lease_message(attempt_id, fence, sequence, ttl_ms, ISSUED_AT)
    return {
        "attemptId": attempt_id,
        "fence": fence,
        "sequence": sequence,
        "ttlMs": ttl_ms,
        "issuedAt": ISSUED_AT,
        "mac": sign_lease(key, message),
    }
