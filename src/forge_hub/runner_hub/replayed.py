"""What a bridge sends until it is acknowledged: kept once, whatever comes twice.

Each answer says ``persisted``, ``duplicate`` or ``rejected``; all three end the replay, so
``persisted`` is said only when the database has it on disk.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection

from forge_core.wire.base import WireModel, parse
from forge_core.wire.codes import Disposition, EventType
from forge_core.wire.events import PAYLOADS, Log
from forge_core.wire.from_bridge import (
    ReplayAck,
    SubmitCleanupReport,
    SubmitDispatchEvent,
    SubmitLegacyResult,
    SubmitReapOutcome,
)
from forge_hub.connections import LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.feed import Change, Fleeting
from forge_hub.matching import dispatch_of, rejected
from forge_hub.reasons import Reason
from forge_hub.store import actions, dispatches, evidence

_PERSISTED = ReplayAck(accepted=True, disposition=Disposition.PERSISTED)
_DUPLICATE = ReplayAck(accepted=True, disposition=Disposition.DUPLICATE)


async def take_event(board: Board, runner: LiveRunner, message: SubmitDispatchEvent) -> ReplayAck:
    """Keep a durable event (B-84), or show a log chunk or deadline to whoever watches.

    :raises RefusedError: code ``malformed``: the payload is not what the type asks for.
    """
    what = f"the payload of {message.type}"
    payload = parse(PAYLOADS[message.type], message.payload, what=what)
    if not message.type.durable:
        return _show(board, runner, message, payload)
    if message.sequence is None:
        return rejected(Reason.MALFORMED, f"{message.type} needs a sequence")
    now = board.clock.utc()
    ack, kept = await board.database.write(
        lambda connection: _keep_event(connection, runner, message, payload, now)
    )
    if kept is not None:
        board.feed.publish(kept.session_id, Change(kept.ordinal))
    return ack


class _KeptEvent(NamedTuple):
    session_id: str
    ordinal: int


def _keep_event(
    connection: Connection,
    runner: LiveRunner,
    message: SubmitDispatchEvent,
    payload: WireModel,
    now: str,
) -> tuple[ReplayAck, _KeptEvent | None]:
    row = dispatch_of(connection, runner, message)
    if isinstance(row, ReplayAck):
        return row, None
    if dispatches.is_stale(row):
        return _kept_before(connection, message) or rejected(Reason.STALE_FENCE), None
    session_id = row["session_id"]
    ordinal = evidence.add_event(connection, message, payload, session_id=session_id, now=now)
    if ordinal is None:
        conflict = rejected(
            Reason.SEQUENCE_CONFLICT, f"sequence {message.sequence} is another event"
        )
        return _kept_before(connection, message) or conflict, None
    return _PERSISTED, _KeptEvent(session_id, ordinal)


def _kept_before(connection: Connection, message: SubmitDispatchEvent) -> ReplayAck | None:
    """The answer to an event id that is known; None: it is not."""
    known = evidence.find_event(connection, message.event_id)
    if known is None:
        return None
    if (known["attempt_id"], known["fence"]) == (message.attempt_id, message.fence):
        return _DUPLICATE
    return rejected(Reason.EVENT_CONFLICT, "the event id belongs to another dispatch")


def _show(
    board: Board, runner: LiveRunner, message: SubmitDispatchEvent, payload: WireModel
) -> ReplayAck:
    """Not durable: only for a dispatch that lives, only in memory."""
    if message.stream_sequence is None:
        return rejected(Reason.MALFORMED, f"{message.type} needs a streamSequence")
    lease = board.leases.get((message.attempt_id, message.fence))
    if lease is None:
        return rejected(Reason.STALE_FENCE, "the dispatch has ended")
    owner = (lease.to.runner_id, lease.to.instance_id)
    if owner != (runner.runner_id, message.resource_runner_instance_id):
        return rejected(Reason.INSTANCE_MISMATCH, "it was dispatched to another runner instance")
    item = Fleeting(message.type.value, _live_view(message, payload))
    if message.type is EventType.LOG and isinstance(payload, Log):
        board.feed.publish_log(lease.to.session_id, item, len(payload.text.encode()))
    else:
        board.feed.publish(lease.to.session_id, item)
    return _PERSISTED


def _live_view(message: SubmitDispatchEvent, payload: WireModel) -> dict[str, object]:
    """As an event is shown, but for what only a kept one has."""
    return {
        "attemptId": message.attempt_id,
        "fence": message.fence,
        "streamSequence": message.stream_sequence,
        "type": message.type.value,
        "at": message.at,
        "payload": payload.to_wire(),
    }


async def take_cleanup_report(
    board: Board, runner: LiveRunner, message: SubmitCleanupReport
) -> ReplayAck:
    """Keep one part of a report if all four match: attempt, fence, instance, reporter (B-83).

    An old fence is no reason to refuse it: the report is about the dispatch of its own fence.
    """
    if message.part > message.parts:
        return rejected(Reason.MALFORMED, f"part {message.part} of {message.parts}")
    now = board.clock.utc()
    ack, session_id = await board.database.write(
        lambda connection: _keep_report(connection, runner, message, now)
    )
    if session_id is not None:
        board.feed.publish(session_id, Change())
    return ack


def _keep_report(
    connection: Connection, runner: LiveRunner, message: SubmitCleanupReport, now: str
) -> tuple[ReplayAck, str | None]:
    row = dispatch_of(
        connection,
        runner,
        message,
        claimed_runner_id=message.runner_id,
        claimed_instance_id=message.runner_instance_id,
    )
    if isinstance(row, ReplayAck):
        return row, None
    about = (message.attempt_id, message.fence, message.parts)
    for known in evidence.cleanup_parts_of_report(connection, message.report_id):
        if (known["attempt_id"], known["fence"], known["parts"]) != about:
            return rejected(Reason.REPORT_CONFLICT, "the report id belongs to another report"), None
    if not evidence.add_cleanup_part(connection, message, now=now):
        return _DUPLICATE, None
    return _PERSISTED, row["session_id"]


async def take_reap_outcome(
    board: Board, runner: LiveRunner, message: SubmitReapOutcome
) -> ReplayAck:
    """Keep what a reap action did (B-88)."""
    now = board.clock.utc()

    def keep(connection: Connection) -> ReplayAck:
        request = actions.find_reap(connection, message.request_id)
        if request is None or request["runner_id"] != runner.runner_id:
            return rejected(Reason.UNKNOWN_REQUEST, "this runner was not asked that")
        if request["instance_id"] != message.runner_instance_id:
            return rejected(Reason.INSTANCE_MISMATCH, "another runner instance was asked")
        answered = actions.answer_reap(connection, message, now=now)
        return _PERSISTED if answered else _DUPLICATE

    return await board.database.write(keep)


async def take_legacy_result(
    board: Board, runner: LiveRunner, message: SubmitLegacyResult
) -> ReplayAck:
    """Keep the answer to a v1 command (B-03)."""
    now = board.clock.utc()

    def keep(connection: Connection) -> ReplayAck:
        dispatch = actions.find_legacy(connection, message.dispatch_id)
        if dispatch is None or dispatch["runner_id"] != runner.runner_id:
            return rejected(Reason.UNKNOWN_DISPATCH, "this runner was not sent that")
        added = actions.add_legacy_result(connection, message, now=now)
        return _PERSISTED if added else _DUPLICATE

    return await board.database.write(keep)
