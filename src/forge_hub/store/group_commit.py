"""Many writes, one commit: what arrives while the disk is busy shares the next transaction."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar, cast

import anyio
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

T = TypeVar("T")

Work = Callable[[Connection], T]
"""Statements of one transaction.  It touches nothing but its connection, for it may run in a worker
thread, and a second time when another write of its group has failed."""

MAX_GROUP: Final = 128


class _Write(Generic[T]):
    """One caller's work, and what came of it."""

    __slots__ = ("_error", "_value", "is_settled", "woken", "work")

    def __init__(self, work: Work[T]) -> None:
        self.work = work
        self.woken = anyio.Event()
        self.is_settled = False
        self._value: T | None = None
        self._error: Exception | None = None

    def succeed(self, value: T) -> None:
        self._value, self.is_settled = value, True

    def fail(self, error: Exception) -> None:
        self._error, self.is_settled = error, True

    @property
    def outcome(self) -> T:
        """The work's value, once it is committed; raises what the work or the commit raised."""
        assert self.is_settled, "a write is answered when its transaction is over"
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


class GroupCommit:
    """Runs writes in the order of arrival, as many in one transaction as wait for it.

    Whoever finds nobody writing leads: it commits all that wait, itself among them, and then hands
    the lead to the first that came meanwhile.  So there is no task of its own and no timer, a
    single write waits for nothing, and the more there are the larger the groups.

    Each write succeeds or fails by itself: when one raises, the group is rolled back and each of
    its writes runs again alone.  Only a database that is away fails all of them.

    :param transact: runs work in a transaction and returns when that is committed.
    """

    def __init__(self, transact: Callable[[Work[list[Any]]], Awaitable[list[Any]]]) -> None:
        self._transact = transact
        self._waiting: deque[_Write[Any]] = deque()
        self._is_led = False

    async def run(self, work: Work[T]) -> T:
        """Return what ``work`` returns, once that is committed; or raise what it raises.

        Shielded: a write that waits here is carried through although its caller is cancelled.
        """
        write = _Write(work)
        self._waiting.append(write)
        with anyio.CancelScope(shield=True):
            if self._is_led:
                await write.woken.wait()
            if not write.is_settled:
                await self._lead()
        return write.outcome

    async def _lead(self) -> None:
        self._is_led = True
        group = [self._waiting.popleft() for _ in range(min(MAX_GROUP, len(self._waiting)))]
        try:
            await self._commit(group)
        finally:
            for write in group:
                write.woken.set()
            if self._waiting:
                self._waiting[0].woken.set()
            else:
                self._is_led = False

    async def _commit(self, group: Sequence[_Write[Any]]) -> None:
        try:
            values = await self._transact(lambda connection: [w.work(connection) for w in group])
        except Exception as error:  # noqa: BLE001 - raised to each caller, as its own
            if len(group) == 1 or _is_away(error):
                for write in group:
                    write.fail(error)
                return
            for write in group:
                await self._commit([write])
        else:
            for write, value in zip(group, values, strict=True):
                write.succeed(value)


def _is_away(error: Exception) -> bool:
    """Whether the database itself failed, and not one piece of work."""
    if isinstance(error, OSError | OperationalError | InterfaceError):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated
