"""The hub as flows see it: whichever connection is online now, every answer typed (B-07)."""

from __future__ import annotations

from typing import TypeVar

import anyio

from forge_core.errors import HubUnavailable
from forge_core.ports import BridgeConnection
from forge_core.wire.base import WireModel, parse
from forge_core.wire.from_bridge import HUB_METHODS, Ack
from forge_core.wire.limits import require_fits

AckModel = TypeVar("AckModel", bound=Ack)


class HubLink:
    """Holds the connection that is online, or none; nothing here outlives a connection."""

    def __init__(self) -> None:
        self._connection: BridgeConnection | None = None
        self._online = anyio.Event()

    @property
    def is_online(self) -> bool:
        """Whether a registered connection is there."""
        return self._connection is not None

    def online(self, connection: BridgeConnection) -> None:
        """This connection is registered from now on."""
        self._connection = connection
        self._online.set()

    def offline(self, connection: BridgeConnection) -> None:
        """This connection has ended; a later one may already have taken over."""
        if self._connection is connection:
            self._connection = None
            self._online = anyio.Event()

    async def wait_online(self) -> None:
        """Return once a registered connection is there."""
        await self._online.wait()

    async def drop(self) -> None:
        """End the connection, so that the next one registers anew; nothing when there is none."""
        if self._connection is not None:
            await self._connection.stop()

    async def call(
        self, request: WireModel, answer: type[AckModel], *, timeout_ms: int | None = None
    ) -> AckModel:
        """Invoke the hub method that is named like the request and parse its acknowledgement.

        :raises HubUnavailable: nothing was sent.
        :raises HubConnectionLost: sent, outcome unknown.
        :raises HubError: the hub completed it with an error.
        :raises RefusedError: the request is too large, or the answer is not what it should be.
        """
        connection = self._connection
        if connection is None:
            raise HubUnavailable(f"cannot send {type(request).__name__}: the hub is not connected")
        return await call(connection, request, answer, timeout_ms=timeout_ms)


async def call(
    connection: BridgeConnection,
    request: WireModel,
    answer: type[AckModel],
    *,
    timeout_ms: int | None = None,
) -> AckModel:
    """:meth:`HubLink.call` over one given connection; for what precedes being online."""
    method = type(request).__name__
    assert HUB_METHODS[method].acknowledgement is answer, method
    payload = request.to_wire()
    require_fits(method, payload)
    result = await connection.invoke(method, payload, timeout_ms=timeout_ms)
    return parse(answer, result, what=f"the acknowledgement of {method}")
