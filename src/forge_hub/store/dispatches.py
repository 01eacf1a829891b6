"""Dispatches: one attempt under one fence on one runner instance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    bindparam,
    insert,
    or_,
    select,
    update,
)

from forge_core.wire.codes import PublicationOutcome, SnapshotState
from forge_core.wire.from_bridge import SubmitOfferDecision
from forge_core.wire.shapes import SnapshotAttempt
from forge_hub.attempt_input import Addressee
from forge_hub.states import DispatchState, EndReason
from forge_hub.store.tables import attempts, dispatches, sessions

MAX_UNKNOWN = 1_000
_LIVE = (DispatchState.OFFERED, DispatchState.RUNNING, DispatchState.CANCELLING)
_FIND = (
    select(
        dispatches,
        attempts.c.fence.label("highest_fence"),
        sessions.c.state.label("session_state"),
        sessions.c.retries_left,
        sessions.c.cancel_reason,
    )
    .join(attempts, attempts.c.attempt_id == dispatches.c.attempt_id)
    .join(sessions, sessions.c.session_id == dispatches.c.session_id)
    .where(
        dispatches.c.attempt_id == bindparam("attempt"), dispatches.c.fence == bindparam("number")
    )
)


def offer(connection: Connection, to: Addressee, *, now: str) -> bool:
    """Give out the next fence of an attempt; False: somebody else did so just before."""
    raised = connection.execute(
        update(attempts)
        .where(attempts.c.attempt_id == to.attempt_id, attempts.c.fence == to.fence - 1)
        .values(fence=to.fence)
    )
    if raised.rowcount != 1:
        return False
    connection.execute(
        insert(dispatches).values(
            **to.model_dump(), state=DispatchState.OFFERED, lease_sequence=0, offered_at=now
        )
    )
    return True


def find(connection: Connection, attempt_id: str, fence: int) -> RowMapping | None:
    """A dispatch with what decides about it: its session's state and the highest fence."""
    rows = connection.execute(_FIND, {"attempt": attempt_id, "number": fence})
    return rows.mappings().first()


def is_stale(row: RowMapping) -> bool:
    """Whether the dispatch has no say any more: another followed, or it was given up."""
    return bool(row["fence"] < row["highest_fence"] or row["end_reason"] == EndReason.SILENT)


def accept(connection: Connection, decision: SubmitOfferDecision, *, now: str) -> bool:
    """The runner reserved; False: the dispatch was no longer offered."""
    return _leave(
        connection,
        decision.attempt_id,
        decision.fence,
        {DispatchState.OFFERED},
        state=DispatchState.RUNNING,
        runtime=decision.runtime,
        started_at=now,
        last_renewal_at=now,
    )


def decline(connection: Connection, decision: SubmitOfferDecision, *, now: str) -> bool:
    """The runner said no, because; False: the dispatch was no longer offered."""
    return _leave(
        connection,
        decision.attempt_id,
        decision.fence,
        {DispatchState.OFFERED},
        state=DispatchState.ENDED,
        end_reason=EndReason.DECLINED,
        decline_code=decision.reason_code,
        decline_detail=decision.detail,
        ended_at=now,
    )


def cancel(connection: Connection, attempt_id: str, fence: int) -> bool:
    """A running dispatch is to end; False: it does not run."""
    return _leave(
        connection,
        attempt_id,
        fence,
        {DispatchState.RUNNING},
        state=DispatchState.CANCELLING,
    )


def end(
    connection: Connection,
    attempt_id: str,
    fence: int,
    reason: EndReason,
    *,
    now: str,
    only_from: Iterable[DispatchState] = _LIVE,
) -> bool:
    """End a dispatch; False: it was not in one of ``only_from``."""
    return _leave(
        connection,
        attempt_id,
        fence,
        only_from,
        state=DispatchState.ENDED,
        end_reason=reason,
        ended_at=now,
    )


def set_publication(
    connection: Connection, attempt_id: str, fence: int, outcome: PublicationOutcome
) -> bool:
    """Keep what came of the publication; False: something else is known already.

    ``unknown`` is what anything may replace, and what replaces nothing.
    """
    known = dispatches.c.publication
    replaceable: ColumnElement[bool] = known.is_(None)
    if outcome is not PublicationOutcome.UNKNOWN:
        replaceable = or_(replaceable, known == PublicationOutcome.UNKNOWN)
    changed = connection.execute(
        update(dispatches).where(_is(attempt_id, fence), replaceable).values(publication=outcome)
    )
    return changed.rowcount == 1


def with_unknown_publication(connection: Connection) -> Sequence[tuple[str, int]]:
    """The dispatches of whose publication nobody knows, the newest first."""
    rows = connection.execute(
        select(dispatches.c.attempt_id, dispatches.c.fence)
        .where(dispatches.c.publication == PublicationOutcome.UNKNOWN)
        .order_by(dispatches.c.offered_at.desc())
        .limit(MAX_UNKNOWN)
    )
    return [(attempt_id, fence) for attempt_id, fence in rows]


def record_renewals(
    connection: Connection, renewals: Iterable[tuple[str, int, int]], *, now: str
) -> None:
    """Keep the last renewals, as (attempt, fence, sequence), for people to see."""
    for attempt_id, fence, sequence in renewals:
        connection.execute(
            update(dispatches)
            .where(_is(attempt_id, fence))
            .values(lease_sequence=sequence, last_renewal_at=now)
        )


def live(connection: Connection) -> Sequence[RowMapping]:
    """Every dispatch that has not ended, with its attempt's input."""
    rows = connection.execute(
        select(dispatches, attempts.c.input)
        .join(attempts, attempts.c.attempt_id == dispatches.c.attempt_id)
        .where(dispatches.c.state.in_(_LIVE))
    )
    return rows.mappings().all()


def of_session(connection: Connection, session_id: str) -> Sequence[RowMapping]:
    """A session's dispatches in the order of their fences."""
    rows = connection.execute(
        select(dispatches)
        .where(dispatches.c.session_id == session_id)
        .order_by(dispatches.c.offered_at, dispatches.c.fence)
    )
    return rows.mappings().all()


def live_of_session(connection: Connection, session_id: str) -> RowMapping | None:
    """The dispatch of a session that has not ended; there is at most one."""
    rows = connection.execute(
        select(dispatches).where(
            dispatches.c.session_id == session_id, dispatches.c.state.in_(_LIVE)
        )
    )
    return rows.mappings().first()


def offered_to_others(
    connection: Connection, runner_id: str, instance_id: str
) -> Sequence[RowMapping]:
    """The undecided offers of a runner that are for another instance than this one."""
    rows = connection.execute(
        select(dispatches).where(
            dispatches.c.runner_id == runner_id,
            dispatches.c.instance_id != instance_id,
            dispatches.c.state == DispatchState.OFFERED,
        )
    )
    return rows.mappings().all()


def of_instance(
    connection: Connection, runner_id: str, instance_id: str
) -> tuple[SnapshotAttempt, ...]:
    """The snapshot: what this instance should be holding, under the current fences (B-81)."""
    rows = connection.execute(
        select(dispatches.c.attempt_id, dispatches.c.fence, dispatches.c.state)
        .join(
            attempts,
            and_(
                attempts.c.attempt_id == dispatches.c.attempt_id,
                attempts.c.fence == dispatches.c.fence,
            ),
        )
        .where(
            dispatches.c.runner_id == runner_id,
            dispatches.c.instance_id == instance_id,
            dispatches.c.state.in_(_LIVE),
        )
        .order_by(dispatches.c.attempt_id)
    )
    return tuple(
        SnapshotAttempt(attempt_id=a, fence=fence, state=SnapshotState(state))
        for a, fence, state in rows
    )


def _leave(
    connection: Connection,
    attempt_id: str,
    fence: int,
    states: Iterable[DispatchState],
    **values: object,
) -> bool:
    changed = connection.execute(
        update(dispatches)
        .where(_is(attempt_id, fence), dispatches.c.state.in_(list(states)))
        .values(**values)
    )
    return changed.rowcount == 1


def _is(attempt_id: str, fence: int) -> ColumnElement[bool]:
    return and_(dispatches.c.attempt_id == attempt_id, dispatches.c.fence == fence)
