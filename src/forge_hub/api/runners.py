"""Runners: look, drain, resume, reap, host fallback (B-53, B-87, B-88)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Body
from sqlalchemy import Connection, RowMapping

from forge_core.errors import RefusedError
from forge_core.wire.codes import ReapScope
from forge_core.wire.from_hub import Reap, RunnerSettingsChanged
from forge_hub.api.context import AuthorizedBoard
from forge_hub.api.models import HostFallbackRequest, ReapRequest, ReapView, RunnerView
from forge_hub.api.views import runner_view
from forge_hub.connections import LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.store import actions, dispatches, runners

MAX_REAPS = 20
router = APIRouter(prefix="/api/v1/runners", tags=["runners"])


@router.get("")
async def list_runners(board: AuthorizedBoard) -> list[RunnerView]:
    """Every runner that ever registered."""
    rows = await board.database.read(runners.all_of_them)
    return [runner_view(row) for row in rows]


@router.get("/{runner_id}")
async def read_runner(board: AuthorizedBoard, runner_id: str) -> RunnerView:
    """One runner as it described itself last."""
    return runner_view(await board.database.read(lambda connection: _find(connection, runner_id)))


@router.post("/{runner_id}/drain")
async def drain_runner(board: AuthorizedBoard, runner_id: str) -> RunnerView:
    """No new attempts; what runs goes on (B-87)."""
    return await _change(
        board, runner_id, lambda connection: runners.set_draining(connection, runner_id, True)
    )


@router.post("/{runner_id}/resume")
async def resume_runner(board: AuthorizedBoard, runner_id: str) -> RunnerView:
    """Take new attempts again."""
    return await _change(
        board, runner_id, lambda connection: runners.set_draining(connection, runner_id, False)
    )


@router.put("/{runner_id}/host-fallback")
async def set_host_fallback(
    board: AuthorizedBoard, runner_id: str, request: HostFallbackRequest
) -> RunnerView:
    """Allow or forbid host fallback on this runner (B-53)."""
    return await _change(
        board,
        runner_id,
        lambda connection: runners.set_host_fallback(connection, runner_id, request.enabled),
    )


@router.post("/{runner_id}/reap", status_code=202)
async def reap_runner(
    board: AuthorizedBoard,
    runner_id: str,
    request: Annotated[ReapRequest, Body()] = ReapRequest(),  # noqa: B008 - frozen
) -> ReapView:
    """Ask the connected instance for a cleanup pass; its outcome is listed under `reaps`."""
    request_id, now = board.clock.new_id(), board.clock.utc()
    live = board.connections.get(runner_id)

    def keep(connection: Connection) -> tuple[Reap, RowMapping]:
        _find(connection, runner_id)
        if live is None:
            raise RefusedError(
                f"cannot reach runner {runner_id}: it is not connected", code="runner_offline"
            )
        if request.scope is ReapScope.ATTEMPT:
            _require_dispatched_here(connection, runner_id, request)
        reap = _reap(request_id, live, request)
        actions.add_reap(connection, reap, now=now)
        row = actions.find_reap(connection, request_id)
        assert row is not None
        return reap, row

    reap, row = await board.database.write(keep)
    board.connections.send(runner_id, reap.runner_instance_id, "Reap", reap)
    return _reap_view(row)


@router.get("/{runner_id}/reaps")
async def list_reaps(board: AuthorizedBoard, runner_id: str) -> list[ReapView]:
    """The newest reap requests with their outcomes, newest first."""

    def read(connection: Connection) -> Sequence[RowMapping]:
        _find(connection, runner_id)
        return actions.reaps_of(connection, runner_id, MAX_REAPS)

    return [_reap_view(row) for row in await board.database.read(read)]


async def _change(board: Board, runner_id: str, change: Callable[[Connection], None]) -> RunnerView:
    """Change a setting and tell the runner; one that is away is told with its next heartbeat."""

    def keep(connection: Connection) -> RowMapping:
        change(connection)
        return _find(connection, runner_id)

    row = await board.database.write(keep)
    message = RunnerSettingsChanged(settings=runners.settings_of(row))
    board.connections.send(row["runner_id"], row["instance_id"], "RunnerSettings", message)
    board.alarm.ring()
    return runner_view(row)


def _reap(request_id: str, live: LiveRunner, request: ReapRequest) -> Reap:
    return Reap(
        request_id=request_id,
        runner_id=live.runner_id,
        runner_instance_id=live.instance_id,
        scope=request.scope,
        attempt_id=request.attempt_id,
        fence=request.fence,
    )


def _require_dispatched_here(connection: Connection, runner_id: str, request: ReapRequest) -> None:
    if request.attempt_id is None or request.fence is None:
        raise RefusedError(
            "cannot reap an attempt: attemptId and fence are needed",
            code="invalid_request",
            field="attemptId" if request.attempt_id is None else "fence",
        )
    row = dispatches.find(connection, request.attempt_id, request.fence)
    if row is None or row["runner_id"] != runner_id:
        raise RefusedError(
            f"cannot reap attempt {request.attempt_id} fence {request.fence}: it was not"
            f" dispatched to runner {runner_id}",
            code="unknown_dispatch",
        )


def _reap_view(row: RowMapping) -> ReapView:
    return ReapView.model_validate({**row, "runner_instance_id": row["instance_id"]})


def _find(connection: Connection, runner_id: str) -> RowMapping:
    row = runners.find(connection, runner_id)
    if row is None:
        raise RefusedError(
            f"cannot find runner {runner_id}: it never registered", code="unknown_runner"
        )
    return row
