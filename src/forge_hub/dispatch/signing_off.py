"""How a session goes on when its dispatch has ended, and when its publication is known (B-64)."""

from __future__ import annotations

from sqlalchemy import Connection, RowMapping

from forge_core.wire.codes import FailureCode, Outcome, PublicationOutcome
from forge_hub.states import SessionState, settle
from forge_hub.store import sessions


def sign_off(
    connection: Connection,
    row: RowMapping,
    outcome: Outcome,
    failure: FailureCode | None,
    *,
    publication: PublicationOutcome | None,
    now: str,
    is_owed: bool = False,
    may_retry: bool = True,
) -> None:
    """Give the session its next state.

    :param row: of :func:`forge_hub.store.dispatches.find`.
    :param publication: what is known of the dispatch's publication, recorded before this.
    :param is_owed: a result was to be published.
    """
    state, failure = settle(
        outcome,
        failure,
        retries_left=row["retries_left"] if may_retry else 0,
        cancelled=row["cancel_reason"] is not None,
        publication=publication,
        is_owed=is_owed,
    )
    session_id = row["session_id"]
    if state is SessionState.QUEUED:
        sessions.requeue(connection, session_id, is_retry=True)
    elif state is SessionState.SETTLING:
        sessions.await_settlement(connection, session_id)
    else:
        sessions.end(connection, session_id, state, failure_code=failure, now=now)
