"""Watches the engine: while it is away nothing is admitted, and admission comes back by itself.

What already runs is not ended here: a lost stream ends its attempt (``engine_lost``), or it goes
on.  An engine that comes back is looked at again before anything is admitted, because it may have
been upgraded or set up otherwise; another engine in its place is refused (sandbox.md, One engine
door).

Parts that could not be tried (``parts_unseen``) are looked at again as well; what was seen holds
meanwhile, and so do the attempts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import anyio
import structlog

from forge_bridge.doctor.checks import Preflight
from forge_bridge.flows.reap import Reaper
from forge_bridge.runner import Runner
from forge_core.backoff import Backoff
from forge_core.errors import EngineTimedOut, ForgeError
from forge_core.ports import Engine
from forge_core.wire.codes import CleanupTrigger

logger = structlog.get_logger(__name__)

LOOK_EVERY_MS: Final = 5_000
ANSWER_MS: Final = 5_000
"""A frozen daemon accepts connections and says nothing."""

SLOW_LOOKS: Final = 2
"""So many in a row and it is away: a busy one that is slow once needs no new preflight, which
would only be more to do for it."""

LookAgain = Callable[[], Awaitable[Preflight]]
"""Runs the preflight anew; raises ForgeError where it cannot be run."""


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at the engine: its id, or why it could not be seen.

    :ivar is_slow: it may be there, and did not answer in time.
    """

    engine_id: str | None
    why_not: str = ""
    is_slow: bool = False


async def watch(
    runner: Runner,
    engine: Engine,
    engine_id: str,
    reaper: Reaper,
    look_again: LookAgain,
) -> None:
    """For as long as the bridge runs.

    A preflight makes containers and networks: one in vain is tried again after longer and longer
    pauses.

    :param engine_id: the engine that this bridge has locked and looked at.
    """
    clock, in_vain, slow_looks, not_before_ms = runner.clock, Backoff(), 0, 0
    while True:
        await clock.sleep_until_ms(clock.now_ms() + LOOK_EVERY_MS)
        seen = await look(engine)
        slow_looks = slow_looks + 1 if seen.is_slow else 0
        if seen.engine_id == engine_id:
            is_due = clock.now_ms() >= not_before_ms
            if is_due and (runner.engine_away is not None or runner.parts_unseen):
                is_whole = await _look_anew(runner, reaper, look_again)
                in_vain = Backoff() if is_whole else in_vain.failed()
                pause_ms = 0 if is_whole else in_vain.delay_ms(clock.jitter())
                not_before_ms = clock.now_ms() + pause_ms
        elif seen.engine_id is not None:
            _stay_away(
                runner,
                f"engine {seen.engine_id} stands in the place of engine {engine_id}: bring that "
                "one back, or restart the bridge to serve this one",
            )
        elif not seen.is_slow or slow_looks >= SLOW_LOOKS:
            _stay_away(runner, seen.why_not)


async def look(engine: Engine) -> Sight:
    """Ask the engine who it is, for a bounded time."""
    try:
        with anyio.fail_after(ANSWER_MS / 1000):
            return Sight((await engine.facts()).id)
    except ForgeError as error:
        return Sight(None, str(error), is_slow=isinstance(error, EngineTimedOut))
    except TimeoutError:
        return Sight(None, f"the engine did not answer within {ANSWER_MS} ms", is_slow=True)


def _stay_away(runner: Runner, why: str) -> None:
    if runner.engine_away is None:
        logger.error("the Docker engine is away; nothing is admitted", why=why)
    runner.engine_away = why
    runner.notify()


async def _look_anew(runner: Runner, reaper: Reaper, look_again: LookAgain) -> bool:
    """Whether everything was seen."""
    try:
        # Any other time a pass takes a probe of this instance for something that was left.
        found = await reaper.between_passes(look_again)
    except ForgeError as error:
        _in_vain(runner, str(error))
        return False
    if found.unseen is not None:
        _in_vain(runner, found.unseen)
        return False
    if runner.engine_away is None and found.parts_unseen.keys() - runner.parts_unseen.keys():
        # What was seen before is no worse for this look, so that this one adds nothing.
        return False
    await _take(runner, found)
    await reaper.run_pass(CleanupTrigger.PERIODIC)
    return not found.parts_unseen


def _in_vain(runner: Runner, why: str) -> None:
    """Containers can be made until it is seen that they cannot."""
    if runner.engine_away is not None:
        runner.engine_away = f"it is back and cannot be looked at: {why}"
        runner.notify()


async def _take(runner: Runner, found: Preflight) -> None:
    if runner.engine_away is not None:
        logger.warning("the Docker engine is back", was_away_because=runner.engine_away)
    is_changed, runner.capabilities = found.capabilities != runner.capabilities, found.capabilities
    runner.engine_away = None
    tell_unseen(runner, found.parts_unseen)
    runner.notify()
    if is_changed:
        # What is advertised is what admission looks at, and only a registration tells it.
        await runner.hub.drop()


def tell_unseen(runner: Runner, parts: Mapping[str, str]) -> None:
    """Keep what could not be tried, and say in the log which parts these are when that changes."""
    if parts.keys() - runner.parts_unseen.keys():
        logger.warning("not offered until another look sees it", because=dict(parts))
    elif runner.parts_unseen.keys() - parts.keys():
        seen = sorted(runner.parts_unseen.keys() - parts.keys())
        logger.info("seen by another look", parts=seen, still_unseen=dict(parts))
    runner.parts_unseen = parts
