"""One session as server-sent events (WHATWG HTML, section 9.2).

What is kept is read from the database, live as well as later, so a watcher sees the same objects in
the same order whenever it comes, and one that comes back with its cursor misses nothing and is told
nothing twice.  Log chunks and deadlines come straight from the feed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio
import orjson
from anyio.streams.memory import MemoryObjectReceiveStream
from sqlalchemy import Connection, RowMapping

from forge_core.wire.base import MAX_INT
from forge_core.wire.codes import CleanupState, EventType
from forge_hub.api import views
from forge_hub.api.models import CleanupReportView, DispatchView, SessionView
from forge_hub.dispatch.board import Board
from forge_hub.feed import Fleeting, News
from forge_hub.states import EndReason
from forge_hub.store import evidence, sessions

MEDIA_TYPE: Final = "text/event-stream"
KEEP_ALIVE_S: Final = 15.0
MAX_AGE_S: Final = 3_600.0
"""A watcher is sent away after an hour; it resumes with Last-Event-ID."""
GRACE_S: Final = 5.0
"""How long the last words of a runner are waited for once the cleanup is known."""

_PAGE: Final = 500
_KEEP_ALIVE: Final = b": keep-alive\n\n"
_CURSOR: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?")
_Facts = tuple[SessionView, list[CleanupReportView], frozenset[views.Key]]


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far somebody has read: the ordinals of the last event and of the last cleanup report."""

    event: int = 0
    report: int = 0

    @classmethod
    def parse(cls, text: str | None) -> Cursor:
        """Out of ``Last-Event-ID``; what is no cursor of ours is the beginning."""
        found = _CURSOR.fullmatch(text or "")
        return cls(int(found[1]), int(found[2] or 0)) if found else cls()

    def __str__(self) -> str:
        return f"{self.event}.{self.report}"


async def session_stream(board: Board, session_id: str, *, after: Cursor) -> AsyncIterator[bytes]:
    """What is kept behind the cursor, then what happens, until the session's story is told.

    It ends with ``end``.  Without one it was cut off: by a stop of the hub, its age, or a reader
    too slow for the feed.
    """
    watch = _Watch(board, session_id, after)
    sent_away_at = anyio.current_time() + MAX_AGE_S
    with board.feed.subscribe(session_id) as news:
        tail, _ = board.feed.log_tail(session_id)
        for chunk in [] if after != Cursor() else tail:
            yield _encode(chunk.kind, chunk.data)
        async for record in watch.everything():
            yield record
        while not watch.is_over() and anyio.current_time() < sent_away_at:
            try:
                item = await _next(news, watch.patience_s())
            except TimeoutError:
                yield _KEEP_ALIVE
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                return
            else:
                async for record in watch.news(item):
                    yield record
        if watch.is_over():
            async for record in watch.last_words():
                yield record


async def _next(news: MemoryObjectReceiveStream[News], patience_s: float) -> News:
    """The next item.

    :raises TimeoutError: nothing came in time.
    :raises anyio.EndOfStream: the watcher was cut off.
    """
    with anyio.fail_after(patience_s):
        return await news.receive()


class _Watch:
    """What one watcher has been told."""

    def __init__(self, board: Board, session_id: str, after: Cursor) -> None:
        self._board = board
        self._session_id = session_id
        self._cursor = after
        self._revisions: dict[views.Key, int] = {}
        self._state: dict[str, Any] = {}
        self._is_told = False
        self._gives_up_at: float | None = None

    async def everything(self) -> AsyncIterator[bytes]:
        """All that is kept and was not told yet."""
        async for record in self._events(MAX_INT):
            yield record
        for record in await self._facts():
            yield record

    async def news(self, item: News) -> AsyncIterator[bytes]:
        """What came over the feed; events that were told already are nothing new."""
        if isinstance(item, Fleeting):
            yield _encode(item.kind, item.data)
        elif item.event is None:
            for record in await self._facts():
                yield record
        elif item.event > self._cursor.event:
            async for record in self._events(item.event):
                yield record
            if self._gives_up_at is not None:
                for record in await self._facts():
                    yield record

    async def last_words(self) -> AsyncIterator[bytes]:
        """What was committed while the end became known, and the end."""
        async for record in self.everything():
            yield record
        yield _encode("end", self._state)

    def is_over(self) -> bool:
        """Whether nothing more is to come, or was waited for long enough."""
        gives_up_at = self._gives_up_at
        return self._is_told or (gives_up_at is not None and anyio.current_time() >= gives_up_at)

    def patience_s(self) -> float:
        """How long to wait for news before the reader is to hear something."""
        if self._gives_up_at is None:
            return KEEP_ALIVE_S
        return max(0.0, self._gives_up_at - anyio.current_time())

    async def _events(self, until: int) -> AsyncIterator[bytes]:
        def page(connection: Connection) -> Sequence[RowMapping]:
            after = self._cursor.event
            return evidence.events_of(
                connection, self._session_id, after=after, until=until, limit=_PAGE
            )

        while True:
            rows = await self._board.database.read(page)
            for row in rows:
                self._cursor = replace(self._cursor, event=row["ordinal"])
                yield _encode("event", views.event_view(row).to_wire(), self._cursor)
            if len(rows) < _PAGE:
                return

    async def _facts(self) -> list[bytes]:
        """Results, cleanup reports and the state, as far as they are news."""
        view, reports, finished = await self._board.database.read(self._read_facts)
        dispatches = [d for attempt in view.attempts for d in attempt.dispatches]
        told = [*self._results(dispatches), *self._reports(reports), *self._state_of(view)]
        if view.state.is_terminal and view.cleanup is not CleanupState.PENDING:
            self._gives_up_at = self._gives_up_at or anyio.current_time() + GRACE_S
            reported = {(r.attempt_id, r.fence) for r in reports if r.complete}
            self._is_told = all(_is_told(d, finished & reported) for d in dispatches)
        return told

    def _read_facts(self, connection: Connection) -> _Facts:
        row = sessions.find(connection, self._session_id)
        assert row is not None, "sessions are not deleted"
        view, reports = views.session_view(connection, row)
        finished = evidence.dispatches_with(
            connection, self._session_id, EventType.TEARDOWN_FINISHED
        )
        return view, reports, finished

    def _results(self, dispatches: Sequence[DispatchView]) -> Iterator[bytes]:
        for one in dispatches:
            key, result = (one.attempt_id, one.fence), one.result
            if result is not None and result.revision > self._revisions.get(key, 0):
                self._revisions[key] = result.revision
                which = {"attemptId": one.attempt_id, "fence": one.fence}
                yield _encode("result", {**which, **result.to_wire()})

    def _reports(self, reports: Sequence[CleanupReportView]) -> Iterator[bytes]:
        for report in reports:
            if report.complete and report.ordinal > self._cursor.report:
                self._cursor = replace(self._cursor, report=report.ordinal)
                yield _encode("cleanup", report.to_wire(), self._cursor)

    def _state_of(self, view: SessionView) -> Iterator[bytes]:
        fields = {"state", "cleanup", "failure_code"}
        state = view.model_dump(mode="json", by_alias=True, exclude_none=True, include=fields)
        if state != self._state:
            self._state = state
            yield _encode("state", state)


def _is_told(dispatch: DispatchView, torn_down: frozenset[views.Key]) -> bool:
    """Whether all has come that a runner tells of a dispatch that it has settled.

    :param torn_down: of which both the last event and a cleanup report have come.
    """
    if dispatch.started_at is None or dispatch.end_reason is not EndReason.RESULT:
        return True
    result = dispatch.result
    is_final = result is not None and result.cleanup is CleanupState.COMPLETE
    return is_final and (dispatch.attempt_id, dispatch.fence) in torn_down


def _encode(kind: str, data: Mapping[str, Any], cursor: Cursor | None = None) -> bytes:
    lines = [b"event: " + kind.encode()]
    if cursor is not None:
        lines.append(b"id: " + str(cursor).encode())
    lines.append(b"data: " + orjson.dumps(data))
    return b"\n".join(lines) + b"\n\n"
