"""Single-use tickets that lead from negotiate to the WebSocket."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

P = TypeVar("P")


class TicketError(Enum):
    """Why a ticket does not open a connection; the value is the HTTP status."""

    UNKNOWN = 404
    IN_USE = 409


@dataclass(frozen=True, slots=True)
class Ticket(Generic[P]):
    """What negotiate hands out: the token is the secret, the connection id is public."""

    token: str
    connection_id: str
    principal: P
    expires_at_ms: int


class Tickets(Generic[P]):
    """The tickets that are out, and those whose connection is still open."""

    def __init__(self, *, ttl_ms: int, max_tickets: int) -> None:
        self._ttl_ms = ttl_ms
        self._max_tickets = max_tickets
        self._waiting: dict[str, Ticket[P]] = {}
        self._in_use: set[str] = set()

    def issue(self, principal: P, now_ms: int) -> Ticket[P] | None:
        """Return a new ticket, or None while too many are out."""
        self._drop_expired(now_ms)
        if len(self._waiting) >= self._max_tickets:
            return None
        ticket = Ticket(
            token=secrets.token_urlsafe(16),
            connection_id=secrets.token_urlsafe(16),
            principal=principal,
            expires_at_ms=now_ms + self._ttl_ms,
        )
        self._waiting[ticket.token] = ticket
        return ticket

    def redeem(self, token: str, principal: P, now_ms: int) -> Ticket[P] | TicketError:
        """Take a ticket; it must be out, in time, and the same principal's."""
        if token in self._in_use:
            return TicketError.IN_USE
        ticket = self._waiting.get(token)
        if ticket is None or ticket.expires_at_ms <= now_ms or ticket.principal != principal:
            return TicketError.UNKNOWN
        del self._waiting[token]
        self._in_use.add(token)
        return ticket

    def release(self, token: str) -> None:
        """Forget a redeemed ticket: its connection has ended."""
        self._in_use.discard(token)

    def _drop_expired(self, now_ms: int) -> None:
        # All live equally long and dictionaries keep their order: the oldest come first.
        for token, ticket in list(self._waiting.items()):
            if ticket.expires_at_ms > now_ms:
                break
            del self._waiting[token]
