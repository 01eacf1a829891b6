"""Runners: look, drain, resume, reap, host fallback (B-53, B-87, B-88)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

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
    async with board.database.read() as connection:
        rows = await runners.all_of_them(connection)
    return [runner_view(row) for row in rows]


@router.get("/{runner_id}")
async def read_runner(board: AuthorizedBoard, runner_id: str) -> RunnerView:
    """One runner as it described itself last."""
    async with board.database.read() as connection:
        return runner_view(await _find(connection, runner_id))


@router.post("/{runner_id}/drain")
async def drain_runner(board: AuthorizedBoard, runner_id: str) -> RunnerView:
    """No new attempts; what runs goes on (B-87)."""
    async with board.database.write() as connection:
        await runners.set_draining(connection, runner_id, True)
        row = await _find(connection, runner_id)
    return _changed(board, row)


@router.post("/{runner_id}/resume")
async def resume_runner(board: AuthorizedBoard, runner_id: str) -> RunnerView:
    """Take new attempts again."""
    async with board.database.write() as connection:
        await runners.set_draining(connection, runner_id, False)
        row = await _find(connection, runner_id)
    return _changed(board, row)


@router.put("/{runner_id}/host-fallback")
async def set_host_fallback(
    board: AuthorizedBoard, runner_id: str, request: HostFallbackRequest
) -> RunnerView:
    """Allow or forbid host fallback on this runner (B-53)."""
    async with board.database.write() as connection:
        await runners.set_host_fallback(connection, runner_id, request.enabled)
        row = await _find(connection, runner_id)
    return _changed(board, row)


@router.post("/{runner_id}/reap", status_code=202)
async def reap_runner(
    board: AuthorizedBoard,
    runner_id: str,
    request: Annotated[ReapRequest, Body()] = ReapRequest(),  # noqa: B008 - frozen
) -> ReapView:
    """Ask the connected instance for a cleanup pass; its outcome is listed under `reaps`."""
    async with board.database.write() as connection:
        await _find(connection, runner_id)
        live = _require_online(board, runner_id)
        if request.scope is ReapScope.ATTEMPT:
            await _require_dispatched_here(connection, runner_id, request)
        reap = Reap(
            request_id=board.clock.new_id(),
            runner_id=runner_id,
            runner_instance_id=live.instance_id,
            scope=request.scope,
            attempt_id=request.attempt_id,
            fence=request.fence,
        )
        await actions.add_reap(connection, reap, now=board.clock.utc())
        row = await actions.find_reap(connection, reap.request_id)
    assert row is not None
    board.connections.send(runner_id, live.instance_id, "Reap", reap)
    return _reap_view(row)


@router.get("/{runner_id}/reaps")
async def list_reaps(board: AuthorizedBoard, runner_id: str) -> list[ReapView]:
    """The newest reap requests with their outcomes, newest first."""
    async with board.database.read() as connection:
        await _find(connection, runner_id)
        rows = await actions.reaps_of(connection, runner_id, MAX_REAPS)
    return [_reap_view(row) for row in rows]


def _changed(board: Board, row: RowMapping) -> RunnerView:
    """Tell the runner its settings; if it is away, its next heartbeat is answered with them."""
    message = RunnerSettingsChanged(settings=runners.settings_of(row))
    board.connections.send(row["runner_id"], row["instance_id"], "RunnerSettings", message)
    board.alarm.ring()
    return runner_view(row)


def _require_online(board: Board, runner_id: str) -> LiveRunner:
    live = board.connections.get(runner_id)
    if live is None:
        raise RefusedError(
            f"cannot reach runner {runner_id}: it is not connected", code="runner_offline"
        )
    return live


async def _require_dispatched_here(
    connection: AsyncConnection, runner_id: str, request: ReapRequest
) -> None:
    if request.attempt_id is None or request.fence is None:
        raise RefusedError(
            "cannot reap an attempt: attemptId and fence are needed",
            code="invalid_request",
            field="attemptId" if request.attempt_id is None else "fence",
        )
    row = await dispatches.find(connection, request.attempt_id, request.fence)
    if row is None or row["runner_id"] != runner_id:
        raise RefusedError(
            f"cannot reap attempt {request.attempt_id} fence {request.fence}: it was not"
            f" dispatched to runner {runner_id}",
            code="unknown_dispatch",
        )


def _reap_view(row: RowMapping) -> ReapView:
    return ReapView.model_validate({**row, "runner_instance_id": row["instance_id"]})


async def _find(connection: AsyncConnection, runner_id: str) -> RowMapping:
    row = await runners.find(connection, runner_id)
    if row is None:
        raise RefusedError(
            f"cannot find runner {runner_id}: it never registered", code="unknown_runner"
        )
    return row
