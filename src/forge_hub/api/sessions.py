"""Sessions: dispatch, look, watch, cancel (B-85, B-95)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Body, Header, Query
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection, RowMapping

from forge_core.errors import RefusedError
from forge_core.wire.codes import CleanupState
from forge_core.wire.limits import measured_size_bytes
from forge_hub.api import views
from forge_hub.api.context import AuthorizedBoard
from forge_hub.api.event_stream import MEDIA_TYPE, Cursor, session_stream
from forge_hub.api.models import (
    CancelRequest,
    CleanupReportView,
    Diagnostics,
    GrantView,
    NewSession,
    SessionSummary,
    SessionView,
)
from forge_hub.attempt_input import AttemptInput
from forge_hub.dispatch.board import Board
from forge_hub.dispatch.endings import cancel
from forge_hub.store import evidence, grants, projects, sessions

MAX_TIMELINE: Final = 2_000
MAX_REPORTS: Final = 50
MAX_AGENT_BYTES: Final = 640 * 1024
"""As JSON.  PID 1 is given a mebibyte, with all secrets and the contract's environment; a bridge
reads as much, with a thousand domains and the rest of the start."""

router = APIRouter(prefix="/api/v1/sessions", tags=["sessions"])


@router.post("", status_code=201)
async def create_session(board: AuthorizedBoard, wanted: NewSession) -> SessionView:
    """Queue a session; it is offered to a runner as soon as one can take it."""
    given = AttemptInput.model_validate(
        wanted.model_dump(exclude={"runner_id", "retries"}, by_alias=False)
    )
    policy = await board.database.read(lambda c: projects.policy_of(c, given.project_id))
    if policy is not None:
        given = policy.applied(given)
    _require_agent_fits(given)
    await _require_sources(board, given)
    session_id, attempt_id = board.clock.new_id(), board.clock.new_id()
    now = board.clock.utc()
    await board.database.write(
        lambda connection: sessions.create(
            connection,
            given,
            session_id=session_id,
            attempt_id=attempt_id,
            runner_id=wanted.runner_id,
            retries=wanted.retries,
            now=now,
        )
    )
    board.alarm.ring()
    return await _view(board, session_id)


@router.get("")
async def list_sessions(
    board: AuthorizedBoard, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> list[SessionSummary]:
    """The newest sessions, newest first."""
    rows = await board.database.read(lambda connection: sessions.newest(connection, limit))
    return [views.session_summary(row) for row in rows]


@router.get("/{session_id}")
async def read_session(board: AuthorizedBoard, session_id: str) -> SessionView:
    """State, attempts, dispatches, placement refusals, result and cleanup state."""
    return await _view(board, session_id)


@router.get("/{session_id}/diagnostics")
async def read_diagnostics(board: AuthorizedBoard, session_id: str) -> Diagnostics:
    """The lifecycle as a timeline, the inventory, cleanup reports, and the tail of the log."""

    def read(
        connection: Connection,
    ) -> tuple[SessionView, Sequence[CleanupReportView], Sequence[RowMapping], list[GrantView]]:
        view, reports = views.session_view(connection, _find(connection, session_id))
        events = evidence.events_of(connection, session_id, limit=MAX_TIMELINE + 1)
        keys = [(d.attempt_id, d.fence) for a in view.attempts for d in a.dispatches]
        given_out = map(views.grant_view, grants.of_dispatches(connection, keys))
        return view, reports, events, list(given_out)

    view, reports, events, given_out = await board.database.read(read)
    tail, dropped_bytes = board.feed.log_tail(session_id)
    return Diagnostics(
        session=view,
        timeline=tuple(views.event_view(e) for e in events[:MAX_TIMELINE]),
        timeline_truncated=len(events) > MAX_TIMELINE,
        inventory=views.inventory_of(events),
        cleanup_reports=tuple(reports[-MAX_REPORTS:]),
        grants=tuple(given_out),
        cleanup_pending=view.cleanup is CleanupState.PENDING,
        log_tail="".join(item.data["payload"]["text"] for item in tail),
        log_dropped_bytes=dropped_bytes,
    )


@router.get(
    "/{session_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {}}}},
)
async def watch_session(
    board: AuthorizedBoard,
    session_id: str,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Server-sent events: `event`, `log`, `deadline`, `state`, `result`, `cleanup`, and `end` when
    the session has ended and its teardown is known.
    """
    await board.database.read(lambda connection: _find(connection, session_id))
    board.feed.require_room(session_id)
    stream = session_stream(board, session_id, after=Cursor.parse(last_event_id))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(stream, media_type=MEDIA_TYPE, headers=headers)


@router.post("/{session_id}/cancel", status_code=202)
async def cancel_session(
    board: AuthorizedBoard,
    session_id: str,
    request: Annotated[CancelRequest, Body()] = CancelRequest(),  # noqa: B008 - frozen
) -> SessionView:
    """Ask for the end; what runs is `cancelling` until its runner says how it ended."""
    await cancel(board, session_id, request.reason)
    return await _view(board, session_id)


async def _view(board: AuthorizedBoard, session_id: str) -> SessionView:
    view, _ = await board.database.read(
        lambda connection: views.session_view(connection, _find(connection, session_id))
    )
    return view


def _find(connection: Connection, session_id: str) -> RowMapping:
    row = sessions.find(connection, session_id)
    if row is None:
        raise RefusedError(
            f"cannot read session {session_id}: there is none", code="unknown_session"
        )
    return row


async def _require_sources(board: Board, given: AttemptInput) -> None:
    """What a runner will ask for can be had now; what it gets is read when it asks."""
    if given.secrets:
        if board.secrets is None:
            raise RefusedError(
                "cannot dispatch this session with secrets: the hub has no source of them; set"
                " FORGE_HUB_SECRETS_DIRECTORY",
                code="no_secret_source",
                field="secrets",
            )
        await board.secrets.secrets(given.project_id, given.secrets)
    if given.publishes:
        if board.credentials is None:
            raise RefusedError(
                "cannot dispatch this session with bridge_push: the hub has no publish"
                " credentials; set FORGE_HUB_CREDENTIALS_DIRECTORY",
                code="no_credential_source",
                field="publication",
            )
        await board.credentials.credential(given.project_id, given.repository)


def _require_agent_fits(given: AttemptInput) -> None:
    """PID 1 can be given it, and a bridge reads its start (protocol.md, Size)."""
    size = measured_size_bytes(given.agent.to_wire())
    if size > MAX_AGENT_BYTES:
        raise RefusedError(
            f"cannot dispatch this session: its agent has {size} bytes as JSON,"
            f" {MAX_AGENT_BYTES} is the most; shorten arguments, environment and prompt",
            code="message_too_large",
            field="agent",
        )
