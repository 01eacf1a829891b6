"""A lease update arrives: believed only with its MAC (B-70)."""

from __future__ import annotations

import structlog

from forge_bridge.runner import Runner
from forge_core.attempt_events import RenewalArrived
from forge_core.errors import DiskUnusable, RefusedError
from forge_core.wire.from_hub import LeaseUpdate

logger = structlog.get_logger(__name__)


async def handle_lease_update(runner: Runner, update: LeaseUpdate, received_ms: int) -> None:
    """Hand it to the dispatch that it names; any other fence changes nothing.

    One under a lower fence is late and nothing more; one under a fence that was never offered
    here is counted against the live dispatch (protocol.md, Attempts and fences; Lease).

    :param received_ms: CLOCK_BOOTTIME; the renewed lease runs from here, however long a slow
        disk keeps the update waiting.
    """
    if update.fence < runner.admission.highest_fence(update.attempt_id):
        return
    run = runner.attempts.get((update.attempt_id, update.fence)) or next(
        (run for key, run in runner.attempts.items() if key[0] == update.attempt_id), None
    )
    if run is None:
        logger.debug(
            "a renewal for no live dispatch", attempt_id=update.attempt_id, fence=update.fence
        )
        return
    try:
        await run.feed(RenewalArrived(update, received_ms))
    except (DiskUnusable, RefusedError) as error:
        run.log.error("cannot record a refused renewal", error=str(error))
