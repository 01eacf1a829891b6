"""The hub wants a dispatch to end."""

from __future__ import annotations

import structlog

from forge_bridge.runner import Runner
from forge_core.admission import Key
from forge_core.wire.codes import FailureCode

logger = structlog.get_logger(__name__)


async def handle_cancel(runner: Runner, key: Key, reason: str | None) -> None:
    """Of a reserved attempt: release it; of a running one: end it; of an unknown one: nothing."""
    if key[1] < runner.admission.highest_fence(key[0]):
        logger.warning("a cancel under an old fence", attempt_id=key[0])
        return
    run = runner.attempts.get(key)
    if run is not None:
        await run.end(FailureCode.CANCELLED, reason)
