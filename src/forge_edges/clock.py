"""Time and chance (:class:`forge_core.ports.Clock`)."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import Final

import anyio
import anyio.lowlevel

TICK_MS: Final = 1_000
"""How late a sleeper can be after a suspend."""

_ID_BYTES: Final = 16
_CHANCE: Final = secrets.SystemRandom()


class SystemClock:
    """CLOCK_BOOTTIME, the wall clock, and the kernel's randomness."""

    def now_ms(self) -> int:
        """Milliseconds since boot, suspend included (clock_gettime(2), CLOCK_BOOTTIME)."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def utc(self) -> str:
        """RFC 3339, UTC, milliseconds, ``Z``."""
        return datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"

    def unix_seconds(self) -> int:
        """Whole seconds since the epoch, for commit dates."""
        return int(time.time())

    async def sleep_until_ms(self, deadline_ms: int) -> None:
        """Return once :meth:`now_ms` has reached ``deadline_ms``.

        The event loop's timers stand still while the host is suspended (CLOCK_MONOTONIC), so a
        long wait is cut into ticks: after a resume, the deadline is seen within one tick.
        """
        while (remaining_ms := deadline_ms - self.now_ms()) > 0:  # noqa: ASYNC110 - a clock
            await anyio.sleep(min(remaining_ms, TICK_MS) / 1_000)
        await anyio.lowlevel.checkpoint()

    def jitter(self) -> float:
        """Uniform in [0, 1)."""
        return _CHANCE.random()

    def new_id(self) -> str:
        """128 random bits as 32 hex digits: a wire id, a file name and a label value."""
        return secrets.token_hex(_ID_BYTES)
