"""Watches the disk, so that offers are refused before it is full (B-25)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from forge_bridge.runner import Runner
from forge_core.errors import ForgeError
from forge_core.ports import Disk

logger = structlog.get_logger(__name__)

LOOK_EVERY_MS: Final = 5_000
RELIEVE_EVERY_MS: Final = 60_000
"""What nothing could be taken from a moment ago has not grown much since."""

Relieve = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
"""Gives space back for as long as what it is given says that there is too little."""


async def look(runner: Runner, disk: Disk) -> None:
    """One look; when it fails the earlier one stands."""
    try:
        usage = await disk.usage()
    except ForgeError as error:
        logger.error("cannot look at the disk", error=str(error))
        return
    before = runner.disk.latched
    runner.disk_usage = usage
    runner.disk = runner.disk.observe(usage.used_percent, usage.free_bytes)
    if runner.disk.latched != before:
        logger.warning(
            "disk pressure" if runner.disk.latched else "disk pressure is over",
            used_percent=usage.used_percent,
            free_bytes=usage.free_bytes,
        )
        runner.notify()


async def watch(runner: Runner, disk: Disk, relieve: Relieve) -> None:
    """For as long as the bridge runs; under pressure, and only then, give space back (B-89)."""

    async def is_pressed() -> bool:
        await look(runner, disk)
        return runner.disk.latched

    clock = runner.clock
    relieved_ms = clock.now_ms() - RELIEVE_EVERY_MS
    while True:
        await clock.sleep_until_ms(clock.now_ms() + LOOK_EVERY_MS)
        await look(runner, disk)
        if runner.disk.latched and clock.now_ms() - relieved_ms >= RELIEVE_EVERY_MS:
            await relieve(is_pressed)
            relieved_ms = clock.now_ms()
