"""How dispatches end: by their result, by cancel, by an offer's expiry, by silence."""

from __future__ import annotations

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from forge_core.errors import RefusedError
from forge_core.wire.codes import Disposition, FailureCode, Outcome, RejectionCode
from forge_core.wire.from_bridge import ReplayAck, SubmitDispatchResult
from forge_hub.attempt_input import Addressee
from forge_hub.connections import LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.dispatch.decisions import send_cancel
from forge_hub.feed import Item
from forge_hub.matching import mismatch, rejected
from forge_hub.states import DispatchState, EndReason, SessionState, settle
from forge_hub.store import dispatches, evidence, sessions

_HELD = (DispatchState.RUNNING, DispatchState.CANCELLING)


async def take_result(board: Board, runner: LiveRunner, message: SubmitDispatchResult) -> ReplayAck:
    """Keep a result; the first one ends its dispatch and settles the session.

    A higher revision replaces a lower one; outcome and failure code never change.
    """
    now = board.clock.utc()
    key = (message.attempt_id, message.fence)
    state: SessionState | None = None
    async with board.database.write() as connection:
        row = await dispatches.find(connection, *key)
        refusal = mismatch(row, runner, message.resource_runner_instance_id)
        if refusal is not None or row is None:
            return refusal or rejected("unknown_dispatch")
        if dispatches.is_stale(row):
            return rejected(RejectionCode.STALE_FENCE)
        earlier = await evidence.find_result(connection, *key)
        if earlier is not None and (earlier["outcome"], earlier["failure_code"]) != (
            message.outcome,
            message.failure_code,
        ):
            return rejected("outcome_changed", f"it is {earlier['outcome']} already")
        if not await evidence.put_result(connection, message, now=now):
            return ReplayAck(accepted=True, disposition=Disposition.DUPLICATE)
        if await dispatches.end(connection, *key, EndReason.RESULT, now=now):
            state = await _settle(connection, row, message.outcome, message.failure_code, now=now)
    board.forget(key)
    board.feed.publish(row["session_id"], Item("result", message.to_wire()))
    if state is not None:
        board.show_state(row["session_id"], state)
    return ReplayAck(accepted=True, disposition=Disposition.PERSISTED)


async def cancel(board: Board, session_id: str, reason: str) -> SessionState:
    """Ask for the end of a session; returns its state, also when it had ended before.

    :raises RefusedError: code ``unknown_session``.
    """
    now = board.clock.utc()
    async with board.database.write() as connection:
        session = await sessions.find(connection, session_id)
        if session is None:
            raise RefusedError(
                f"cannot cancel session {session_id}: there is none", code="unknown_session"
            )
        state = SessionState(session["state"])
        if state.is_terminal:
            return state
        await sessions.ask_cancel(connection, session_id, reason)
        row = await dispatches.live_of_session(connection, session_id)
        if row is not None and await dispatches.cancel(connection, row["attempt_id"], row["fence"]):
            state = SessionState.CANCELLING
            await sessions.move(connection, session_id, from_=SessionState.RUNNING, to=state)
        elif row is None or row["state"] == DispatchState.OFFERED:
            state = SessionState.CANCELLED
            await _cancel_before_start(connection, session_id, row, now=now)
    _after_cancel(board, row, reason)
    board.show_state(session_id, state)
    return state


async def _cancel_before_start(
    connection: AsyncConnection, session_id: str, row: RowMapping | None, *, now: str
) -> None:
    if row is not None:
        await dispatches.end(
            connection, row["attempt_id"], row["fence"], EndReason.CANCELLED, now=now
        )
    await sessions.end(
        connection,
        session_id,
        SessionState.CANCELLED,
        failure_code=FailureCode.CANCELLED,
        now=now,
    )


def _after_cancel(board: Board, row: RowMapping | None, reason: str) -> None:
    if row is None:
        return
    to = Addressee.model_validate({name: row[name] for name in Addressee.model_fields})
    lease = board.leases.get((to.attempt_id, to.fence))
    if lease is not None:
        lease.cancelled = True
    board.offers.remove(to.attempt_id, to.fence)
    send_cancel(board, to, reason)


async def expire_offers(board: Board) -> None:
    """Queue again what nobody answered in time."""
    now_ms = board.clock.now_ms()
    for pending in board.offers:
        if pending.expires_at_ms > now_ms:
            continue
        to = pending.to
        async with board.database.write() as connection:
            expired = await dispatches.end(
                connection,
                to.attempt_id,
                to.fence,
                EndReason.OFFER_EXPIRED,
                now=board.clock.utc(),
                only_from=(DispatchState.OFFERED,),
            )
            if expired:
                await sessions.requeue(connection, to.session_id, is_retry=False)
        board.offers.remove(to.attempt_id, to.fence)
        if expired:
            board.offers.decline(to, RejectionCode.EXPIRED, now_ms)
            board.show_state(to.session_id, SessionState.QUEUED)


async def give_up_silent(board: Board) -> None:
    """End dispatches that their runner must have ended by itself (protocol.md, A lost hub).

    Their fence has no say any more: what still comes under it, except cleanup reports, is
    rejected as stale.
    """
    for lease in board.leases:
        if lease.silent_at_ms(board.timing.kill_grace_ms) > board.clock.now_ms():
            continue
        now = board.clock.utc()
        state: SessionState | None = None
        async with board.database.write() as connection:
            row = await dispatches.find(connection, *lease.id)
            assert row is not None, "a lease belongs to a dispatch"
            if await dispatches.end(
                connection, *lease.id, EndReason.SILENT, now=now, only_from=_HELD
            ):
                cancelled = row["cancel_reason"] is not None
                failure = FailureCode.CANCELLED if cancelled else FailureCode.LEASE_EXPIRED
                outcome = Outcome.CANCELLED if cancelled else Outcome.EXPIRED
                state = await _settle(connection, row, outcome, failure, now=now)
        board.forget(lease.id)
        if state is not None:
            board.show_state(lease.to.session_id, state)


async def _settle(
    connection: AsyncConnection,
    row: RowMapping,
    outcome: Outcome,
    failure: FailureCode | None,
    *,
    now: str,
) -> SessionState:
    state = settle(
        outcome,
        failure,
        retries_left=row["retries_left"],
        cancelled=row["cancel_reason"] is not None,
    )
    if state is SessionState.QUEUED:
        await sessions.requeue(connection, row["session_id"], is_retry=True)
    else:
        await sessions.end(connection, row["session_id"], state, failure_code=failure, now=now)
    return state
