"""One session as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import anyio
import orjson
from anyio.streams.memory import MemoryObjectReceiveStream

from forge_core.wire.codes import CleanupState
from forge_hub.api import views
from forge_hub.dispatch.board import Board
from forge_hub.feed import Item
from forge_hub.states import SessionState
from forge_hub.store import evidence, sessions

MEDIA_TYPE: Final = "text/event-stream"
KEEP_ALIVE_S: Final = 15.0
MAX_AGE_S: Final = 3_600.0
"""A watcher is sent away after an hour; it resumes with Last-Event-ID."""

_PAGE: Final = 500


async def session_stream(board: Board, session_id: str, *, after: int) -> AsyncIterator[bytes]:
    """What is kept behind the ordinal ``after``, then what happens, until the session is over."""
    ends_at = anyio.current_time() + MAX_AGE_S
    with board.feed.subscribe(session_id) as news:
        tail, _ = board.feed.log_tail(session_id)
        for item in [] if after else tail:
            yield _encode(item)
        async for item in _kept(board, session_id, after):
            after = item.ordinal or after
            yield _encode(item)
        state, over = await _state(board, session_id)
        yield _encode(Item("state", {"state": state.value}))
        while not over and anyio.current_time() < ends_at:
            newest = await _next(news)
            if newest is None:
                return
            if newest.ordinal is not None and newest.ordinal <= after:
                continue
            yield _encode(newest)
            if newest.kind in {"state", "result", "cleanup"}:
                _, over = await _state(board, session_id)


async def _kept(board: Board, session_id: str, after: int) -> AsyncIterator[Item]:
    while True:
        async with board.database.read() as connection:
            rows = await evidence.events_of(connection, session_id, after=after, limit=_PAGE)
        for row in rows:
            view = views.event_view(row)
            yield Item("event", view.to_wire(), ordinal=view.ordinal)
        if len(rows) < _PAGE:
            return
        after = rows[-1]["ordinal"]


async def _next(news: MemoryObjectReceiveStream[Item]) -> Item | None:
    """The next item, or a comment that keeps proxies from closing; None: cut off."""
    try:
        with anyio.fail_after(KEEP_ALIVE_S):
            return await news.receive()
    except TimeoutError:
        return Item("", {})
    except (anyio.EndOfStream, anyio.ClosedResourceError):
        return None


async def _state(board: Board, session_id: str) -> tuple[SessionState, bool]:
    async with board.database.read() as connection:
        row = await sessions.find(connection, session_id)
        assert row is not None
        view, _ = await views.session_view(connection, row)
    return view.state, view.state.is_terminal and view.cleanup is not CleanupState.PENDING


def _encode(item: Item) -> bytes:
    if not item.kind:
        return b": keep-alive\n\n"
    lines = [b"event: " + item.kind.encode()]
    if item.ordinal is not None:
        lines.append(b"id: " + str(item.ordinal).encode())
    lines.append(b"data: " + orjson.dumps(item.data))
    return b"\n".join(lines) + b"\n\n"
