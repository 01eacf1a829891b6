"""The hub's Profile Settings reach the runner: with each acknowledgement, and when they change."""

from __future__ import annotations

import structlog

from forge_bridge.runner import Runner
from forge_core.wire.shapes import RunnerSettings

logger = structlog.get_logger(__name__)


def apply_settings(runner: Runner, settings: RunnerSettings | None) -> None:
    """Take them over; they survive a reconnect because each registration brings them again."""
    if settings is None or settings == runner.hub_settings:
        return
    logger.info(
        "runner settings changed",
        draining=settings.draining,
        host_fallback_enabled=settings.host_fallback_enabled,
    )
    runner.hub_settings = settings
    runner.notify()
