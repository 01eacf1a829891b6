"""The schema and its migrations, and what a transaction promises, on SQLite and PostgreSQL."""

from __future__ import annotations

import stat
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from scripted_bridge import on_stage
from sqlalchemy import Connection, insert, text

from forge_core.errors import RefusedError, RetryableError
from forge_hub.store.database import open_database
from forge_hub.store.tables import legacy_dispatches, metadata
from postgresql import PostgreSQL


def drift(connection: Connection) -> Sequence[object]:
    found: Sequence[object] = compare_metadata(MigrationContext.configure(connection), metadata)
    return found


@pytest.mark.requirement("B-95")
async def test_the_migrations_make_exactly_the_schema(database_url: str) -> None:
    async with open_database(database_url) as store:
        assert await store.read(drift) == []


async def test_a_database_is_opened_again_as_it_was(database_url: str) -> None:
    for _ in range(2):
        async with open_database(database_url) as store:
            await store.ping()


async def test_a_new_file_is_its_owners_alone(sqlite_url: str, tmp_path: Path) -> None:
    async with open_database(sqlite_url):
        modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.glob("hub.sqlite3*")}
    assert modes == {0o600}


async def test_commits_survive_a_power_cut(sqlite_url: str) -> None:
    def read(connection: Connection) -> dict[str, object]:
        return {
            name: connection.execute(text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }

    async with open_database(sqlite_url) as store:
        pragmas = await store.read(read)
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


async def test_an_exception_undoes_the_whole_transaction(database_url: str) -> None:
    values = {
        "dispatch_id": "d1",
        "runner_id": "nobody",
        "repository": "repo",
        "command": ["true"],
        "timeout_ms": 1,
        "created_at": "2026-11-29T14:00:00.000Z",
    }
    async with open_database(database_url) as store:
        with pytest.raises(RetryableError, match="cannot write the hub's database"):
            await store.write(lambda c: c.execute(insert(legacy_dispatches).values(values)))
        count = text("SELECT count(*) FROM legacy_dispatches")
        assert await store.read(lambda c: c.execute(count).scalar_one()) == 0


async def test_a_nul_in_a_text_is_shown_and_does_not_stop_a_replay(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.connect()
        assert (await bridge.register(hostName="a\0b"))["accepted"]
        assert (await stage.api.get("/api/v1/runners/r1")).json()["hostName"] == "a\ufffdb"


@pytest.mark.requirement("B-95")
async def test_a_reader_sees_one_state_of_the_database(database_url: str) -> None:
    count = text("SELECT count(*) FROM notes")

    async def write_elsewhere() -> None:
        async with open_database(database_url) as store:
            await store.write(lambda c: c.execute(text("INSERT INTO notes VALUES ('new')")))

    def read_twice(connection: Connection) -> tuple[int, int]:
        first = connection.execute(count).scalar_one()
        with ThreadPoolExecutor(1) as elsewhere:
            elsewhere.submit(anyio.run, write_elsewhere).result(20)
        return first, connection.execute(count).scalar_one()

    async with open_database(database_url) as store:
        await store.write(lambda c: c.execute(text("CREATE TABLE notes (note TEXT)")))
        assert await store.read(read_twice) == (0, 0)
        assert await store.read(lambda c: c.execute(count).scalar_one()) == 1


@pytest.mark.parametrize(
    "url",
    [
        "mysql://user:hunter2@h/d",
        "sqlite://",
        "sqlite+aiosqlite:///h.sqlite3",
        "hunter2",
        "sqlite:///:memory:",
    ],
)
async def test_other_databases_are_refused_without_telling_the_url(url: str) -> None:
    with pytest.raises(RefusedError, match="cannot open the database") as caught:
        async with open_database(url):
            pass
    assert "hunter2" not in str(caught.value)


async def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(RefusedError, match=r"asyncpg is not installed; install .*postgresql"):
        async with open_database("postgresql+asyncpg://forge:hunter2@localhost/hub"):
            pass


@pytest.mark.requirement("B-95")
async def test_a_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    url = f"postgresql+asyncpg://forge:hunter2@/hub?host={tmp_path}"
    with pytest.raises(RetryableError, match="cannot migrate the hub's database") as caught:
        async with open_database(url):
            pass
    assert "hunter2" not in str(caught.value)


@pytest.mark.requirement("B-95")
async def test_a_server_that_dropped_its_connections_is_used_again(
    postgresql: PostgreSQL, postgresql_url: str
) -> None:
    end_all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'hub%'"
    backend = text("SELECT pg_backend_pid()")
    async with open_database(postgresql_url) as store:
        for ask in (store.write, store.read):
            first = await ask(lambda c: c.execute(backend).scalar_one())
            postgresql.call("psql", "--dbname=postgres", f"--command={end_all}")
            assert await ask(lambda c: c.execute(backend).scalar_one()) != first
