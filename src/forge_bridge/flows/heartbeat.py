"""What the runner holds, told at the hub's interval and when it changes (B-08)."""

from __future__ import annotations

from typing import Final

import structlog

from forge_bridge.flows.settings import apply_settings
from forge_bridge.runner import Runner
from forge_bridge.waiting import until
from forge_core.errors import ForgeError, HubConnectionLost, RefusedError
from forge_core.wire.codes import ReservationState
from forge_core.wire.from_bridge import Heartbeat, HeartbeatAck
from forge_core.wire.limits import fit_heartbeat
from forge_core.wire.shapes import HeartbeatAttempt

logger = structlog.get_logger(__name__)

MIN_ANSWER_MS: Final = 5_000
MAX_ANSWER_MS: Final = 30_000
CHANGE_DELAY_MS: Final = 200
"""A change is told this soon, and a burst of changes once."""

MAX_UNANSWERED: Final = 3
"""So many in a row, and the hub does not hear us, whatever else it sends."""


async def beat(runner: Runner, interval_ms: int) -> HubConnectionLost:
    """Send heartbeats for as long as the hub answers them: why the connection is of no use.

    A call that the hub completes with an error is answered.
    """
    clock, sequence, unanswered = runner.clock, 0, 0
    # An answer that does not come must not cost the next heartbeat.
    timeout_ms = max(MIN_ANSWER_MS, min(interval_ms, MAX_ANSWER_MS))
    while True:
        changed = runner.changed
        sequence += 1
        sent_at_ms = clock.now_ms()
        try:
            request = heartbeat(runner, sequence)
            answer = await runner.hub.call(request, HeartbeatAck, timeout_ms=timeout_ms)
            unanswered = 0
            if not answer.accepted:
                logger.warning(
                    "the hub refuses a heartbeat", reason=answer.reason, detail=answer.detail
                )
            apply_settings(runner, answer.settings)
        except ForgeError as error:
            logger.warning("cannot deliver a heartbeat", error=str(error))
            if isinstance(error, HubConnectionLost):
                unanswered += 1
            elif isinstance(error, RefusedError):
                unanswered = 0
            if unanswered == MAX_UNANSWERED:
                return HubConnectionLost(
                    f"cannot reach the hub on this connection: {unanswered} heartbeats in a row "
                    f"had no answer within {timeout_ms} ms each; connecting again"
                )
        await until(clock, sent_at_ms + interval_ms, changed)
        await clock.sleep_until_ms(sent_at_ms + CHANGE_DELAY_MS)


def heartbeat(runner: Runner, sequence: int) -> Heartbeat:
    """The same state that ``status`` and admission see."""
    admission = runner.admission
    attempts = tuple(
        HeartbeatAttempt(attempt_id=r.key[0], fence=r.key[1], state=r.state)
        for r in admission.reservations.values()
        if r.key[1] > 0
    )
    return fit_heartbeat(
        Heartbeat(
            runner_id=runner.identity.runner_id,
            runner_instance_id=runner.identity.runner_instance_id,
            sequence=sequence,
            sent_at=runner.clock.utc(),
            state=runner.state,
            used_resources=admission.used,
            resource_capacity=runner.capacity,
            reserved_count=admission.count(ReservationState.RESERVED),
            starting_count=admission.count(ReservationState.STARTING),
            active_count=admission.count(ReservationState.ACTIVE),
            degraded_reservation_count=admission.count(ReservationState.DEGRADED),
            disk=runner.disk_state,
            pending_reports=runner.outbox.pending_reports,
            attempts=attempts,
            attempts_truncated=False,
        )
    )
