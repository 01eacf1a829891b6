"""From the hub's URL to a WebSocket that speaks SignalR: token, negotiate, upgrade, handshake."""

from __future__ import annotations

import logging
import ssl
from typing import TypedDict
from urllib.parse import urlsplit

import anyio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidProxy,
    InvalidStatus,
)

from forge_core.errors import HubRefused, HubUnavailable

from . import signalr_codec as codec
from .signalr_negotiate import Endpoint, negotiate, retry_after_ms
from .signalr_settings import SignalRSettings

# A hub may join several messages into one WebSocket message; ASP.NET Core joins what its pipe
# holds.  So a single message may have the whole bound for itself.
JOINED_MESSAGES_BYTES = 64 * 1024
MAX_HUB_TEXT_CHARACTERS = 500

# The library writes request headers, the token among them, at DEBUG: it never gets that level.
_websocket_log = logging.getLogger(f"{__name__}.websocket")
_websocket_log.setLevel(logging.INFO)


class _Connect(connect):
    """The library's opening handshake, without HTTP redirects: they could lead anywhere."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class _Tls(TypedDict, total=False):
    ssl: ssl.SSLContext


async def open_websocket(settings: SignalRSettings) -> tuple[ClientConnection, bytes]:
    """Return an established connection and the records that came with its handshake.

    The token is fetched before the first request and read anew once when it is refused (401).

    :raises HubRefused: the hub answered, with no; status 0: to the handshake.
    :raises HubUnavailable: no answer within the settings' bounds, or none that makes sense.
    :raises RefusedError: code ``invalid_token``.
    """
    token = await _token(settings, refresh=False)
    try:
        return await _open(settings, token)
    except HubRefused as refused:
        if refused.status != 401:
            raise
        fresh = await _token(settings, refresh=True)
        if fresh is None or fresh == token:
            raise
    return await _open(settings, fresh)


async def _token(settings: SignalRSettings, *, refresh: bool) -> str | None:
    try:
        with anyio.fail_after(settings.negotiate_timeout_ms / 1000):
            return await settings.token(refresh)
    except TimeoutError as error:
        raise HubUnavailable(
            f"{_cannot_connect(settings)}: its token did not come within"
            f" {settings.negotiate_timeout_ms} ms"
        ) from error


async def _open(settings: SignalRSettings, token: str | None) -> tuple[ClientConnection, bytes]:
    websocket = await _upgrade(settings, await negotiate(settings, token))
    opened = False
    try:
        early = await _shake_hands(settings, websocket)
        opened = True
    finally:
        if not opened:
            websocket.transport.abort()
    return websocket, early


async def _upgrade(settings: SignalRSettings, endpoint: Endpoint) -> ClientConnection:
    tls: _Tls = {}
    if settings.tls is not None and endpoint.url.startswith("wss:"):
        tls["ssl"] = settings.tls
    try:
        return await _Connect(
            endpoint.url,
            additional_headers=endpoint.headers,
            user_agent_header=None,
            proxy=endpoint.proxy,
            compression=None,
            open_timeout=settings.upgrade_timeout_ms / 1000,
            close_timeout=settings.close_timeout_ms / 1000,
            ping_interval=None,
            max_size=settings.max_inbound_bytes + JOINED_MESSAGES_BYTES,
            logger=_websocket_log,
            **tls,
        )
    except InvalidStatus as error:
        response = error.response
        raise HubRefused(
            f"{_cannot_connect(settings)}: it answered the upgrade with {response.status_code}",
            status=response.status_code,
            retry_after_ms=retry_after_ms(response.headers.get("Retry-After")),
        ) from error
    except InvalidProxy as error:
        raise HubUnavailable(
            f"{_cannot_connect(settings)}: the environment names a proxy that is not valid"
        ) from error
    except (InvalidHandshake, OSError, EOFError) as error:
        why = str(error) or type(error).__name__
        raise HubUnavailable(f"{_cannot_connect(settings)}: {why}") from error


async def _shake_hands(settings: SignalRSettings, websocket: ClientConnection) -> bytes:
    within_ms = settings.handshake_timeout_ms
    try:
        with anyio.fail_after(within_ms / 1000):
            await websocket.send(codec.handshake_request(), text=True)
            frame = await websocket.recv(decode=False)
        record, separator, early = frame.partition(codec.SEPARATOR)
        if not separator:
            raise codec.FramingError("the handshake response is not terminated")
        response = codec.decode_handshake_response(record)
    except TimeoutError as error:
        raise HubUnavailable(
            f"{_cannot_connect(settings)}: no handshake within {within_ms} ms"
        ) from error
    except (codec.FramingError, ConnectionClosed) as error:
        raise HubUnavailable(f"{_cannot_connect(settings)}: {error}") from error
    if response.error is not None:
        raise HubRefused(
            f"{_cannot_connect(settings)}: it refused the handshake, saying"
            f" {response.error[:MAX_HUB_TEXT_CHARACTERS]!r}",
            status=0,
        )
    return early


def _cannot_connect(settings: SignalRSettings) -> str:
    hub = urlsplit(settings.hub_url)
    return f"cannot connect to the hub at {hub.scheme}://{hub.netloc}"
