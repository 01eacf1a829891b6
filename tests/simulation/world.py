"""What all parts of a simulation share: the seed, the time, the trace and the verdict."""

from __future__ import annotations

import asyncio
import hashlib
import random  # noqa: TID251 - seeded; the simulation is a function of its seed
from collections import deque
from collections.abc import Callable
from contextvars import Context
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import anyio

from .loop import START_S, VirtualLoop, context_of

EPOCH: Final = datetime(2026, 11, 29, 14, 0, tzinfo=UTC)
TAIL_LINES: Final = 400


class World:
    """One seed's world.

    :ivar violations: broken invariants, as ``name: what happened``; the first stops the run.
    :ivar wall_offset_s: how far the host's wall clock has been stepped.
    """

    def __init__(
        self,
        seed: int,
        loop: asyncio.AbstractEventLoop,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.seed = seed
        self.loop = loop
        self.violations: list[str] = []
        self.failure: BaseException | None = None
        self.wall_offset_s = 0.0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.lines = 0
        self._digest = hashlib.sha256()
        self._show = show
        self._contexts: dict[str, Context] = {}
        loop.set_exception_handler(self._on_exception)

    @property
    def processes(self) -> VirtualLoop:
        """The loop, for what only a simulated one can do: kill, freeze and count."""
        assert isinstance(self.loop, VirtualLoop)
        return self.loop

    # -- chance ---------------------------------------------------------------------------------

    def rng(self, name: str) -> random.Random:
        """A stream of its own for each part, so that one part's chances leave the others alone."""
        return random.Random(f"{self.seed}/{name}")

    # -- time -----------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Since the first step; the same for everybody, suspended or not."""
        return self.loop.time() - START_S

    @property
    def now_ms(self) -> int:
        """CLOCK_BOOTTIME of the host."""
        return int(self.loop.time() * 1000)

    def utc(self) -> str:
        """The host's wall clock."""
        now = EPOCH + timedelta(seconds=self.now_s + self.wall_offset_s)
        return now.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"

    def later(
        self, process: str, delay_s: float, call: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        """Call in a while, as that process: not at all when it is dead by then."""
        return self.loop.call_later(delay_s, call, *args, context=self.context(process))

    def context(self, process: str) -> Context:
        """In which everything belongs to that process."""
        if process not in self._contexts:
            self._contexts[process] = context_of(process)
        return self._contexts[process]

    # -- what is told ---------------------------------------------------------------------------

    def note(self, who: str, what: str) -> None:
        """One line of the trace."""
        line = f"{self.now_s:10.3f} {getattr(self.loop, 'steps', 0):7d} {who:<9} {what}"
        self.lines += 1
        self.tail.append(line)
        self._digest.update(line.encode() + b"\n")
        if self._show is not None:
            self._show(line)

    @property
    def digest(self) -> str:
        """Of the whole trace."""
        return self._digest.hexdigest()

    def violate(self, invariant: str, what: str) -> None:
        """An invariant does not hold; the run ends after this step."""
        self.violations.append(f"{invariant}: {what}")
        self.note("BROKEN", self.violations[-1])
        self.loop.stop()

    def require(self, condition: object, invariant: str, what: str) -> None:
        """:meth:`violate` unless the condition holds."""
        if not condition:
            self.violate(invariant, what)

    def _on_exception(self, _loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self.violate("no surprise", f"{context['message']}: {error!r}")
            self.failure = error


class SimulatedClock:
    """:class:`forge_core.ports.Clock` of one process."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._rng = world.rng(f"{name}/clock")

    def now_ms(self) -> int:
        """Counts suspend."""
        return self._world.now_ms

    def utc(self) -> str:
        """As the host's wall clock stands, right or wrong."""
        return self._world.utc()

    def unix_seconds(self) -> int:
        """Likewise, for commit dates."""
        return int(EPOCH.timestamp() + self._world.now_s + self._world.wall_offset_s)

    async def sleep_until_ms(self, deadline_ms: int) -> None:
        """As the edge does it, without its ticks: loop timers count suspend here."""
        while (remaining_ms := deadline_ms - self.now_ms()) > 0:
            await anyio.sleep(remaining_ms / 1_000)
        await anyio.lowlevel.checkpoint()

    def jitter(self) -> float:
        """Uniform in [0, 1)."""
        return self._rng.random()

    def new_id(self) -> str:
        """128 bits of the seed."""
        return f"{self._rng.getrandbits(128):032x}"
