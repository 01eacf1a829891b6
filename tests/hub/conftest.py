"""A database of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from needs import unavailable
from postgresql import PostgreSQL, PostgreSQLMissingError, running_postgresql


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'hub.sqlite3'}"


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A private server."""
    try:
        with running_postgresql() as server:
            yield server
    except PostgreSQLMissingError as error:
        unavailable(f"no PostgreSQL: {error}")


@pytest.fixture
def postgresql_url(postgresql: PostgreSQL) -> Iterator[str]:
    with postgresql.database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """For what must hold on both databases; ``sqlite_url`` where it makes no difference."""
    return str(request.getfixturevalue(f"{request.param}_url"))
