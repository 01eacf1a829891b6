"""What a connection to the hub needs to know, in one frozen object."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

TokenSource = Callable[[bool], Awaitable[str | None]]
"""``await token(refresh)`` → the bearer token, or None for none; ``refresh`` true: the last one
was refused, read it anew from where it comes from."""


LearnSecret = Callable[[str], None]
"""Told every token before it is used, so that it is nowhere shown."""


async def no_token(_refresh: bool) -> str | None:
    """Source of no token: for a hub that asks for none."""
    return None


def keep_to_oneself(_secret: str) -> None:
    """For who shows nothing anywhere."""


@dataclass(frozen=True, slots=True)
class SignalRSettings:
    """Where the hub is, who we are, and every bound of one connection.

    :param hub_url: as :func:`forge_edges.hub_url.resolve_bridge_runner_hub_url` returns it.
    :param token: awaited before every negotiate.
    :param learn: told each token, one too that the hub hands out with a redirect.
    :param tls: context for https, with the operator's own authorities; None: the system's.
    :param keep_alive_ms: a ping is sent after so long without sending (SignalR's default).
    :param server_timeout_ms: the hub is given up after so long without any frame from it.
    :param max_inbound_bytes: of one message (protocol.md, Size).
    :param max_outbound_bytes: of one message with its envelope; an ASP.NET Core hub drops the
        connection without a reason above 32 KiB (protocol.md, Size).
    :param max_pending_calls: calls that wait for their completion at the same time.
    """

    hub_url: str
    token: TokenSource = no_token
    learn: LearnSecret = keep_to_oneself
    tls: ssl.SSLContext | None = None
    user_agent: str = "forge-bridge"
    negotiate_timeout_ms: int = 15_000
    upgrade_timeout_ms: int = 15_000
    handshake_timeout_ms: int = 15_000
    keep_alive_ms: int = 15_000
    server_timeout_ms: int = 30_000
    invoke_timeout_ms: int = 30_000
    close_timeout_ms: int = 2_000
    max_inbound_bytes: int = 1024 * 1024
    max_outbound_bytes: int = 30_000
    max_pending_calls: int = 1024
