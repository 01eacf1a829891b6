"""The loop that acts when time passes or something changed (B-04, B-70, B-96)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import anyio
import structlog
from sqlalchemy import Connection, RowMapping

from forge_core import clock_watch
from forge_core.errors import RetryableError
from forge_hub.attempt_input import MAX_LEASE_TTL_MS, Addressee, AttemptInput
from forge_hub.dispatch.board import Board
from forge_hub.dispatch.endings import expire_offers, give_up_silent, withdraw
from forge_hub.dispatch.leases import Lease
from forge_hub.dispatch.offers import PendingOffer
from forge_hub.dispatch.placing import place_queued
from forge_hub.states import DispatchState
from forge_hub.store import dispatches, runners

_RETRY_MS: Final = 1_000
_log = structlog.get_logger(__name__)


async def restore(board: Board) -> None:
    """Take over what an earlier life of the hub left (no runner is connected yet).

    Deadlines count anew from now, which is later than whatever was sent before: nothing is
    dispatched twice because the hub restarted or a clock was wrong.
    """
    now_ms = board.clock.now_ms()
    for row in await board.database.write(_left_behind):
        to = Addressee.of(row)
        given = AttemptInput.kept(row)
        if row["state"] == DispatchState.OFFERED:
            if given is None:
                await withdraw(board, to)
                continue
            offer = given.offer(to, expires_in_ms=board.timing.offer_ttl_ms)
            board.offers.add(PendingOffer(to, offer, now_ms + board.timing.offer_ttl_ms))
        else:
            board.leases.remember(
                Lease(
                    to=to,
                    ttl_ms=MAX_LEASE_TTL_MS if given is None else given.lease_ttl_ms,
                    sent_at_ms=now_ms,
                    key=None,
                    sequence=row["lease_sequence"],
                    cancelled=row["state"] == DispatchState.CANCELLING,
                )
            )


def _left_behind(connection: Connection) -> Sequence[RowMapping]:
    runners.set_connected(connection, None, False)
    return dispatches.live(connection)


async def run(board: Board) -> None:
    """Dispatch until cancelled; a database that is away for a while is waited for."""
    seen = clock_watch.read(board.clock, anyio.current_time())
    while True:
        seen = _tell_of_jumps(board, seen)
        try:
            await _pass(board)
            wake_at_ms = _next_deadline_ms(board)
        except RetryableError as error:
            _log.warning("dispatcher.waits", error=str(error), retry_ms=_RETRY_MS)
            wake_at_ms = board.clock.now_ms() + _RETRY_MS
        await _wait(board, wake_at_ms)


def _tell_of_jumps(board: Board, before: clock_watch.Reading) -> clock_watch.Reading:
    """Say in the log that the clocks jumped; returns the new reading."""
    seen = clock_watch.read(board.clock, anyio.current_time())
    jump = clock_watch.jump_between(before, seen)
    if jump is not None:
        _log.warning(
            "dispatcher.clocks_jumped",
            wall_clock_stepped_ms=jump.stepped_ms,
            host_suspended_ms=jump.suspended_ms,
        )
    return seen


async def _pass(board: Board) -> None:
    await renew_leases(board)
    await expire_offers(board)
    await give_up_silent(board)
    await place_queued(board)


async def renew_leases(board: Board) -> None:
    """Send the renewals that are due; renewing depends on memory alone, not on the database."""
    now_ms = board.clock.now_ms()
    sent: list[tuple[str, int, int]] = []
    for lease in board.leases:
        if lease.renew_at_ms <= now_ms and _may_renew(board, lease):
            update = lease.renewal(now_ms, board.clock.utc())
            board.connections.send(lease.to.runner_id, lease.to.instance_id, "LeaseUpdate", update)
            sent.append((*lease.id, lease.sequence))
    if sent:
        now = board.clock.utc()
        await board.database.write(
            lambda connection: dispatches.record_renewals(connection, sent, now=now)
        )


def _may_renew(board: Board, lease: Lease) -> bool:
    """While the runner heartbeats, still holds it, and nobody cancelled (hub.md, Leases)."""
    if lease.key is None or lease.cancelled:
        return False
    runner = board.connections.get(lease.to.runner_id, lease.to.instance_id)
    if runner is None or not runner.holds(lease.id):
        return False
    # A ttl shorter than the interval between heartbeats says nothing about the runner.
    patience_ms = max(lease.ttl_ms, 2 * board.timing.heartbeat_interval_ms)
    return board.clock.now_ms() - runner.heartbeat_at_ms < patience_ms


def _next_deadline_ms(board: Board) -> int | None:
    deadlines = []
    for lease in board.leases:
        deadlines.append(lease.silent_at_ms(board.timing.kill_grace_ms))
        if _may_renew(board, lease):
            deadlines.append(lease.renew_at_ms)
    offers_ms = board.offers.next_deadline_ms(board.clock.now_ms())
    if offers_ms is not None:
        deadlines.append(offers_ms)
    return min(deadlines, default=None)


async def _wait(board: Board, wake_at_ms: int | None) -> None:
    if wake_at_ms is None:
        await board.alarm.wait()
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_sleep, board, wake_at_ms, tasks.cancel_scope)
        await board.alarm.wait()
        tasks.cancel_scope.cancel()


async def _sleep(board: Board, wake_at_ms: int, scope: anyio.CancelScope) -> None:
    await board.clock.sleep_until_ms(wake_at_ms)
    scope.cancel()
