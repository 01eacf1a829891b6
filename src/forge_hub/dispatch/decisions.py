"""What a runner's answer to an offer does, and what it is told again when it comes back."""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, RowMapping

from forge_core.placement import Declined
from forge_core.wire.codes import Decision, RejectionCode, ReservationState, Runtime
from forge_core.wire.from_bridge import Ack, Heartbeat, SubmitOfferDecision
from forge_core.wire.from_hub import Cancel
from forge_core.wire.lease_mac import KEY_BYTES
from forge_hub.attempt_input import Addressee, AttemptInput
from forge_hub.connections import LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.grants import Handles, new_handle
from forge_hub.reasons import Reason
from forge_hub.sandbox_policy import refuse_host
from forge_hub.states import DispatchState, EndReason, SessionState
from forge_hub.store import dispatches, grants, projects, runners, sessions


async def decide(board: Board, runner: LiveRunner, message: SubmitOfferDecision) -> Ack:
    """Start what was accepted; queue again what was declined.  A repeated answer is harmless."""
    now, fresh = board.clock.utc(), (new_handle(), new_handle())
    decided = await board.database.write(
        lambda connection: _keep_decision(connection, runner, message, fresh, now)
    )
    if isinstance(decided, Ack):
        return decided
    row, given = decided
    to = Addressee.of(row)
    if isinstance(given, AttemptInput):
        _start(board, runner, to, given, _handles(given, fresh))
    elif given is not None:
        board.forget((to.attempt_id, to.fence))
        board.offers.decline(to, given, board.clock.now_ms())
        board.changed(to.session_id)
        if message.decision is Decision.ACCEPTED:
            return Ack(accepted=False, reason=Reason.HOST_FALLBACK_DENIED)
    elif message.decision is Decision.ACCEPTED:
        return _repeated(board, row)
    return Ack(accepted=True)


def _keep_decision(
    connection: Connection,
    runner: LiveRunner,
    message: SubmitOfferDecision,
    fresh: tuple[str, str],
    now: str,
) -> Ack | tuple[RowMapping, AttemptInput | Declined | None]:
    """The refusal of the answer; or its dispatch, and what to start or why it was declined.

    None in place of the two: it was decided before.
    """
    row = dispatches.find(connection, message.attempt_id, message.fence)
    refusal = _mismatch(row, runner, message)
    if refusal is not None or row is None:
        return refusal or Ack(accepted=False, reason=Reason.UNKNOWN_DISPATCH)
    runners.set_resources(
        connection, runner.runner_id, message.used_resources, message.resource_capacity
    )
    if row["state"] == DispatchState.OFFERED:
        message = _without_host(connection, row, message, now)
    if message.decision is Decision.REJECTED:
        if not dispatches.decline(connection, message, now=now):
            return row, None
        sessions.requeue(connection, row["session_id"], is_retry=False)
        assert message.reason_code is not None, "a rejection that names none is a mismatch"
        said = f"it declined the offer{f': {message.detail}' if message.detail else ''}"
        return row, Declined(message.reason_code, said)
    if not dispatches.accept(connection, message, now=now):
        return row, None
    sessions.move(
        connection, row["session_id"], from_=SessionState.OFFERED, to=SessionState.RUNNING
    )
    given = sessions.input_of(connection, message.attempt_id)
    grants.add(connection, Addressee.of(row), given, _handles(given, fresh), now=now)
    return row, given


def _without_host(
    connection: Connection, row: RowMapping, message: SubmitOfferDecision, now: str
) -> SubmitOfferDecision:
    """An acceptance that would start on a host that it may not use at this moment is none (B-53).

    The permission may have ended since the offer, or a runner may take more than it was offered.
    """
    if message.decision is not Decision.ACCEPTED or message.runtime is not Runtime.HOST:
        return message
    given = sessions.input_of(connection, message.attempt_id)
    settings = runners.settings_of(runners.get(connection, row["runner_id"]))
    fallback = projects.fallback_of(connection, given.project_id)
    why = refuse_host(given.policy, fallback, settings, now)
    if why is None:
        return message
    denied = {"reason_code": RejectionCode.HOST_FALLBACK_DENIED, "detail": why}
    return message.model_copy(update={"decision": Decision.REJECTED, **denied})


def _handles(given: AttemptInput, fresh: tuple[str, str]) -> Handles:
    """Of these handles, the ones that the attempt has a use for."""
    return Handles(
        fresh[0] if given.secrets else None,
        fresh[1] if given.publishes else None,
    )


def _mismatch(
    row: RowMapping | None, runner: LiveRunner, message: SubmitOfferDecision
) -> Ack | None:
    """Why this answer is not one to this offer of ours."""
    if message.decision is Decision.REJECTED and message.reason_code is None:
        return Ack(
            accepted=False, reason=Reason.MALFORMED, detail="a rejection names its reasonCode"
        )
    if row is None:
        return Ack(accepted=False, reason=Reason.UNKNOWN_DISPATCH)
    if row["offer_id"] != message.offer_id:
        return Ack(accepted=False, reason=Reason.UNKNOWN_OFFER)
    if (row["runner_id"], row["instance_id"]) != (runner.runner_id, runner.instance_id):
        return Ack(accepted=False, reason=Reason.INSTANCE_MISMATCH)
    if dispatches.is_stale(row):
        return Ack(accepted=False, reason=Reason.STALE_FENCE)
    return None


def _start(
    board: Board, runner: LiveRunner, to: Addressee, given: AttemptInput, handles: Handles
) -> None:
    """The dispatch is recorded as running; now there is a key, and the runner may know it."""
    key = (to.attempt_id, to.fence)
    board.offers.remove(*key)
    packet = board.leases.grant(
        to, given, handles, key=secrets.token_bytes(KEY_BYTES), now_ms=board.clock.now_ms()
    )
    runner.watch(key)
    board.connections.send(to.runner_id, to.instance_id, "Start", packet)
    board.changed(to.session_id)


def _repeated(board: Board, row: RowMapping) -> Ack:
    """An acceptance of something that is no longer offered."""
    if row["state"] in {DispatchState.RUNNING, DispatchState.CANCELLING}:
        _send_start(board, (row["attempt_id"], row["fence"]))
        return Ack(accepted=True)
    if row["end_reason"] == EndReason.CANCELLED:
        return Ack(accepted=False, reason=Reason.CANCELLED)
    return Ack(accepted=False, reason=Reason.EXPIRED)


def tell_again(board: Board, runner: LiveRunner, heartbeat: Heartbeat) -> None:
    """What a runner that has just come back may have missed; all of it may come twice."""
    now_ms = board.clock.now_ms()
    for pending in board.offers:
        to, left_ms = pending.to, pending.expires_at_ms - now_ms
        if (to.runner_id, to.instance_id) == (runner.runner_id, runner.instance_id) and left_ms > 0:
            offer = pending.offer.model_copy(update={"expires_in_ms": left_ms})
            board.connections.send(to.runner_id, to.instance_id, "Offer", offer)
    reserved = {
        (a.attempt_id, a.fence) for a in heartbeat.attempts if a.state is ReservationState.RESERVED
    }
    for lease in board.leases.of_instance(runner.runner_id, runner.instance_id):
        if lease.cancelled:
            send_cancel(board, lease.to, "cancelled")
        elif lease.id in reserved:
            _send_start(board, lease.id)


def send_cancel(board: Board, to: Addressee, reason: str) -> None:
    """End it."""
    cancel = Cancel(attempt_id=to.attempt_id, fence=to.fence, reason=reason)
    board.connections.send(to.runner_id, to.instance_id, "Cancel", cancel)


def _send_start(board: Board, key: tuple[str, int]) -> None:
    lease = board.leases.get(key)
    if lease is not None and lease.start is not None and not lease.cancelled:
        board.connections.send(lease.to.runner_id, lease.to.instance_id, "Start", lease.start)
