"""What a bridge sends until it is acknowledged: kept once, whatever comes twice.

Each answer says ``persisted``, ``duplicate`` or ``rejected``; all three end the replay, so
``persisted`` is said only when the database has it on disk.
"""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from forge_core.wire.base import WireModel, parse
from forge_core.wire.codes import Disposition, EventType, RejectionCode
from forge_core.wire.events import PAYLOADS, Log
from forge_core.wire.from_bridge import (
    ReplayAck,
    SubmitCleanupReport,
    SubmitDispatchEvent,
    SubmitLegacyResult,
    SubmitPublication,
    SubmitReapOutcome,
)
from forge_hub.connections import LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.feed import Item
from forge_hub.matching import mismatch, rejected
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
        return rejected("malformed", f"{message.type} needs a sequence")
    now = board.clock.utc()
    async with board.database.write() as connection:
        row = await dispatches.find(connection, message.attempt_id, message.fence)
        refusal = mismatch(row, runner, message.resource_runner_instance_id)
        if refusal is not None or row is None:
            return refusal or rejected("unknown_dispatch")
        if dispatches.is_stale(row):
            return await _kept_before(connection, message) or rejected(RejectionCode.STALE_FENCE)
        session_id = row["session_id"]
        ordinal = await evidence.add_event(
            connection, message, payload, session_id=session_id, now=now
        )
        if ordinal is None:
            return await _kept_before(connection, message) or rejected(
                "sequence_conflict", f"sequence {message.sequence} is another event"
            )
    data = event_as_json(message, payload)
    board.feed.publish(session_id, Item("event", data, ordinal=ordinal))
    return _PERSISTED


async def _kept_before(
    connection: AsyncConnection, message: SubmitDispatchEvent
) -> ReplayAck | None:
    """The answer to an event id that is known; None: it is not."""
    known = await evidence.find_event(connection, message.event_id)
    if known is None:
        return None
    if (known["attempt_id"], known["fence"]) == (message.attempt_id, message.fence):
        return _DUPLICATE
    return rejected("event_conflict", "the event id belongs to another dispatch")


def _show(
    board: Board, runner: LiveRunner, message: SubmitDispatchEvent, payload: WireModel
) -> ReplayAck:
    """Not durable: only for a dispatch that lives, only in memory."""
    if message.stream_sequence is None:
        return rejected("malformed", f"{message.type} needs a streamSequence")
    lease = board.leases.get((message.attempt_id, message.fence))
    if lease is None:
        return rejected(RejectionCode.STALE_FENCE, "the dispatch has ended")
    owner = (lease.to.runner_id, lease.to.instance_id)
    if owner != (runner.runner_id, message.resource_runner_instance_id):
        return rejected("instance_mismatch", "it was dispatched to another runner instance")
    item = Item(message.type.value, event_as_json(message, payload))
    if message.type is EventType.LOG and isinstance(payload, Log):
        board.feed.publish_log(lease.to.session_id, item, len(payload.text.encode()))
    else:
        board.feed.publish(lease.to.session_id, item)
    return _PERSISTED


def event_as_json(message: SubmitDispatchEvent, payload: WireModel) -> dict[str, object]:
    """As the API shows it."""
    shown = message.to_wire()
    del shown["resourceRunnerInstanceId"]
    return {**shown, "payload": payload.to_wire()}


async def take_cleanup_report(
    board: Board, runner: LiveRunner, message: SubmitCleanupReport
) -> ReplayAck:
    """Keep one part of a report if all four match: attempt, fence, instance, reporter (B-83).

    An old fence is no reason to refuse it: the report is about the dispatch of its own fence.
    """
    if message.part > message.parts:
        return rejected("malformed", f"part {message.part} of {message.parts}")
    now = board.clock.utc()
    async with board.database.write() as connection:
        row = await dispatches.find(connection, message.attempt_id, message.fence)
        refusal = mismatch(
            row,
            runner,
            message.resource_runner_instance_id,
            claimed_runner_id=message.runner_id,
            claimed_instance_id=message.runner_instance_id,
        )
        if refusal is not None or row is None:
            return refusal or rejected("unknown_dispatch")
        about = (message.attempt_id, message.fence, message.parts)
        for known in await evidence.cleanup_parts_of_report(connection, message.report_id):
            if (known["attempt_id"], known["fence"], known["parts"]) != about:
                return rejected("report_conflict", "the report id belongs to another report")
        if not await evidence.add_cleanup_part(connection, message, now=now):
            return _DUPLICATE
    shown = message.to_wire()
    board.feed.publish(row["session_id"], Item("cleanup", shown))
    return _PERSISTED


async def take_publication(
    board: Board, runner: LiveRunner, message: SubmitPublication
) -> ReplayAck:
    """Keep what came of a push (B-63)."""
    async with board.database.write() as connection:
        row = await dispatches.find(connection, message.attempt_id, message.fence)
        refusal = mismatch(row, runner, message.resource_runner_instance_id)
        if refusal is not None or row is None:
            return refusal or rejected("unknown_dispatch")
        if dispatches.is_stale(row):
            return rejected(RejectionCode.STALE_FENCE)
        added = await evidence.add_publication(connection, message, now=board.clock.utc())
    return _PERSISTED if added else _DUPLICATE


async def take_reap_outcome(
    board: Board, runner: LiveRunner, message: SubmitReapOutcome
) -> ReplayAck:
    """Keep what a reap action did (B-88)."""
    async with board.database.write() as connection:
        request = await actions.find_reap(connection, message.request_id)
        if request is None or request["runner_id"] != runner.runner_id:
            return rejected("unknown_request", "this runner was not asked that")
        if request["instance_id"] != message.runner_instance_id:
            return rejected("instance_mismatch", "another runner instance was asked")
        answered = await actions.answer_reap(connection, message, now=board.clock.utc())
    return _PERSISTED if answered else _DUPLICATE


async def take_legacy_result(
    board: Board, runner: LiveRunner, message: SubmitLegacyResult
) -> ReplayAck:
    """Keep the answer to a v1 command (B-03)."""
    async with board.database.write() as connection:
        dispatch = await actions.find_legacy(connection, message.dispatch_id)
        if dispatch is None or dispatch["runner_id"] != runner.runner_id:
            return rejected("unknown_dispatch", "this runner was not sent that")
        added = await actions.add_legacy_result(connection, message, now=board.clock.utc())
    return _PERSISTED if added else _DUPLICATE
