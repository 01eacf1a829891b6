"""A database of its own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'hub.sqlite3'}"
