"""Statements that SQLAlchemy spells per dialect, each made once.

Making a statement costs SQLAlchemy several times what running it costs SQLite, so what is run for
every message of a bridge is kept, here and as constants of the other modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import Column, Connection, Executable, Row, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_new(connection: Connection, table: Table, values: Mapping[str, object]) -> bool:
    """Insert a row; False if one with the same key is there already."""
    return insert_new_returning(connection, table, values, *table.primary_key) is not None


def insert_new_returning(
    connection: Connection,
    table: Table,
    values: Mapping[str, object],
    *columns: Column[Any],
) -> Row[Any] | None:
    """Insert a row and return these columns of it; None if its key is taken."""
    statement = _insert_or_nothing(connection.dialect.name, table, columns)
    return connection.execute(statement, dict(values)).first()


def upsert(
    connection: Connection,
    table: Table,
    key: str,
    values: Mapping[str, object],
    initial: Mapping[str, object],
) -> None:
    """Insert ``values`` and ``initial``, or set ``values`` in the row that is there."""
    statement = _dialect(connection.dialect.name).insert(table).values({**values, **initial})
    changed = {name: value for name, value in values.items() if name != key}
    connection.execute(statement.on_conflict_do_update(index_elements=[key], set_=changed))


@cache
def _insert_or_nothing(dialect: str, table: Table, columns: tuple[Column[Any], ...]) -> Executable:
    insert = _dialect(dialect).insert(table)
    statement: Executable = insert.on_conflict_do_nothing().returning(*columns)
    return statement


def _dialect(name: str) -> Any:
    return sqlite if name == "sqlite" else postgresql
