"""The hub's methods, and what a client learns when one fails."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from traceback import format_tb
from typing import Generic, TypeVar

from pysignalr.messages import CompletionMessage, InvocationMessage

from forge_core.errors import RefusedError

from .connection import Connection

P = TypeVar("P")

Method = Callable[[Connection[P], object], Awaitable[object]]

_log = logging.getLogger(__name__)


class HubException(Exception):  # noqa: N818 - SignalR's own word
    """Raised by a hub method: its text, and no other exception's, reaches the client."""


class Methods(Generic[P]):
    """Methods by name; names are compared without case, as ASP.NET Core does."""

    def __init__(self) -> None:
        self._methods: dict[str, Method[P]] = {}

    def register(self, name: str, method: Method[P]) -> None:
        """Set what a name means."""
        self._methods[name.lower()] = method

    async def call(self, connection: Connection[P], message: InvocationMessage) -> None:
        """Run one call and queue its completion, if the client asked for one."""
        result, error = await self._run(connection, message)
        if message.invocation_id is None:
            return
        try:
            connection.post(CompletionMessage(message.invocation_id, result, error))
        except RefusedError as refused:
            log_failure(f"the result of hub method {message.target[:128]}", refused)
            connection.post(CompletionMessage(message.invocation_id, None, _masked(message)))

    async def _run(
        self, connection: Connection[P], message: InvocationMessage
    ) -> tuple[object, str | None]:
        method = self._methods.get(message.target.lower())
        if method is None:
            return None, _masked(message, "HubException: Method does not exist.")
        count = len(message.arguments)
        if count != 1:
            return None, _masked(message, f"Invocation provides {count} argument(s), not 1.")
        try:
            return await method(connection, message.arguments[0]), None
        except HubException as error:
            return None, _masked(message, f"HubException: {error}")
        except Exception as error:  # noqa: BLE001 - one bad call must not end the connection
            log_failure(f"hub method {message.target[:128]}", error)
            return None, _masked(message)


def log_failure(what: str, error: Exception) -> None:
    """Log where an exception came from, without its text, which may quote the message."""
    place = "".join(format_tb(error.__traceback__))
    _log.error("%s raised %s\n%s", what, type(error).__name__, place)


def _masked(message: InvocationMessage, why: str = "") -> str:
    # ASP.NET Core's words: clients may look for them.
    text = f"An unexpected error occurred invoking '{message.target[:128]}' on the server."
    return f"{text} {why}".rstrip()
