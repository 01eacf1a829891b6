"""How a transaction is run: SQLite in a worker thread, PostgreSQL on the event loop.

The statements are the same, written once against SQLAlchemy's plain ``Connection``.  A SQLite
transaction takes one trip to a thread and back, however many statements it has.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeVar

import anyio
import anyio.to_thread
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from forge_core.errors import RefusedError
from forge_hub.store.group_commit import Work

T = TypeVar("T")

SQLITE: Final = "sqlite"
POSTGRESQL: Final = "postgresql+asyncpg"

_BUSY_TIMEOUT_MS: Final = 5_000
_CONNECT_TIMEOUT_S: Final = 10.0
_COMMAND_TIMEOUT_S: Final = 30.0
_READERS: Final = 8


class Transactions(Protocol):
    """Runs work in a transaction of its own; every wait in it is bounded."""

    async def write(self, work: Work[T]) -> T:
        """Commit what ``work`` did, or roll it back if it raised."""

    async def read(self, work: Work[T]) -> T:
        """Let ``work`` see one state of the database."""

    async def close(self) -> None:
        """Close every connection."""


def transactions(url: URL) -> Transactions:
    """For this URL; connects when first asked.

    :raises RefusedError: code ``driver_missing``.
    """
    if url.drivername == SQLITE:
        return _Sqlite(url)
    try:
        return _PostgreSQL(url)
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"cannot open the database: {error.name} is not installed;"
            " install forge-bridge[hub,postgresql]",
            code="driver_missing",
        ) from error


class _Sqlite:
    """One writer, because SQLite has one; the readers do not wait for it (WAL)."""

    def __init__(self, url: URL) -> None:
        self._engine: Engine = create_engine(
            url,
            hide_parameters=True,  # an error's text is logged; what was written may be private
            pool_size=_READERS + 1,
            max_overflow=0,
            connect_args={"check_same_thread": False},  # one thread at a time, not always the same
        )
        event.listen(self._engine, "connect", _prepare_sqlite)
        event.listen(self._engine, "begin", _begin_sqlite)
        self._writer = self._engine.execution_options(forge_begin="IMMEDIATE")
        self._write_limit = anyio.CapacityLimiter(1)
        self._read_limit = anyio.CapacityLimiter(_READERS)

    async def write(self, work: Work[T]) -> T:
        def run() -> T:
            with self._writer.begin() as connection:
                return work(connection)

        return await anyio.to_thread.run_sync(run, limiter=self._write_limit)

    async def read(self, work: Work[T]) -> T:
        def run() -> T:
            with self._engine.connect() as connection:
                return work(connection)

        return await anyio.to_thread.run_sync(run, limiter=self._read_limit)

    async def close(self) -> None:
        await anyio.to_thread.run_sync(self._engine.dispose)


def _prepare_sqlite(connection: Any, _record: object) -> None:
    """Own the transactions, and make a commit survive a power cut.

    ``synchronous=FULL``: an acknowledgement ends a replay for good, so what it acknowledges must
    be on the disk; WAL with NORMAL may lose the last commits.
    """
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        f"busy_timeout={_BUSY_TIMEOUT_MS}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that turns into a writer late can fail at once with SQLITE_BUSY.
    kind = connection.get_execution_options().get("forge_begin", "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {kind}")


class _PostgreSQL:
    """Shielded: asyncpg gives up a connection that is cancelled in the middle of a statement."""

    def __init__(self, url: URL) -> None:
        self._engine: AsyncEngine = create_async_engine(
            url,
            hide_parameters=True,
            pool_pre_ping=True,
            connect_args={"timeout": _CONNECT_TIMEOUT_S, "command_timeout": _COMMAND_TIMEOUT_S},
        )
        # READ COMMITTED would show a reader another state with each statement.
        self._reader = self._engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )

    async def write(self, work: Work[T]) -> T:
        with anyio.CancelScope(shield=True):
            async with self._engine.begin() as connection:
                value = await connection.run_sync(work)
        return value

    async def read(self, work: Work[T]) -> T:
        with anyio.CancelScope(shield=True):
            async with self._reader.connect() as connection:
                value = await connection.run_sync(work)
        return value

    async def close(self) -> None:
        await self._engine.dispose()
