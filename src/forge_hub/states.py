"""The states that the hub itself keeps; those of the wire are in :mod:`forge_core.wire.codes`.

::

    session    queued ─▶ offered ─▶ running ─▶ succeeded | failed | expired | cancelled
                  ▲         │          │ │ └▶ settling ─▶ likewise
                  └─────────┴──────────┘ └▶ cancelling ─▶ cancelled (or how it ended before)
                   declined,  retry after
                   expired    lost or silent

    dispatch   offered ─▶ running ─▶ cancelling ─▶ ended
                  └──────────┴─────────────────────▲

A session is *settling* while nobody knows whether its result was published.
"""

from __future__ import annotations

from enum import StrEnum

from forge_core.publication import PUBLISHED
from forge_core.wire.codes import FailureCode, Outcome, PublicationOutcome


class SessionState(StrEnum):
    """Where a session is."""

    QUEUED = "queued"
    OFFERED = "offered"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SETTLING = "settling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more is dispatched for it."""
        return self not in LIVE_SESSIONS


LIVE_SESSIONS = frozenset(
    {
        SessionState.QUEUED,
        SessionState.OFFERED,
        SessionState.RUNNING,
        SessionState.CANCELLING,
        SessionState.SETTLING,
    }
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


class PublicationSource(StrEnum):
    """Whose word it is."""

    RUNNER = "runner"
    HUB = "hub"


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
    outcome: Outcome,
    failure: FailureCode | None,
    *,
    retries_left: int,
    cancelled: bool,
    publication: PublicationOutcome | None = None,
    is_owed: bool = False,
) -> tuple[SessionState, FailureCode | None]:
    """The state of a session whose current dispatch ended like this, and why it failed.

    What was published is done, whatever happened to the runner after that; it is never dispatched
    again, and neither is what somebody else was faster with.  A success that owes a publication
    is none.
    """
    if outcome is not Outcome.CANCELLED:
        if publication in PUBLISHED:
            return SessionState.SUCCEEDED, None
        if publication is PublicationOutcome.STALE_REMOTE:
            return SessionState.FAILED, FailureCode.PUBLICATION_STALE
        if publication is PublicationOutcome.UNKNOWN and not cancelled:
            return SessionState.SETTLING, failure
    if outcome is Outcome.SUCCEEDED and is_owed:
        return SessionState.FAILED, FailureCode.PUBLICATION_DENIED
    if retries_left > 0 and not cancelled and failure in RETRYABLE_FAILURES:
        return SessionState.QUEUED, failure
    return SessionState(outcome.value), failure
