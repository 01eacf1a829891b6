"""From queued sessions to offers (B-04, B-96)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, RowMapping

from forge_core.placement import Candidate, Placement, Refusal, Wanted, place
from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.codes import FailureCode, RunnerState
from forge_core.wire.from_hub import HostFallback
from forge_core.wire.shapes import Capabilities, DiskState
from forge_hub.attempt_input import Addressee, AttemptInput
from forge_hub.dispatch.board import Board
from forge_hub.dispatch.offers import PendingOffer
from forge_hub.sandbox_policy import usable_fallback
from forge_hub.states import SessionState
from forge_hub.store import dispatches, runners, sessions

MAX_SESSIONS_PER_PASS: Final = 500


@dataclass(frozen=True, slots=True)
class _Known:
    """A runner's row, read once for a pass."""

    row: RowMapping
    capabilities: Capabilities
    repositories: frozenset[str]


async def place_queued(board: Board) -> None:
    """Offer each queued session to a runner, the longest waiting first, or keep why not."""
    waiting, known = await board.database.read(_waiting)
    for session in waiting:
        given = AttemptInput.kept(session)
        if given is None:
            await _end_unusable(board, session["session_id"])
            continue
        fallback = _fallback(session, given, board.clock.utc())
        wanted = given.wanted(session["pinned_runner_id"], fallback)
        placement = place(wanted, _candidates(board, known, session["attempt_id"]))
        if placement.runner_id is None:
            await _keep_refusals(board, session, placement.refusals)
        else:
            await _offer(board, session, wanted, given, placement)


async def _end_unusable(board: Board, session_id: str) -> None:
    """No runner could be given what the session was given."""
    now, code = board.clock.utc(), FailureCode.INTERNAL_ERROR
    await board.database.write(
        lambda connection: sessions.end(
            connection, session_id, SessionState.FAILED, failure_code=code, now=now
        )
    )
    board.changed(session_id)


def _fallback(session: RowMapping, given: AttemptInput, now: str) -> HostFallback | None:
    saved = session["host_fallback"]
    if saved is None:
        return None
    return usable_fallback(HostFallback.model_validate(saved), given.policy, now)


def _waiting(connection: Connection) -> tuple[Sequence[RowMapping], Sequence[_Known]]:
    """The queued sessions, and the runners if there are any."""
    waiting = sessions.queued(connection, MAX_SESSIONS_PER_PASS)
    return waiting, [_read(row) for row in runners.all_of_them(connection)] if waiting else ()


def _read(row: RowMapping) -> _Known:
    return _Known(
        row, Capabilities.model_validate(row["capabilities"]), frozenset(row["repositories"])
    )


def _candidates(board: Board, known: Iterable[_Known], attempt_id: str) -> Iterable[Candidate]:
    now_ms = board.clock.now_ms()
    for runner in known:
        row = runner.row
        runner_id = row["runner_id"]
        live = board.connections.get(runner_id, row["instance_id"])
        yield Candidate(
            runner_id=runner_id,
            trust_domain_id=row["trust_domain_id"],
            connected=live is not None,
            ready=live is not None and live.ready,
            state=RunnerState(row["state"]),
            settings=runners.settings_of(row),
            capabilities=runner.capabilities,
            repositories=runner.repositories,
            used=ResourceVector(**row["used"]),
            outstanding=board.offers.outstanding(runner_id),
            capacity=ResourceCapacity(**row["capacity"]),
            disk_latched=row["disk"] is not None and DiskState.model_validate(row["disk"]).latched,
            declined=board.offers.declined(attempt_id, runner_id, now_ms),
        )


async def _keep_refusals(board: Board, session: RowMapping, refusals: Sequence[Refusal]) -> None:
    if sessions.refusals_as_json(refusals) != session["refusals"]:
        session_id = session["session_id"]
        await board.database.write(
            lambda connection: sessions.set_refusals(connection, session_id, refusals)
        )


async def _offer(
    board: Board, session: RowMapping, wanted: Wanted, given: AttemptInput, placement: Placement
) -> None:
    runner_id, refusals = placement.runner_id, placement.refusals
    assert runner_id is not None
    live = board.connections.get(runner_id)
    if live is None:
        return
    to = Addressee(
        session_id=session["session_id"],
        attempt_id=session["attempt_id"],
        fence=session["fence"] + 1,
        offer_id=board.clock.new_id(),
        runner_id=runner_id,
        instance_id=live.instance_id,
    )
    now = board.clock.utc()
    if not await board.database.write(
        lambda connection: _keep_offer(connection, to, refusals, now)
    ):
        return
    ttl_ms = board.timing.offer_ttl_ms
    offer = given.offer(to, expires_in_ms=ttl_ms, host_fallback=wanted.host_fallback)
    expires_at_ms = board.clock.now_ms() + ttl_ms
    board.offers.add(PendingOffer(to, offer, expires_at_ms))
    board.connections.send(to.runner_id, to.instance_id, "Offer", offer)
    board.changed(to.session_id)


def _keep_offer(
    connection: Connection, to: Addressee, refusals: Sequence[Refusal], now: str
) -> bool:
    if not sessions.move(
        connection, to.session_id, from_=SessionState.QUEUED, to=SessionState.OFFERED
    ):
        return False
    offered = dispatches.offer(connection, to, now=now)
    assert offered, "a queued session has no dispatch that could raise the fence"
    sessions.set_refusals(connection, to.session_id, refusals)
    return True
