"""A lease update arrives: believed only with its MAC (B-70)."""

from __future__ import annotations

import structlog

from forge_bridge.runner import Runner
from forge_core.attempt_events import RenewalArrived
from forge_core.errors import DiskUnusable
from forge_core.wire.from_hub import LeaseUpdate

logger = structlog.get_logger(__name__)


async def handle_lease_update(runner: Runner, update: LeaseUpdate) -> None:
    """Hand it to the dispatch under exactly this fence; any other fence changes nothing."""
    run = runner.attempts.get((update.attempt_id, update.fence))
    if run is None:
        logger.warning(
            "a renewal for no live dispatch", attempt_id=update.attempt_id, fence=update.fence
        )
        return
    try:
        await run.feed(RenewalArrived(update))
    except DiskUnusable as error:
        run.log.error("cannot record a refused renewal", error=str(error))
