"""Watches the engine: while it is away nothing is admitted, and admission comes back by itself.

What already runs is not ended here: a lost stream ends its attempt (``engine_lost``), or it goes
on.  An engine that comes back is looked at again before anything is admitted, because it may have
been upgraded or set up otherwise; another engine in its place is refused (sandbox.md, One engine
door).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import anyio
import structlog

from forge_bridge.flows.reap import Reaper
from forge_bridge.runner import Runner
from forge_core.backoff import Backoff
from forge_core.errors import ForgeError
from forge_core.ports import Engine
from forge_core.wire.codes import CleanupTrigger
from forge_core.wire.shapes import Capabilities

logger = structlog.get_logger(__name__)

LOOK_EVERY_MS: Final = 5_000
ANSWER_MS: Final = 5_000
"""A frozen daemon accepts connections and says nothing."""

LookAgain = Callable[[], Awaitable[Capabilities]]
"""Runs the preflight anew; raises ForgeError where it cannot be run."""


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at the engine: its id, or why it could not be seen."""

    engine_id: str | None
    why_not: str = ""


async def watch(
    runner: Runner,
    engine: Engine,
    engine_id: str,
    reaper: Reaper,
    look_again: LookAgain,
) -> None:
    """For as long as the bridge runs.

    A preflight makes containers and networks, and no pass runs meanwhile: one in vain is tried
    again after longer and longer pauses.

    :param engine_id: the engine that this bridge has locked and looked at.
    """
    clock, in_vain = runner.clock, Backoff()
    while True:
        pause_ms = in_vain.delay_ms(clock.jitter()) if in_vain.failures else 0
        await clock.sleep_until_ms(clock.now_ms() + LOOK_EVERY_MS + pause_ms)
        seen = await look(engine)
        if seen.engine_id == engine_id:
            if runner.engine_away is not None:
                is_back = await _come_back(runner, reaper, look_again)
                in_vain = Backoff() if is_back else in_vain.failed()
        elif seen.engine_id is None:
            _stay_away(runner, seen.why_not)
        else:
            _stay_away(
                runner,
                f"engine {seen.engine_id} stands in the place of engine {engine_id}: bring that "
                "one back, or restart the bridge to serve this one",
            )


async def look(engine: Engine) -> Sight:
    """Ask the engine who it is, for a bounded time."""
    try:
        with anyio.fail_after(ANSWER_MS / 1000):
            return Sight((await engine.facts()).id)
    except ForgeError as error:
        return Sight(None, str(error))
    except TimeoutError:
        return Sight(None, f"the engine did not answer within {ANSWER_MS} ms")


def _stay_away(runner: Runner, why: str) -> None:
    if runner.engine_away is None:
        logger.error("the Docker engine is away; nothing is admitted", why=why)
    runner.engine_away = why
    runner.notify()


async def _come_back(runner: Runner, reaper: Reaper, look_again: LookAgain) -> bool:
    """Whether it could be looked at."""
    try:
        # A pass takes a probe of this instance for something that was left.
        found = await reaper.between_passes(look_again)
    except ForgeError as error:
        runner.engine_away = f"it is back and cannot be looked at: {error}"
        return False
    logger.warning("the Docker engine is back", was_away_because=runner.engine_away)
    is_changed, runner.capabilities = found != runner.capabilities, found
    runner.engine_away = None
    runner.notify()
    if is_changed:
        # What is advertised is what admission looks at, and only a registration tells it.
        await runner.hub.drop()
    await reaper.run_pass(CleanupTrigger.PERIODIC)
    return True
