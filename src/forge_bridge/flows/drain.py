"""The operator of this host drains it, or ends the drain (B-87).

What counts is on disk, so it holds across restarts, needs no hub, and can be said while no
bridge runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from forge_bridge.runner import Runner
from forge_core.errors import ForgeError

logger = structlog.get_logger(__name__)

LOOK_EVERY_MS: Final = 1_000

IsDrained = Callable[[], Awaitable[bool]]
"""Asks the state root; raises ForgeError when that cannot be read."""


async def look(runner: Runner, is_drained: IsDrained) -> None:
    """One look; running attempts go on whatever it finds.

    :raises ForgeError: the state root cannot be read.
    """
    drained = await is_drained()
    if drained != runner.host_drained:
        logger.info("this host drains" if drained else "this host takes work again")
        runner.host_drained = drained
        runner.notify()


async def watch(runner: Runner, is_drained: IsDrained) -> None:
    """For as long as the bridge runs; when a look fails, the earlier one stands."""
    failing = False
    while True:
        await runner.clock.sleep_until_ms(runner.clock.now_ms() + LOOK_EVERY_MS)
        try:
            await look(runner, is_drained)
        except ForgeError as error:
            if not failing:
                logger.error("cannot see whether this host drains", error=str(error))
            failing = True
        else:
            failing = False
