"""Statements that SQLAlchemy spells per dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Column, Row, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection


async def insert_new(
    connection: AsyncConnection, table: Table, values: Mapping[str, object]
) -> bool:
    """Insert a row; False if one with the same key is there already."""
    return await insert_new_returning(connection, table, values, *table.primary_key) is not None


async def insert_new_returning(
    connection: AsyncConnection,
    table: Table,
    values: Mapping[str, object],
    *columns: Column[Any],
) -> Row[Any] | None:
    """Insert a row and return these columns of it; None if its key is taken."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(table).values(values).on_conflict_do_nothing().returning(*columns)
    return (await connection.execute(statement)).first()


async def upsert(
    connection: AsyncConnection,
    table: Table,
    key: str,
    values: Mapping[str, object],
    initial: Mapping[str, object],
) -> None:
    """Insert ``values`` and ``initial``, or set ``values`` in the row that is there."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(table).values({**values, **initial})
    changed = {name: value for name, value in values.items() if name != key}
    await connection.execute(statement.on_conflict_do_update(index_elements=[key], set_=changed))
