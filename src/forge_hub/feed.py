"""What happens right now, for people who watch: bounded, and not durable by contract.

Log chunks and deadlines live only here.  Of everything else the feed says just that it is there:
watchers read it in the database, so that what they see live is what they would see later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from forge_core.errors import RetryableError

MAX_LOG_BYTES_PER_SESSION: Final = 1024 * 1024
MAX_LOG_BYTES: Final = 64 * 1024 * 1024
MAX_SUBSCRIBERS: Final = 256
MAX_UNREAD: Final = 1024


@dataclass(frozen=True, slots=True)
class Fleeting:
    """Something that is told once and kept nowhere.

    :param kind: ``log`` or ``deadline``.
    """

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """Something about a session was committed.

    :param event: the ordinal of a durable event; None: anything else.
    """

    event: int | None = None


News = Fleeting | Change


@dataclass(slots=True)
class _Log:
    items: deque[tuple[Fleeting, int]] = field(default_factory=deque)
    size_bytes: int = 0
    dropped_bytes: int = 0


class Feed:
    """Publishes to the subscribers of a session, and keeps the tail of its log."""

    def __init__(self) -> None:
        self._subscribers: dict[str, set[MemoryObjectSendStream[News]]] = {}
        self._count = 0
        self._logs: OrderedDict[str, _Log] = OrderedDict()
        self._log_bytes = 0
        self._closed = False

    def publish(self, session_id: str, news: News) -> None:
        """Tell all who watch; one that reads too slowly is cut off and may come back."""
        for stream in list(self._subscribers.get(session_id, ())):
            try:
                stream.send_nowait(news)
            except (anyio.WouldBlock, anyio.BrokenResourceError):
                stream.close()

    def publish_log(self, session_id: str, item: Fleeting, size_bytes: int) -> None:
        """Tell all who watch, and keep the chunk as far as the bounds allow."""
        log = self._logs.setdefault(session_id, _Log())
        self._logs.move_to_end(session_id)
        log.items.append((item, size_bytes))
        self._grow(log, size_bytes)
        while log.size_bytes > MAX_LOG_BYTES_PER_SESSION:
            _, freed = log.items.popleft()
            log.dropped_bytes += freed
            self._grow(log, -freed)
        while self._log_bytes > MAX_LOG_BYTES:
            _, oldest = self._logs.popitem(last=False)
            self._log_bytes -= oldest.size_bytes
        self.publish(session_id, item)

    def log_tail(self, session_id: str) -> tuple[list[Fleeting], int]:
        """What is still kept of a session's log, and how many bytes before it are not."""
        log = self._logs.get(session_id)
        return ([item for item, _ in log.items], log.dropped_bytes) if log else ([], 0)

    def require_room(self, session_id: str) -> None:
        """Refuse one watcher too many.

        :raises RetryableError: there are too many, or the hub is stopping.
        """
        if self._closed or self._count >= MAX_SUBSCRIBERS:
            raise RetryableError(
                f"cannot watch session {session_id}: the hub has no room for one more watcher",
                retry_after_ms=5_000,
            )

    @contextmanager
    def subscribe(self, session_id: str) -> Iterator[MemoryObjectReceiveStream[News]]:
        """A stream of what is published from now on; it ends when the hub stops."""
        sender, receiver = anyio.create_memory_object_stream[News](MAX_UNREAD)
        if self._closed:
            sender.close()
        group = self._subscribers.setdefault(session_id, set())
        group.add(sender)
        self._count += 1
        try:
            with sender, receiver:
                yield receiver
        finally:
            self._count -= 1
            group.discard(sender)
            if not group:
                self._subscribers.pop(session_id, None)

    def close(self) -> None:
        """End every subscription."""
        self._closed = True
        for group in list(self._subscribers.values()):
            for stream in list(group):
                stream.close()

    def _grow(self, log: _Log, size_bytes: int) -> None:
        log.size_bytes += size_bytes
        self._log_bytes += size_bytes
