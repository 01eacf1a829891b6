"""The engine, its transactions and its migrations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from forge_core.errors import RefusedError, RetryableError

_BUSY_TIMEOUT_MS: Final = 5_000
_DRIVERS: Final = frozenset({"sqlite+aiosqlite", "postgresql+asyncpg"})


class Database:
    """Transactions on one database; made by :func:`open_database`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._reader = engine
        self._writer = engine.execution_options(forge_begin="IMMEDIATE")
        # SQLite has one writer; those that wait here hold no connection and no thread.
        self._turn = anyio.Semaphore(1 if engine.dialect.name == "sqlite" else 16)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that is committed at the end, or rolled back by an exception.

        Shielded: one that began is finished, so that a cancelled caller never leaves a
        connection in the middle of a statement.  Nothing but the database is awaited inside.

        :raises RetryableError: the database cannot be written now.
        """
        async with self._turn:
            with anyio.CancelScope(shield=True), _translated("write"):
                async with self._writer.begin() as connection:
                    yield connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that sees one state of the database and changes nothing.

        :raises RetryableError: the database cannot be read now.
        """
        with anyio.CancelScope(shield=True), _translated("read"):
            async with self._reader.connect() as connection:
                yield connection

    async def ping(self) -> None:
        """One round trip.

        :raises RetryableError: the database does not answer.
        """
        async with self.read() as connection:
            await connection.execute(text("SELECT 1"))


@asynccontextmanager
async def open_database(url: str) -> AsyncIterator[Database]:
    """Connect, bring the schema up to date, and close at the end.

    :param url: ``sqlite+aiosqlite:///<path>`` or ``postgresql+asyncpg://…``.
    :raises RefusedError: code ``invalid_database_url``; the text never repeats the URL, which
        may hold a password.
    :raises RetryableError: the database cannot be reached or migrated.
    """
    engine = _engine(url)
    try:
        # An aiosqlite connection that is being opened goes on in its thread, whoever is cancelled.
        is_file = engine.dialect.name == "sqlite"
        with anyio.CancelScope(shield=is_file), _translated("migrate"):
            await _create_privately(engine)
            async with engine.execution_options(forge_begin="IMMEDIATE").begin() as connection:
                await connection.run_sync(migrate)
        yield Database(engine)
    finally:
        with anyio.CancelScope(shield=True):
            await engine.dispose()


async def _create_privately(engine: AsyncEngine) -> None:
    """A new SQLite file is its owner's alone; the files beside it get the same mode."""
    path = engine.url.database
    if engine.dialect.name == "sqlite" and path is not None:
        await anyio.Path(path).touch(mode=0o600)


def migrate(connection: Connection) -> None:
    """Run what is missing of ``store/migrations``, inside the caller's transaction."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _engine(url: str) -> AsyncEngine:
    refusal = RefusedError(
        "cannot open the database: its URL must begin with sqlite+aiosqlite:///"
        " or postgresql+asyncpg://",
        code="invalid_database_url",
        field="database_url",
    )
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise refusal from None
    if parsed.drivername not in _DRIVERS:
        raise refusal
    if parsed.get_backend_name() == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise RefusedError(
            "cannot open the database: an in-memory SQLite cannot be shared by connections;"
            " name a file",
            code="invalid_database_url",
            field="database_url",
        )
    engine = create_async_engine(
        parsed,
        pool_pre_ping=parsed.get_backend_name() != "sqlite",
        hide_parameters=True,  # an error's text is logged; what was written may be private
    )
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


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


class _translated:  # noqa: N801 - reads as a word in a with statement
    """Turns the library's errors into ours at the door."""

    def __init__(self, verb: str) -> None:
        self._verb = verb

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, SQLAlchemyError | OSError):
            cause = getattr(error, "orig", None) or error
            raise RetryableError(
                f"cannot {self._verb} the hub's database: {type(cause).__name__}: {cause}"
            ) from error
