"""Waiting for whichever comes first: a moment or an event."""

from __future__ import annotations

import anyio

from forge_core.ports import Clock


async def until(clock: Clock, at_ms: int | None, event: anyio.Event) -> None:
    """Return at ``at_ms`` (CLOCK_BOOTTIME; None: never) or once ``event`` is set."""
    async with anyio.create_task_group() as waits:

        async def wake() -> None:
            await event.wait()
            waits.cancel_scope.cancel()

        waits.start_soon(wake)
        if at_ms is not None:
            await clock.sleep_until_ms(at_ms)
            waits.cancel_scope.cancel()
