"""Bounds of the SignalR endpoint, and the server settings that it counts on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


class UvicornSettings(TypedDict):
    """The part of uvicorn's settings that SignalR cares for."""

    ws_per_message_deflate: bool
    ws_ping_interval: float | None
    ws_max_size: int


UVICORN_SETTINGS: UvicornSettings = {
    # Compression costs 47 KB a connection and lets a small frame become a large one.
    "ws_per_message_deflate": False,
    # SignalR's own pings tell both ends; a second layer would only end healthy connections.
    "ws_ping_interval": None,
    # Of one WebSocket message, which may hold several SignalR messages of max_receive_bytes each.
    "ws_max_size": 1024 * 1024,
}


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Every bound of the endpoint; the defaults are ASP.NET Core's where it has one.

    :param max_receive_bytes: of one message from a client, separator included.
    :param max_parallel_invocations: of one client; its calls start in the order of arrival.
    :param max_queued_invocations: of one client; beyond it the connection is not read.
    :param max_outbound_bytes: waiting for one client; beyond it the client is cut off.
    :param write_timeout_ms: how long a client may refuse to read before it is cut off.
    """

    keep_alive_ms: int = 15_000
    client_timeout_ms: int = 30_000
    handshake_timeout_ms: int = 15_000
    write_timeout_ms: int = 30_000
    close_timeout_ms: int = 5_000
    hook_timeout_ms: int = 10_000
    tick_ms: int = 1_000
    ticket_ttl_ms: int = 15_000
    max_tickets: int = 20_000
    max_connections: int = 10_000
    max_receive_bytes: int = 32 * 1024
    max_parallel_invocations: int = 1
    max_queued_invocations: int = 64
    max_outbound_bytes: int = 4 * 1024 * 1024
    max_outbound_messages: int = 1024
