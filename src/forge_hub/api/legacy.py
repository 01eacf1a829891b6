"""Protocol v1: one command on a runner's host (B-03)."""

from __future__ import annotations

from fastapi import APIRouter

from forge_core.errors import RefusedError
from forge_core.wire.from_hub import Cancel, Dispatch
from forge_core.wire.limits import MAX_INBOUND_BYTES, measured_size_bytes
from forge_hub.api.context import AuthorizedBoard
from forge_hub.api.models import LegacyDispatchView, LegacyResultView, NewLegacyDispatch
from forge_hub.dispatch.board import Board
from forge_hub.store import actions

router = APIRouter(prefix="/api/v1/dispatches", tags=["legacy"])


@router.post("", status_code=202)
async def create_dispatch(board: AuthorizedBoard, wanted: NewLegacyDispatch) -> LegacyDispatchView:
    """Send a command to a connected runner; it is not sent again if the runner is lost."""
    live = board.connections.get(wanted.runner_id)
    if live is None:
        raise RefusedError(
            f"cannot reach runner {wanted.runner_id}: it is not connected", code="runner_offline"
        )
    dispatch = Dispatch(
        dispatch_id=board.clock.new_id(),
        repository=wanted.repository,
        command=wanted.command,
        env=wanted.env,
        timeout_ms=wanted.timeout_ms,
    )
    if measured_size_bytes(dispatch.to_wire()) > MAX_INBOUND_BYTES:
        raise RefusedError(
            f"cannot send this command: {MAX_INBOUND_BYTES} bytes is the most",
            code="message_too_large",
        )
    runner_id, now = live.runner_id, board.clock.utc()
    await board.database.write(
        lambda connection: actions.add_legacy(connection, dispatch, runner_id=runner_id, now=now)
    )
    board.connections.send(live.runner_id, live.instance_id, "Dispatch", dispatch)
    return await _view(board, dispatch.dispatch_id)


@router.get("/{dispatch_id}")
async def read_dispatch(board: AuthorizedBoard, dispatch_id: str) -> LegacyDispatchView:
    """A command and, when it has come, its result."""
    return await _view(board, dispatch_id)


@router.post("/{dispatch_id}/cancel", status_code=202)
async def cancel_dispatch(board: AuthorizedBoard, dispatch_id: str) -> LegacyDispatchView:
    """Ask the runner to end the command."""
    view = await _view(board, dispatch_id)
    live = board.connections.get(view.runner_id)
    if live is None:
        raise RefusedError(
            f"cannot reach runner {view.runner_id}: it is not connected", code="runner_offline"
        )
    cancel = Cancel(attempt_id=dispatch_id, fence=0, reason="cancelled by the API")
    board.connections.send(live.runner_id, live.instance_id, "Cancel", cancel)
    return view


async def _view(board: Board, dispatch_id: str) -> LegacyDispatchView:
    row, result = await board.database.read(
        lambda connection: (
            actions.find_legacy(connection, dispatch_id),
            actions.find_legacy_result(connection, dispatch_id),
        )
    )
    if row is None:
        raise RefusedError(
            f"cannot find dispatch {dispatch_id}: there is none", code="unknown_dispatch"
        )
    shown = None if result is None else LegacyResultView.model_validate(dict(result))
    return LegacyDispatchView.model_validate({**row, "result": shown})
