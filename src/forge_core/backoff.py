"""When to try again after a lost connection (lifecycle.md, Connection)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

BACKOFF_FIRST_MS: Final = 1_000
BACKOFF_MAX_MS: Final = 60_000
STABLE_AFTER_MS: Final = 30_000


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with full jitter; reset by a connection that stayed online."""

    failures: int = 0
    refused_for_good: bool = False

    def online_for(self, duration_ms: int) -> Backoff:
        """A connection ended after it had been online for ``duration_ms``."""
        return Backoff() if duration_ms >= STABLE_AFTER_MS else self.failed()

    def failed(self, *, for_good: bool = False) -> Backoff:
        """An attempt failed; ``for_good``: authentication or registration was refused."""
        return replace(self, failures=self.failures + 1, refused_for_good=for_good)

    def delay_ms(self, jitter: float, retry_after_ms: int | None = None) -> int:
        """How long to wait; ``jitter`` uniform in [0, 1).

        A refusal waits the maximum (it needs a person, not haste); ``Retry-After`` is a floor.
        """
        floor = max(0, min(retry_after_ms or 0, 5 * BACKOFF_MAX_MS))
        if self.refused_for_good:
            return max(floor, BACKOFF_MAX_MS)
        exponent = max(0, min(self.failures - 1, 16))
        ceiling = min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2**exponent)
        return floor + int(jitter * ceiling)
