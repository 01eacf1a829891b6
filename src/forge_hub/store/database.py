"""The hub's database: its address, its schema, and its transactions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, TypeVar

import anyio
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from forge_core.errors import RefusedError, RetryableError
from forge_hub.store.engines import POSTGRESQL, SQLITE, Transactions, transactions
from forge_hub.store.group_commit import GroupCommit, Work

T = TypeVar("T")

_DRIVERS: Final = frozenset({SQLITE, POSTGRESQL})
_PING: Final = text("SELECT 1")


class Database:
    """Transactions on one database; made by :func:`open_database`."""

    def __init__(self, engine: Transactions) -> None:
        self._engine = engine
        self._group = GroupCommit(engine.write)

    async def write(self, work: Work[T]) -> T:
        """What ``work`` returns, once it is committed; writes that wait together share a commit.

        Writes take effect in the order in which they were asked for, each wholly or not at all.

        :raises RetryableError: the database cannot be written now.
        """
        with _translated("write"):
            return await self._group.run(work)

    async def read(self, work: Work[T]) -> T:
        """What ``work`` returns; it sees one state of the database and changes nothing.

        :raises RetryableError: the database cannot be read now.
        """
        with _translated("read"):
            return await self._engine.read(work)

    async def ping(self) -> None:
        """One round trip.

        :raises RetryableError: the database does not answer.
        """
        await self.read(lambda connection: connection.execute(_PING).scalar_one())


@asynccontextmanager
async def open_database(url: str) -> AsyncIterator[Database]:
    """Connect, bring the schema up to date, and close at the end.

    :param url: ``sqlite:///<path>`` or ``postgresql+asyncpg://…``.
    :raises RefusedError: code ``invalid_database_url``; the text never repeats the URL, which
        may hold a password.  Code ``driver_missing``.
    :raises RetryableError: the database cannot be reached or migrated.
    """
    parsed = _parsed(url)
    engine = transactions(parsed)
    try:
        with _translated("migrate"):
            await _create_privately(parsed)
            await engine.write(migrate)
        yield Database(engine)
    finally:
        with anyio.CancelScope(shield=True):
            await engine.close()


async def _create_privately(url: URL) -> None:
    """A new SQLite file is its owner's alone; the files beside it get the same mode."""
    if url.drivername == SQLITE and url.database is not None:
        await anyio.Path(url.database).touch(mode=0o600)


def migrate(connection: Connection) -> None:
    """Run what is missing of ``store/migrations``, inside the caller's transaction."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _parsed(url: str) -> URL:
    refusal = RefusedError(
        "cannot open the database: its URL must begin with sqlite:/// or postgresql+asyncpg://",
        code="invalid_database_url",
        field="database_url",
    )
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise refusal from None
    if parsed.drivername not in _DRIVERS:
        raise refusal
    if parsed.drivername == SQLITE and parsed.database in {None, "", ":memory:"}:
        raise RefusedError(
            "cannot open the database: an in-memory SQLite cannot be shared by connections;"
            " name a file",
            code="invalid_database_url",
            field="database_url",
        )
    return parsed


@contextmanager
def _translated(verb: str) -> Iterator[None]:
    """Turn the library's errors into ours at the door."""
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        cause = getattr(error, "orig", None) or error
        raise RetryableError(
            f"cannot {verb} the hub's database: {type(cause).__name__}: {cause}"
        ) from error
