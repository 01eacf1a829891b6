"""What is done before the first connection (lifecycle.md, Start-up and reaping; B-80, B-82).

Nothing of an earlier instance is adopted: every dispatch in a ledger is ended, its resources
are removed, and what could not be removed keeps its capacity before any is advertised.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import structlog

from forge_bridge.attempt_run import AttemptRun
from forge_bridge.flows.reap import DISPATCHES_AT_ONCE, Reaped, Reaper
from forge_bridge.flows.teardown import tear_down
from forge_bridge.groups import for_each
from forge_bridge.runner import Runner
from forge_core.attempt import Phase
from forge_core.attempt_events import EndRequested, StagesEnded
from forge_core.backoff import Backoff
from forge_core.errors import RefusedError
from forge_core.ledger import LedgerContents
from forge_core.ports import Ledger
from forge_core.ready import Record, RecordKind, messages_of
from forge_core.recovery import restore
from forge_core.wire.codes import CleanupTrigger, FailureCode
from forge_core.wire.shapes import RemovedResource

logger = structlog.get_logger(__name__)


class StoredLedger(Protocol):
    """A ledger that an earlier life of the bridge left."""

    @property
    def attempt_id(self) -> str: ...
    @property
    def fence(self) -> int: ...
    @property
    def contents(self) -> LedgerContents: ...


class OldLedgers(Protocol):
    """What is under ``attempts/`` at start."""

    async def read_all(self) -> Sequence[StoredLedger]: ...
    async def reopen(self, attempt_id: str, fence: int) -> Ledger: ...
    async def remove(self, attempt_id: str, fence: int) -> None: ...
    async def mark_suspect(self, attempt_id: str, fence: int) -> None: ...


async def recover(runner: Runner, reaper: Reaper, ledgers: OldLedgers) -> None:
    """End every old dispatch, remove all that is left of old instances, and report both.

    Returns only once engine and host have listed what there is: before that, no capacity is ours
    to advertise.

    :raises DiskUnusable: the state root cannot be written; the bridge must not start.
    """
    await end_old_dispatches(runner, ledgers, CleanupTrigger.STARTUP)
    clock, backoff = runner.clock, Backoff()
    while (await reaper.remove_orphans(CleanupTrigger.STARTUP)).unlisted is not None:
        backoff = backoff.failed()
        await clock.sleep_until_ms(clock.now_ms() + backoff.delay_ms(clock.jitter()))


async def end_old_dispatches(
    runner: Runner, ledgers: OldLedgers, trigger: CleanupTrigger
) -> tuple[Reaped, ...]:
    """End what the ledgers of earlier instances tell of; what resists is held as degraded.

    :raises DiskUnusable: the state root cannot be written.
    """

    async def end(old: StoredLedger) -> list[Reaped]:
        run = await _take_up(runner, ledgers, old)
        if run is None:
            return []
        removed = await _finish(run, trigger)
        return [Reaped(run.state.owner, resource) for resource in removed]

    ended = await for_each(end, await ledgers.read_all(), at_once=DISPATCHES_AT_ONCE)
    return tuple(chain.from_iterable(ended))


async def _take_up(runner: Runner, ledgers: OldLedgers, old: StoredLedger) -> AttemptRun | None:
    """Hold the capacity of an old dispatch; None when its ledger tells of nothing."""
    key = (old.attempt_id, old.fence)
    if _is_blank(old.contents):
        await ledgers.remove(*key)
        return None
    try:
        records = believed(old.contents)
        attempt, resources = restore(records)
        ledger = await ledgers.reopen(*key)
    except RefusedError as error:
        # Its dispatch counts as unknown: a pass removes whatever carries its labels.
        logger.error("a ledger is suspect and was set aside", dispatch=key, why=str(error))
        await ledgers.mark_suspect(*key)
        return None
    if resources is None:
        runner.admission.hold_orphaned(attempt.key, runner.capacity)
    else:
        runner.admission.hold_degraded(attempt.key, resources, attempt.runtime)
    run = AttemptRun(runner, attempt, ledger)
    run.records.extend(records)
    runner.attempts[attempt.key] = run
    return run


def _is_blank(contents: LedgerContents) -> bool:
    """Its reservation was never durable, so nobody was told of it and nothing was done for it."""
    return contents.suspect is None and not contents.records


def believed(contents: LedgerContents) -> tuple[Record, ...]:
    """The records of a ledger; raises RefusedError ``ledger_suspect``."""
    if contents.suspect is not None:
        raise RefusedError(contents.suspect, code="ledger_suspect")
    try:
        return tuple(Record(RecordKind(line.kind), line.data) for line in contents.records)
    except ValueError as error:
        raise RefusedError(f"a record of unknown kind: {error}", code="ledger_suspect") from error


async def _finish(run: AttemptRun, trigger: CleanupTrigger) -> tuple[RemovedResource, ...]:
    for message in messages_of(run.records):
        await run.put(message)
    detail = "the bridge stopped while it ran"
    if run.state.phase is Phase.RESERVED:
        await run.feed(EndRequested(FailureCode.BRIDGE_STOPPED, detail))
        return ()
    if run.state.phase is Phase.ENDED:
        await run.retire()
        return ()
    if run.state.phase is Phase.RUNNING:
        await run.feed(StagesEnded(FailureCode.BRIDGE_STOPPED, detail))
    return await tear_down(run, trigger)
