"""Who is there: registration, heartbeats, the snapshot, and the end of a connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, RowMapping

from forge_core.wire.base import PROTOCOL_VERSION
from forge_core.wire.codes import RunnerState
from forge_core.wire.from_bridge import (
    Ack,
    Heartbeat,
    HeartbeatAck,
    ReadAttemptSnapshot,
    RegisterAck,
    RegisterRunner,
    SnapshotAck,
)
from forge_hub.attempt_input import Addressee
from forge_hub.connections import Channel, LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.dispatch.decisions import tell_again
from forge_hub.dispatch.endings import void_offers
from forge_hub.principals import RunnerPrincipal
from forge_hub.reasons import Reason
from forge_hub.store import dispatches, runners

SNAPSHOT_PART_ATTEMPTS: Final = 1_000


async def register(
    board: Board,
    channel: Channel,
    principal: RunnerPrincipal,
    message: RegisterRunner,
    *,
    heartbeat_interval_ms: int,
) -> RegisterAck:
    """Make this the runner's current connection."""
    refusal = _refusal(principal, message)
    if refusal is not None:
        return RegisterAck(accepted=False, reason=refusal[0], detail=refusal[1])
    now = board.clock.utc()
    row, voided = await board.database.write(lambda connection: _keep(connection, message, now))
    runner = board.connections.establish(
        channel, message.runner_id, message.runner_instance_id, board.clock.now_ms()
    )
    for lease in board.leases.of_instance(runner.runner_id, runner.instance_id):
        runner.watch(lease.id)
    board.offers.forgive(runner.runner_id)
    for to in voided:
        board.forget((to.attempt_id, to.fence))
        board.changed(to.session_id)
    board.alarm.ring()
    return RegisterAck(
        accepted=True,
        heartbeat_interval_ms=heartbeat_interval_ms,
        settings=runners.settings_of(row),
        server_time=board.clock.utc(),
    )


def _keep(
    connection: Connection, message: RegisterRunner, now: str
) -> tuple[RowMapping, Sequence[Addressee]]:
    """The runner's row, and the offers to its earlier instances, which nobody can answer now."""
    runners.register(connection, message, now=now)
    voided = void_offers(connection, message.runner_id, message.runner_instance_id, now=now)
    return runners.get(connection, message.runner_id), voided


def _refusal(principal: RunnerPrincipal, message: RegisterRunner) -> tuple[Reason, str] | None:
    if message.protocol_version != PROTOCOL_VERSION:
        return Reason.UNSUPPORTED_PROTOCOL, f"this hub speaks version {PROTOCOL_VERSION}"
    if principal.runner_id not in {None, message.runner_id}:
        return Reason.RUNNER_DENIED, "the token belongs to another runner"
    if principal.trust_domain_id not in {None, message.trust_domain_id}:
        return Reason.TRUST_DOMAIN_MISMATCH, "the token belongs to another trust domain"
    return None


async def heartbeat(board: Board, runner: LiveRunner, message: Heartbeat) -> HeartbeatAck:
    """Keep what the runner holds; the first one on a connection makes it ready for offers."""
    refusal = other_instance(runner, message.runner_id, message.runner_instance_id)
    if refusal is not None:
        return HeartbeatAck(accepted=False, reason=refusal.reason, detail=refusal.detail)
    runner.hear(message, board.clock.now_ms())  # first: renewals do not depend on the database
    now = board.clock.utc()

    def keep(connection: Connection) -> RowMapping:
        runners.heartbeat(connection, message, now=now)
        return runners.get(connection, runner.runner_id)

    row = await board.database.write(keep)
    has_come_back, runner.ready = not runner.ready, True
    if has_come_back and message.state is not RunnerState.STOPPING:
        tell_again(board, runner, message)
    board.alarm.ring()
    return HeartbeatAck(
        accepted=True, settings=runners.settings_of(row), server_time=board.clock.utc()
    )


async def read_snapshot(
    board: Board, runner: LiveRunner, message: ReadAttemptSnapshot
) -> SnapshotAck:
    """One part of what this instance should be holding (B-81).

    Part 1 takes the snapshot, the others read on in it: parts of different moments could miss
    an attempt that was on neither.
    """
    refusal = other_instance(runner, message.runner_id, message.runner_instance_id)
    if refusal is not None:
        return SnapshotAck(accepted=False, reason=refusal.reason, detail=refusal.detail)
    if message.part == 1:
        taken_at = board.clock.utc()
        attempts = await board.database.read(
            lambda connection: dispatches.of_instance(
                connection, runner.runner_id, runner.instance_id
            )
        )
        runner.snapshot = (taken_at, attempts)
    if runner.snapshot is None:
        return SnapshotAck(accepted=False, reason=Reason.MALFORMED, detail="part 1 was not read")
    taken_at, attempts = runner.snapshot
    parts = max(1, -(-len(attempts) // SNAPSHOT_PART_ATTEMPTS))
    if message.part > parts:
        return SnapshotAck(
            accepted=False, reason=Reason.MALFORMED, detail=f"there are {parts} parts"
        )
    first = (message.part - 1) * SNAPSHOT_PART_ATTEMPTS
    chosen = attempts[first : first + SNAPSHOT_PART_ATTEMPTS]
    return SnapshotAck(accepted=True, taken_at=taken_at, attempts=chosen, parts=parts)


def other_instance(runner: LiveRunner, runner_id: str, instance_id: str) -> Ack | None:
    """The refusal of a message that names another runner or instance than its connection's."""
    if (runner_id, instance_id) == (runner.runner_id, runner.instance_id):
        return None
    return Ack(
        accepted=False,
        reason=Reason.INSTANCE_MISMATCH,
        detail="it names another runner or instance than this connection registered",
    )


async def depart(board: Board, channel: Channel) -> None:
    """A connection ended; its runner is away unless a newer one is there."""
    runner = board.connections.release(channel)
    if runner is None:
        return
    await board.database.write(
        lambda connection: runners.set_connected(connection, runner.runner_id, False)
    )
    if board.connections.get(runner.runner_id) is not None:
        # A registration that came before this write was answered before it, too.
        await board.database.write(
            lambda connection: runners.set_connected(connection, runner.runner_id, True)
        )
    board.alarm.ring()
