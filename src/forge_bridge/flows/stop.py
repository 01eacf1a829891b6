"""The bridge stops: nothing new, end what runs, deliver what can be delivered."""

from __future__ import annotations

from typing import Final

import anyio
import structlog

from forge_bridge.flows.legacy import LegacyDispatches
from forge_bridge.runner import Runner
from forge_core.attempt import Phase
from forge_core.wire.codes import FailureCode

logger = structlog.get_logger(__name__)

DELIVER_MS: Final = 10_000


async def stop(runner: Runner, legacy: LegacyDispatches, deadline_ms: int) -> None:
    """End every dispatch with ``bridge_stopped``, wait for its teardown, then for the outbox.

    Bounded: what is left after that is on disk, and the next start finishes it.
    """
    runner.stopping = True
    runner.notify()
    legacy.cancel_all()
    with anyio.move_on_after(deadline_ms / 1000) as in_time:
        for run in tuple(runner.attempts.values()):
            if run.state.phase in (Phase.RESERVED, Phase.RUNNING):
                await run.end(FailureCode.BRIDGE_STOPPED, "the bridge was asked to stop")
        while not _is_over(runner, legacy):
            await runner.changed.wait()
    if in_time.cancelled_caught:
        logger.error("dispatches still run; the next start cleans up", count=len(runner.attempts))
    if runner.hub.is_online:
        with anyio.move_on_after(DELIVER_MS / 1000):
            await runner.outbox.wait_empty()


def _is_over(runner: Runner, legacy: LegacyDispatches) -> bool:
    degraded = (run.state.phase is Phase.DEGRADED for run in runner.attempts.values())
    return legacy.is_idle and all(degraded)
