"""The way from an ASGI connection to its TCP transport, to be able to abort it.

ASGI knows only the orderly close, which waits until the peer has read everything: a frozen peer
would hold its connection for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_KEY = "forge.transport"


def expose_transport(app: ASGIApp) -> ASGIApp:
    """Wrap the outermost application so that :func:`transport_of` finds the transport.

    uvicorn's ``send`` is a bound method of its protocol object, which has the transport; under a
    server where that is not so, connections are ended without the abort.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            scope[_KEY] = getattr(getattr(send, "__self__", None), "transport", None)
        await app(scope, receive, send)

    return wrapped


def transport_of(scope: Scope | dict[str, Any]) -> asyncio.WriteTransport | None:
    """Return the transport below a WebSocket's scope, if it was exposed."""
    transport = scope.get(_KEY)
    return transport if isinstance(transport, asyncio.WriteTransport) else None
