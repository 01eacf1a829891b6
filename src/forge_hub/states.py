"""The states that the hub itself keeps; those of the wire are in :mod:`forge_core.wire.codes`.

::

    session    queued ─▶ offered ─▶ running ─▶ succeeded | failed | expired | cancelled
                  ▲         │          │ │
                  └─────────┴──────────┘ └▶ cancelling ─▶ cancelled (or how it ended before)
                   declined,  retry after
                   expired    lost or silent

    dispatch   offered ─▶ running ─▶ cancelling ─▶ ended
                  └──────────┴─────────────────────▲
"""

from __future__ import annotations

from enum import StrEnum

from forge_core.wire.codes import FailureCode, Outcome


class SessionState(StrEnum):
    """Where a session is."""

    QUEUED = "queued"
    OFFERED = "offered"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more is dispatched for it."""
        return self not in LIVE_SESSIONS


LIVE_SESSIONS = frozenset(
    {SessionState.QUEUED, SessionState.OFFERED, SessionState.RUNNING, SessionState.CANCELLING}
)


class DispatchState(StrEnum):
    """Where one dispatch (attempt and fence) is; the live ones are the snapshot's states."""

    OFFERED = "offered"
    RUNNING = "running"
    CANCELLING = "cancelling"
    ENDED = "ended"


class EndReason(StrEnum):
    """Why a dispatch ended."""

    RESULT = "result"
    DECLINED = "declined"
    OFFER_EXPIRED = "offer_expired"
    INSTANCE_GONE = "instance_gone"
    CANCELLED = "cancelled"
    SILENT = "silent"


RETRYABLE_FAILURES = frozenset(
    {
        FailureCode.LEASE_EXPIRED,
        FailureCode.BRIDGE_STOPPED,
        FailureCode.ENGINE_LOST,
        FailureCode.SUPERVISOR_LOST,
    }
)
"""The machine failed, not the work."""


def settle(
    outcome: Outcome, failure: FailureCode | None, *, retries_left: int, cancelled: bool
) -> SessionState:
    """The state of a session whose current dispatch ended like this."""
    if retries_left > 0 and not cancelled and failure in RETRYABLE_FAILURES:
        return SessionState.QUEUED
    return SessionState(outcome.value)
