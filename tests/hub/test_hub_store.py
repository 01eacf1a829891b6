"""The schema and its migrations, on SQLite and, as text, on PostgreSQL."""

from __future__ import annotations

import io
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, insert, text

from forge_core.errors import RefusedError, RetryableError
from forge_hub.store import database
from forge_hub.store.database import open_database
from forge_hub.store.tables import legacy_dispatches, metadata, runners

MIGRATIONS = Path(database.__file__).with_name("migrations")


def drift(connection: Connection) -> Sequence[object]:
    return compare_metadata(MigrationContext.configure(connection), metadata)


@pytest.mark.requirement("B-95")
async def test_the_migrations_make_exactly_the_schema(database_url: str) -> None:
    async with open_database(database_url) as store:
        assert await store.read(drift) == []


async def test_a_database_is_opened_again_as_it_was(database_url: str, tmp_path: Path) -> None:
    for _ in range(2):
        async with open_database(database_url) as store:
            await store.ping()
    assert stat.S_IMODE((tmp_path / "hub.sqlite3").stat().st_mode) == 0o600


async def test_commits_survive_a_power_cut(database_url: str) -> None:
    def read(connection: Connection) -> dict[str, object]:
        return {
            name: connection.execute(text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }

    async with open_database(database_url) as store:
        pragmas = await store.read(read)
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


@pytest.mark.requirement("B-95")
def test_postgresql_takes_the_migrations_as_they_are() -> None:
    script_text = io.StringIO()
    config = Config(output_buffer=script_text)
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("forge_dialect", "postgresql")
    command.upgrade(config, "head", sql=True)
    script = script_text.getvalue()
    assert all(f"CREATE TABLE {name} " in script for name in metadata.tables)
    assert script.count("BIGSERIAL") == 2


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
    assert runners.c.host_name.type.process_bind_param("a\0b", None) == "a\ufffdb"  # type: ignore[arg-type]


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
