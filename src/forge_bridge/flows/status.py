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
from forge_core import clock_watch

logger = structlog.get_logger(__name__)

WRITE_EVERY_MS: Final = 5_000
CHANGE_DELAY_MS: Final = 200


class StatusReport:
    """The bridge as it sees itself: for the status file, and for metrics."""

    def __init__(self, runner: Runner, session: Session) -> None:
        self._runner = runner
        self._session = session
        self._started_at = self._since = runner.clock.utc()
        self._phase = session.phase
        self._seen = clock_watch.read(runner.clock, anyio.current_time())

    async def keep(self, state_root: Path) -> None:
        """Rewrite the status file while the bridge runs, at changes and now and then."""
        runner, clock = self._runner, self._runner.clock
        while True:
            changed = runner.changed
            try:
                await anyio.to_thread.run_sync(write_status, state_root, self.now())
            except OSError as error:
                logger.warning("cannot write the status", error=str(error))
            self._tell_of_jumps()
            written_at_ms = clock.now_ms()
            await until(clock, written_at_ms + WRITE_EVERY_MS, changed)
            await clock.sleep_until_ms(written_at_ms + CHANGE_DELAY_MS)

    def _tell_of_jumps(self) -> None:
        """Say in the log that the clocks jumped: its times do, and leases may have ended."""
        before, self._seen = self._seen, clock_watch.read(self._runner.clock, anyio.current_time())
        jump = clock_watch.jump_between(before, self._seen)
        if jump is not None:
            logger.warning(
                "the clocks jumped",
                wall_clock_stepped_ms=jump.stepped_ms,
                host_suspended_ms=jump.suspended_ms,
            )

    def now(self) -> BridgeStatus:
        """What a heartbeat would tell this moment, and what is known besides."""
        runner, session = self._runner, self._session
        if session.phase is not self._phase:
            self._phase, self._since = session.phase, runner.clock.utc()
        told, pid = heartbeat(runner, 1), os.getpid()
        return BridgeStatus(
            version=runner.identity.bridge_version,
            pid=pid,
            process=process_identity(pid) or "unknown",
            runner_id=told.runner_id,
            runner_instance_id=told.runner_instance_id,
            state=told.state,
            drained_by=runner.drained_by,
            connection=session.phase,
            connection_since=self._since,
            started_at=self._started_at,
            reserved_count=told.reserved_count,
            starting_count=told.starting_count,
            active_count=told.active_count,
            degraded_reservation_count=told.degraded_reservation_count,
            used_resources=told.used_resources,
            resource_capacity=told.resource_capacity,
            disk=told.disk,
            pending_reports=told.pending_reports,
            attempts=told.attempts[-1024:],
            ended=dict(runner.ended),
            engine_away=runner.engine_away,
            parts_unseen=dict(runner.parts_unseen),
            last_error=session.last_error,
            written_at=told.sent_at,
            written_boot_ms=boot_ms(),
        )
