"""The hub wants a dispatch to end."""

from __future__ import annotations

import structlog

from forge_bridge.runner import Runner
from forge_core.wire.codes import FailureCode
from forge_core.wire.from_hub import Cancel

logger = structlog.get_logger(__name__)


async def handle_cancel(runner: Runner, cancel: Cancel) -> None:
    """Of a reserved attempt: release it; of a running one: end it; of an unknown one: nothing."""
    if cancel.fence < runner.admission.highest_fence(cancel.attempt_id):
        logger.warning("a cancel under an old fence", attempt_id=cancel.attempt_id)
        return
    run = runner.attempts.get((cancel.attempt_id, cancel.fence))
    if run is not None:
        await run.end(FailureCode.CANCELLED, (cancel.reason or "")[:2000] or None)
