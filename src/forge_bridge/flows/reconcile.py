"""After each connect: what does the hub believe runs here? (B-81; protocol.md, Snapshot)"""

from __future__ import annotations

from collections.abc import MutableMapping

import structlog

from forge_bridge.flows.start import answer_without_run
from forge_bridge.hub_link import call
from forge_bridge.runner import Runner
from forge_core.admission import Key
from forge_core.ports import BridgeConnection
from forge_core.wire.codes import FailureCode, ReservationState, SnapshotState
from forge_core.wire.from_bridge import ReadAttemptSnapshot, SnapshotAck
from forge_core.wire.shapes import MAX_LIST, SnapshotAttempt

logger = structlog.get_logger(__name__)

MAX_PARTS = 1_000
MISSES_TO_END = 2
MAX_ANSWERED = 1_024
"""As many as a runner can have slots; the next snapshot lists the rest again."""


async def reconcile(
    runner: Runner, connection: BridgeConnection, missed: MutableMapping[Key, int]
) -> None:
    """Read the snapshot and settle every difference.

    A miss counts only for what was held before the snapshot was asked for; two in a row end
    it; a higher fence in the snapshot ends it at once.  What the hub lists and nobody here
    knows gets its result: it ran in an earlier life of the bridge, or never.
    """
    held = tuple(key for key in runner.admission.reservations if key[1] > 0)
    snapshot = await read_snapshot(runner, connection)
    if snapshot is None:
        return
    listed = {(entry.attempt_id, entry.fence) for entry in snapshot}
    highest: dict[str, int] = {}
    for entry in snapshot:
        highest[entry.attempt_id] = max(entry.fence, highest.get(entry.attempt_id, 0))
    for key in held:
        if highest.get(key[0], 0) > key[1]:
            await _end(runner, key, FailureCode.SUPERSEDED, "a higher fence runs elsewhere")
        elif key in listed:
            missed.pop(key, None)
        else:
            await _count_miss(runner, key, missed)
    for key in set(missed) - set(held):
        del missed[key]
    unknown = [entry for entry in snapshot if _is_unknown(runner, entry)]
    if len(unknown) > MAX_ANSWERED:
        logger.warning("the snapshot lists more unknown dispatches than are answered at once")
    for entry in unknown[:MAX_ANSWERED]:
        await answer_without_run(
            runner,
            entry.attempt_id,
            entry.fence,
            FailureCode.BRIDGE_STOPPED,
            "this instance of the bridge does not know the dispatch",
        )


def _is_unknown(runner: Runner, entry: SnapshotAttempt) -> bool:
    """Never held here, and no result of it waits in the outbox.

    What this instance has held has ended with a result, which nothing may contradict.  Of what
    still resists, nothing is said: its cleanup is not complete.  An entry that is only offered
    is not settled here: its offer may be on its way to us.
    """
    key = (entry.attempt_id, entry.fence)
    return (
        entry.state is not SnapshotState.OFFERED
        and key not in runner.admission.reservations
        and not runner.admission.was_held(key)
        and not runner.outbox.holds_result(*key)
    )


async def read_snapshot(
    runner: Runner, connection: BridgeConnection
) -> tuple[SnapshotAttempt, ...] | None:
    """All parts of the snapshot; None when the hub does not give it, or gives far too much."""
    entries: list[SnapshotAttempt] = []
    part = parts = 1
    while part <= parts:
        request = ReadAttemptSnapshot(
            runner_id=runner.identity.runner_id,
            runner_instance_id=runner.identity.runner_instance_id,
            part=part,
        )
        answer = await call(connection, request, SnapshotAck)
        if not answer.accepted:
            logger.warning("the hub gave no attempt snapshot", reason=answer.reason)
            return None
        entries += answer.attempts
        if len(entries) > MAX_LIST:
            logger.warning("the attempt snapshot is too long to be believed", count=len(entries))
            return None
        parts = min(answer.parts, MAX_PARTS)
        part += 1
    return tuple(entries)


async def _count_miss(runner: Runner, key: Key, missed: MutableMapping[Key, int]) -> None:
    reservation = runner.admission.reservations.get(key)
    if reservation is None or reservation.state in (
        ReservationState.RELEASING,
        ReservationState.DEGRADED,
    ):
        return
    missed[key] = missed.get(key, 0) + 1
    if missed[key] >= MISSES_TO_END:
        del missed[key]
        await _end(runner, key, FailureCode.CANCELLED, "the hub does not list it any more")


async def _end(runner: Runner, key: Key, failure: FailureCode, detail: str) -> None:
    run = runner.attempts.get(key)
    if run is not None:
        await run.end(failure, detail)
