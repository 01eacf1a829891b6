"""How dispatches end: by their result, by cancel, by an offer's expiry, by silence."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, RowMapping

from forge_core.errors import RefusedError
from forge_core.placement import Declined
from forge_core.wire.codes import (
    Disposition,
    FailureCode,
    Outcome,
    PublicationOutcome,
    RejectionCode,
)
from forge_core.wire.from_bridge import ReplayAck, SubmitDispatchResult
from forge_hub.attempt_input import Addressee
from forge_hub.connections import LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.dispatch.decisions import send_cancel
from forge_hub.dispatch.leases import Key, Lease
from forge_hub.dispatch.publications import note_silence
from forge_hub.dispatch.signing_off import sign_off
from forge_hub.matching import current_dispatch_of, rejected
from forge_hub.reasons import Reason
from forge_hub.states import DispatchState, EndReason, SessionState
from forge_hub.store import dispatches, evidence, grants, sessions

_HELD = (DispatchState.RUNNING, DispatchState.CANCELLING)


async def take_result(board: Board, runner: LiveRunner, message: SubmitDispatchResult) -> ReplayAck:
    """Keep a result; the first one ends its dispatch and settles the session.

    A higher revision replaces a lower one; outcome and failure code never change.
    """
    now = board.clock.utc()
    ack, row = await board.database.write(
        lambda connection: _keep_result(connection, runner, message, now)
    )
    if row is not None:
        key = (message.attempt_id, message.fence)
        board.forget(key)
        if row["publication"] == PublicationOutcome.UNKNOWN:  # whoever looked may have given up
            board.looks.add(key)
        board.changed(row["session_id"])
    return ack


def _keep_result(
    connection: Connection, runner: LiveRunner, message: SubmitDispatchResult, now: str
) -> tuple[ReplayAck, RowMapping | None]:
    """The answer, and the dispatch as it was if this is new."""
    key = (message.attempt_id, message.fence)
    row = current_dispatch_of(connection, runner, message)
    if isinstance(row, ReplayAck):
        return row, None
    earlier = evidence.find_result(connection, *key)
    if earlier is not None and (earlier["outcome"], earlier["failure_code"]) != (
        message.outcome,
        message.failure_code,
    ):
        return rejected(Reason.OUTCOME_CHANGED, f"it is {earlier['outcome']} already"), None
    if not evidence.put_result(connection, message, now=now):
        return ReplayAck(accepted=True, disposition=Disposition.DUPLICATE), None
    if dispatches.end(connection, *key, EndReason.RESULT, now=now):
        known = row["publication"]
        sign_off(
            connection,
            row,
            message.outcome,
            message.failure_code,
            publication=None if known is None else PublicationOutcome(known),
            is_owed=message.result_commit is not None
            and grants.publication_of(connection, *key) is not None,
            now=now,
        )
    return ReplayAck(accepted=True, disposition=Disposition.PERSISTED), row


async def cancel(board: Board, session_id: str, reason: str) -> None:
    """Ask for the end of a session; nothing happens if it had ended before.

    :raises RefusedError: code ``unknown_session``.
    """
    now = board.clock.utc()
    row = await board.database.write(
        lambda connection: _cancel_session(connection, session_id, reason, now)
    )
    if row is not None:
        _after_cancel(board, row, reason)
    board.changed(session_id)


def _cancel_session(
    connection: Connection, session_id: str, reason: str, now: str
) -> RowMapping | None:
    """Keep that it is to end; returns the dispatch whose runner is to be told."""
    session = sessions.find(connection, session_id)
    if session is None:
        raise RefusedError(
            f"cannot cancel session {session_id}: there is none", code="unknown_session"
        )
    if SessionState(session["state"]).is_terminal:
        return None
    sessions.ask_cancel(connection, session_id, reason)
    row = dispatches.live_of_session(connection, session_id)
    if row is not None and dispatches.cancel(connection, row["attempt_id"], row["fence"]):
        sessions.move(
            connection, session_id, from_=SessionState.RUNNING, to=SessionState.CANCELLING
        )
    elif row is None or row["state"] == DispatchState.OFFERED:
        _cancel_before_start(connection, session_id, row, now=now)
    return row


def _cancel_before_start(
    connection: Connection, session_id: str, row: RowMapping | None, *, now: str
) -> None:
    if row is not None:
        dispatches.end(connection, row["attempt_id"], row["fence"], EndReason.CANCELLED, now=now)
    sessions.end(
        connection,
        session_id,
        SessionState.CANCELLED,
        failure_code=FailureCode.CANCELLED,
        now=now,
    )


def _after_cancel(board: Board, row: RowMapping, reason: str) -> None:
    to = Addressee.of(row)
    lease = board.leases.get((to.attempt_id, to.fence))
    if lease is not None:
        lease.cancelled = True
    board.offers.remove(to.attempt_id, to.fence)
    send_cancel(board, to, reason)


async def expire_offers(board: Board) -> None:
    """Queue again what nobody answered in time."""
    for pending in board.offers:
        if pending.expires_at_ms <= board.clock.now_ms():
            await _expire(board, pending.to)


async def withdraw(board: Board, to: Addressee) -> bool:
    """End an offer as expired and queue its session again; False: it was decided."""
    now = board.clock.utc()
    withdrawn = await board.database.write(
        lambda connection: _withdraw(connection, to, EndReason.OFFER_EXPIRED, now)
    )
    board.offers.remove(to.attempt_id, to.fence)
    return withdrawn


async def _expire(board: Board, to: Addressee) -> None:
    if await withdraw(board, to):
        silent = Declined(RejectionCode.EXPIRED, "it did not answer the offer in time")
        board.offers.decline(to, silent, board.clock.now_ms())
        board.changed(to.session_id)


def _withdraw(connection: Connection, to: Addressee, reason: EndReason, now: str) -> bool:
    """End an undecided offer and queue its session again; False: it was decided."""
    offered = (DispatchState.OFFERED,)
    if not dispatches.end(connection, to.attempt_id, to.fence, reason, now=now, only_from=offered):
        return False
    sessions.requeue(connection, to.session_id, is_retry=False)
    return True


def void_offers(
    connection: Connection, runner_id: str, instance_id: str, *, now: str
) -> Sequence[Addressee]:
    """Withdraw what was offered to other instances of a runner and is undecided.

    An instance that registers is the only one; the fences of the others are never started.
    """
    rows = dispatches.offered_to_others(connection, runner_id, instance_id)
    voided = [Addressee.of(row) for row in rows]
    for to in voided:
        _withdraw(connection, to, EndReason.INSTANCE_GONE, now)
    return voided


async def give_up_silent(board: Board) -> None:
    """End dispatches that their runner must have ended by itself (protocol.md, A lost hub).

    Their fence has no say any more: what still comes under it, except cleanup reports, is
    rejected as stale.
    """
    for lease in board.leases:
        if lease.silent_at_ms(board.timing.kill_grace_ms) <= board.clock.now_ms():
            await _give_up(board, lease)


async def _give_up(board: Board, lease: Lease) -> None:
    now = board.clock.utc()
    ended, published = await board.database.write(
        lambda connection: _end_silent(connection, lease.id, now)
    )
    board.forget(lease.id)
    if published is PublicationOutcome.UNKNOWN:
        board.looks.add(lease.id)
    if ended:
        board.changed(lease.to.session_id)


def _end_silent(
    connection: Connection, key: Key, now: str
) -> tuple[bool, PublicationOutcome | None]:
    row = dispatches.find(connection, *key)
    assert row is not None, "a lease belongs to a dispatch"
    if not dispatches.end(connection, *key, EndReason.SILENT, now=now, only_from=_HELD):
        return False, None
    published = note_silence(connection, key, now=now)
    cancelled = row["cancel_reason"] is not None
    failure = FailureCode.CANCELLED if cancelled else FailureCode.LEASE_EXPIRED
    outcome = Outcome.CANCELLED if cancelled else Outcome.EXPIRED
    sign_off(connection, row, outcome, failure, publication=published, now=now)
    return True, published
