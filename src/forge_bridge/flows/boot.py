"""What is done before the first connection (lifecycle.md, Start-up; B-80, B-82).

Nothing of an earlier instance is adopted: every dispatch in a ledger is ended, its resources
are removed, and what could not be removed keeps its capacity before any is advertised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import structlog

from forge_bridge.attempt_run import AttemptRun
from forge_bridge.flows.reap import Reaper
from forge_bridge.flows.teardown import tear_down
from forge_bridge.runner import Runner
from forge_core.attempt import Attempt, Phase
from forge_core.attempt_events import EndRequested, StagesEnded
from forge_core.errors import RefusedError
from forge_core.ledger import LedgerContents
from forge_core.ports import Engine, Ledger
from forge_core.ready import Record, RecordKind, messages_of
from forge_core.recovery import restore
from forge_core.wire.codes import CleanupTrigger, FailureCode

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
    async def mark_suspect(self, attempt_id: str, fence: int) -> None: ...


async def recover(runner: Runner, engine: Engine, reaper: Reaper, ledgers: OldLedgers) -> None:
    """End every old dispatch, remove its resources, and report both.

    :raises DiskUnusable: the state root cannot be written; the bridge must not start.
    """
    for old in await ledgers.read_all():
        key = (old.attempt_id, old.fence)
        try:
            records = _believed(old.contents)
            attempt, resources = restore(records)
            ledger = await ledgers.reopen(*key)
        except RefusedError as error:
            # Its dispatch counts as unknown: the pass below removes whatever carries its labels.
            logger.error("a ledger is suspect and was set aside", dispatch=key, why=str(error))
            await ledgers.mark_suspect(*key)
            continue
        runner.admission.hold_degraded(attempt.key, resources)
        run = AttemptRun(runner, attempt, ledger)
        run.records.extend(records)
        runner.attempts[attempt.key] = run
        await _finish(runner, run, engine)
    await reaper.run_pass(CleanupTrigger.STARTUP)


def _believed(contents: LedgerContents) -> tuple[Record, ...]:
    if contents.suspect is not None:
        raise RefusedError(contents.suspect, code="ledger_suspect")
    try:
        return tuple(Record(RecordKind(line.kind), line.data) for line in contents.records)
    except ValueError as error:
        raise RefusedError(f"a record of unknown kind: {error}", code="ledger_suspect") from error


async def _finish(runner: Runner, run: AttemptRun, engine: Engine) -> None:
    for message in messages_of(run.records):
        await run.put(message)
    attempt: Attempt = run.state
    detail = "the bridge stopped while it ran"
    if attempt.phase is Phase.RESERVED:
        await run.feed(EndRequested(FailureCode.BRIDGE_STOPPED, detail))
        return
    if attempt.phase is Phase.ENDED:
        await run.retire()
        return
    if attempt.phase is Phase.RUNNING:
        await run.feed(StagesEnded(FailureCode.BRIDGE_STOPPED, detail))
    await tear_down(run, engine, CleanupTrigger.STARTUP)
