"""The three families of errors, and who may raise them.

* :class:`RetryableError`: the same request may succeed later.
* :class:`RefusedError`: the request itself is wrong; repeating it is pointless.
* a bug is an ``assert``: it ends the flow that hit it, never the ledger.

Edges translate what their libraries raise into these at the door, so that nothing above an
edge ever names a library's exception.  Every message starts with what could not be done, to
which thing, and ends with what to do when there is something to do.
"""

from __future__ import annotations


class ForgeError(Exception):
    """Base of all expected errors."""


class RetryableError(ForgeError):
    """The request may succeed when repeated.

    :param retry_after_ms: how long the other side asks to wait, milliseconds; None: unknown.
    """

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class RefusedError(ForgeError):
    """The request cannot succeed as it stands.

    :param code: a word from a closed list (codes.md) or the edge's own list.
    :param field: the field at fault, when there is one.
    """

    def __init__(self, message: str, *, code: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class HubUnavailable(RetryableError):  # noqa: N818 - says what is the case, as signalr.md names it
    """Nothing was sent: there is no connection to the hub."""


class HubConnectionLost(RetryableError):  # noqa: N818
    """Sent, outcome unknown: the connection ended or timed out before the answer came.

    :param allow_reconnect: False where the hub said not to hurry back: wait longer than usual.
    """

    def __init__(
        self, message: str, *, retry_after_ms: int | None = None, allow_reconnect: bool = True
    ) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.allow_reconnect = allow_reconnect


class HubRefused(RetryableError):  # noqa: N818
    """The hub refused the connection itself.

    :param status: the HTTP status, or 0 where the refusal came after the upgrade.
    """

    def __init__(self, message: str, *, status: int, retry_after_ms: int | None = None) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.status = status


class HubError(RefusedError):
    """The hub received the invocation and completed it with an error."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="hub_error")


class EngineNotFound(RefusedError):  # noqa: N818 - the words of sandbox.md, One engine door
    """The engine does not have the thing that was named."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="engine_not_found")


class EngineConflict(RefusedError):  # noqa: N818
    """The name is taken, or the thing is in a state that forbids the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="engine_conflict")


class EngineSubnetTaken(EngineConflict):
    """The subnet of a new network overlaps that of another; a different one may do."""


class EngineRefused(RefusedError):  # noqa: N818
    """The engine understood the request and will not do it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="engine_refused")


class EngineOutOfDisk(RetryableError):  # noqa: N818
    """The engine's disk is full."""


class EngineUnreachable(RetryableError):  # noqa: N818
    """Nothing answers behind the engine's endpoint, or the connection broke."""


class EngineTimedOut(RetryableError):  # noqa: N818
    """No answer in time; the request may still be carried out later, so look before repeating."""


class DiskUnusable(RetryableError):  # noqa: N818
    """A durable write failed (ENOSPC, EIO); the effect that it announces must not happen."""
