"""Sessions and their attempts."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, RowMapping, insert, select, update

from forge_core.placement import Refusal
from forge_hub.attempt_input import AttemptInput
from forge_hub.states import LIVE_SESSIONS, SessionState
from forge_hub.store.tables import attempts, projects, sessions


def create(
    connection: Connection,
    given: AttemptInput,
    *,
    session_id: str,
    attempt_id: str,
    runner_id: str | None,
    retries: int,
    now: str,
) -> None:
    """Queue a session with its first attempt."""
    connection.execute(
        insert(sessions).values(
            session_id=session_id,
            project_id=given.project_id,
            trust_domain_id=given.trust_domain_id,
            pinned_runner_id=runner_id,
            state=SessionState.QUEUED,
            retries_left=retries,
            refusals=[],
            created_at=now,
        )
    )
    connection.execute(
        insert(attempts).values(
            attempt_id=attempt_id,
            session_id=session_id,
            input=given.to_wire(),
            fence=0,
            created_at=now,
        )
    )


def find(connection: Connection, session_id: str) -> RowMapping | None:
    """One session's row."""
    rows = connection.execute(select(sessions).where(sessions.c.session_id == session_id))
    return rows.mappings().first()


def newest(connection: Connection, limit: int) -> Sequence[RowMapping]:
    """The newest sessions, newest first."""
    order = (sessions.c.created_at.desc(), sessions.c.session_id)
    rows = connection.execute(select(sessions).order_by(*order).limit(limit))
    return rows.mappings().all()


def attempts_of(connection: Connection, session_id: str) -> Sequence[RowMapping]:
    """A session's attempts, oldest first."""
    rows = connection.execute(
        select(attempts)
        .where(attempts.c.session_id == session_id)
        .order_by(attempts.c.created_at, attempts.c.attempt_id)
    )
    return rows.mappings().all()


def queued(connection: Connection, limit: int) -> Sequence[RowMapping]:
    """What waits for a runner, the longest waiting first.

    Session and attempt in one row, with what its project allows by now (``host_fallback``).
    """
    of_attempt = (attempts.c.attempt_id, attempts.c.input, attempts.c.fence)
    rows = connection.execute(
        select(sessions, *of_attempt, projects.c.host_fallback)
        .join(attempts, attempts.c.session_id == sessions.c.session_id)
        .outerjoin(projects, projects.c.project_id == sessions.c.project_id)
        .where(sessions.c.state == SessionState.QUEUED)
        .order_by(sessions.c.created_at, sessions.c.session_id)
        .limit(limit)
    )
    return rows.mappings().all()


def input_of(connection: Connection, attempt_id: str) -> AttemptInput:
    """What the attempt was given."""
    rows = connection.execute(select(attempts.c.input).where(attempts.c.attempt_id == attempt_id))
    return AttemptInput.model_validate(rows.scalar_one())


def move(connection: Connection, session_id: str, *, from_: SessionState, to: SessionState) -> bool:
    """Change the state of a session that is in ``from_``; False: it no longer was."""
    changed = connection.execute(
        update(sessions)
        .where(sessions.c.session_id == session_id, sessions.c.state == from_)
        .values(state=to)
    )
    return changed.rowcount == 1


def end(
    connection: Connection,
    session_id: str,
    state: SessionState,
    *,
    failure_code: str | None,
    now: str,
) -> bool:
    """Give a live session its last state; False: it had one."""
    changed = connection.execute(
        update(sessions)
        .where(sessions.c.session_id == session_id, sessions.c.state.in_(LIVE_SESSIONS))
        .values(state=state, failure_code=failure_code, refusals=[], ended_at=now)
    )
    return changed.rowcount == 1


def requeue(connection: Connection, session_id: str, *, is_retry: bool) -> None:
    """Queue a live session again; a retry is counted, a declined offer is not."""
    values: dict[str, object] = {"state": SessionState.QUEUED}
    if is_retry:
        values["retries_left"] = sessions.c.retries_left - 1
    connection.execute(
        update(sessions)
        .where(sessions.c.session_id == session_id, sessions.c.state.in_(LIVE_SESSIONS))
        .values(values)
    )


def await_settlement(connection: Connection, session_id: str) -> None:
    """Nobody knows yet whether the result was published."""
    connection.execute(
        update(sessions)
        .where(sessions.c.session_id == session_id, sessions.c.state.in_(LIVE_SESSIONS))
        .values(state=SessionState.SETTLING)
    )


def ask_cancel(connection: Connection, session_id: str, reason: str) -> None:
    """Remember that somebody wants the session to end, and the first reason."""
    connection.execute(
        update(sessions)
        .where(sessions.c.session_id == session_id, sessions.c.cancel_reason.is_(None))
        .values(cancel_reason=reason)
    )


def set_refusals(connection: Connection, session_id: str, refusals: Sequence[Refusal]) -> None:
    """Keep why no runner was chosen, or, on an offer, why the others were not (B-96)."""
    connection.execute(
        update(sessions)
        .where(sessions.c.session_id == session_id)
        .values(refusals=refusals_as_json(refusals))
    )


def refusals_as_json(refusals: Sequence[Refusal]) -> list[dict[str, str | None]]:
    """As the API shows them."""
    return [
        {"runnerId": r.runner_id, "reason": r.reason.value, "detail": r.detail} for r in refusals
    ]
