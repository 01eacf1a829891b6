"""What ``forge-bridge status`` shows: the same state that heartbeats tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import anyio
import structlog

from forge_bridge.flows.heartbeat import heartbeat
from forge_bridge.flows.session import Session
from forge_bridge.runner import Runner
from forge_bridge.status import BridgeStatus, boot_ms, process_identity, write_status
from forge_bridge.waiting import until

logger = structlog.get_logger(__name__)

WRITE_EVERY_MS: Final = 5_000
CHANGE_DELAY_MS: Final = 200


async def keep(runner: Runner, session: Session, state_root: Path) -> None:
    """Rewrite the status file while the bridge runs, at changes and at least now and then."""
    clock, started_at = runner.clock, runner.clock.utc()
    phase, since = session.phase, started_at
    while True:
        changed = runner.changed
        if session.phase is not phase:
            phase, since = session.phase, clock.utc()
        status = _status(runner, session, started_at, since)
        try:
            await anyio.to_thread.run_sync(write_status, state_root, status)
        except OSError as error:
            logger.warning("cannot write the status", error=str(error))
        written_at_ms = clock.now_ms()
        await until(clock, written_at_ms + WRITE_EVERY_MS, changed)
        await clock.sleep_until_ms(written_at_ms + CHANGE_DELAY_MS)


def _status(runner: Runner, session: Session, started_at: str, since: str) -> BridgeStatus:
    told = heartbeat(runner, 1)
    pid = os.getpid()
    return BridgeStatus(
        version=runner.identity.bridge_version,
        pid=pid,
        process=process_identity(pid) or "unknown",
        runner_id=told.runner_id,
        runner_instance_id=told.runner_instance_id,
        state=told.state,
        drained_by=runner.drained_by,
        connection=session.phase,
        connection_since=since,
        started_at=started_at,
        reserved_count=told.reserved_count,
        starting_count=told.starting_count,
        active_count=told.active_count,
        degraded_reservation_count=told.degraded_reservation_count,
        used_resources=told.used_resources,
        resource_capacity=told.resource_capacity,
        disk=told.disk,
        pending_reports=told.pending_reports,
        attempts=told.attempts[-1024:],
        engine_away=runner.engine_away,
        last_error=session.last_error,
        written_at=told.sent_at,
        written_boot_ms=boot_ms(),
    )
