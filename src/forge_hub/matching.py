"""Does a message belong to a recorded dispatch?  (B-83)

What a runner reports is believed only if the attempt, the fence, the runner instance that owns
the resources, and the runner that reports all agree with what the hub recorded.
"""

from __future__ import annotations

from sqlalchemy import Connection, RowMapping

from forge_core.wire.codes import Disposition
from forge_core.wire.from_bridge import (
    ReplayAck,
    SubmitCleanupReport,
    SubmitDispatchEvent,
    SubmitDispatchResult,
    SubmitPublication,
)
from forge_hub.connections import LiveRunner
from forge_hub.reasons import Reason
from forge_hub.store import dispatches

Evidence = SubmitDispatchEvent | SubmitDispatchResult | SubmitPublication | SubmitCleanupReport


def dispatch_of(
    connection: Connection,
    reporter: LiveRunner,
    message: Evidence,
    *,
    claimed_runner_id: str | None = None,
    claimed_instance_id: str | None = None,
) -> RowMapping | ReplayAck:
    """What was recorded for the message's attempt and fence; or the rejection of what differs.

    :param reporter: the runner on whose current connection it came.
    :param claimed_runner_id: the reporting runner that the message names, where it names one.
    :param claimed_instance_id: likewise its instance.
    """
    if claimed_runner_id not in {None, reporter.runner_id} or claimed_instance_id not in {
        None,
        reporter.instance_id,
    }:
        return rejected(Reason.REPORTER_MISMATCH, "it names another runner or instance as reporter")
    row = dispatches.find(connection, message.attempt_id, message.fence)
    if row is None:
        return rejected(Reason.UNKNOWN_DISPATCH, "no such attempt and fence was dispatched")
    if row["runner_id"] != reporter.runner_id:
        return rejected(Reason.RUNNER_MISMATCH, "it was dispatched to another runner")
    if row["instance_id"] != message.resource_runner_instance_id:
        return rejected(Reason.INSTANCE_MISMATCH, "it was dispatched to another runner instance")
    return row


def current_dispatch_of(
    connection: Connection, reporter: LiveRunner, message: Evidence
) -> RowMapping | ReplayAck:
    """As :func:`dispatch_of`, where only a dispatch that still has a say counts."""
    row = dispatch_of(connection, reporter, message)
    if not isinstance(row, ReplayAck) and dispatches.is_stale(row):
        return rejected(Reason.STALE_FENCE)
    return row


def rejected(reason: Reason, detail: str | None = None) -> ReplayAck:
    """The acknowledgement that ends a replay without keeping the message."""
    return ReplayAck(accepted=False, reason=reason, detail=detail, disposition=Disposition.REJECTED)
